"""Which kernel is chosen where, and that each choice computes what it should.

B sequences, L positions, H heads, K head width.
"""

import math
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import OptimizerConfig

CPU = torch.device("cpu")
SHAPE_BLHK = (2, 5, 3, 4)


def plain_attention(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    scores = torch.einsum("bqhk,bshk->bhqs", q_BLHK, k_BLHK) / math.sqrt(q_BLHK.shape[-1])
    return torch.einsum("bhqs,bshk->bqhk", scores.exp() / scores.exp().sum(-1, keepdim=True), v_BLHK)


def make_qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SHAPE_BLHK, generator=generator, dtype=torch.float64) for _ in range(3)]


def make_gradients(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(7, generator=generator, dtype=dtype) for _ in range(count)]


def update(optimizer: torch.optim.Optimizer, p: Tensor, gradient: Tensor) -> None:
    p.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("is_installed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu", "mps"])
def test_flash_attn_is_chosen_where_it_can_run(device: str, dtype: torch.dtype, is_installed: bool) -> None:
    can_run = device == "cuda" and dtype in (torch.bfloat16, torch.float16) and is_installed
    chosen = kernels.attention_kernel(device, dtype, installed=lambda module: is_installed and module == "flash_attn")
    assert chosen == ("flash-attn" if can_run else "sdpa")


@pytest.mark.parametrize(
    ("device", "sharded", "found", "chosen"),
    [
        ("cuda", False, ["apex", "apex.optimizers"], "apex"),
        ("cuda", True, ["apex", "apex.optimizers"], "torch"),  # an engine cuts the parameters
        ("cuda", False, ["apex"], "torch"),  # the other project of that name
        ("cuda", False, [], "torch"),
        ("cpu", False, ["apex", "apex.optimizers"], "torch"),
    ],
)
def test_apex_is_chosen_where_it_can_run(device: str, sharded: bool, found: list[str], chosen: str) -> None:
    assert kernels.adamw_kernel(device, sharded, installed=found.__contains__) == chosen


@pytest.mark.parametrize(
    ("device", "found", "chosen"),
    [
        ("cuda", ["triton"], "triton"),
        ("cuda", [], "torch"),
        ("cpu", ["triton"], "torch"),
        ("meta", ["triton"], "torch"),
    ],
)
def test_triton_is_chosen_where_it_can_run(device: str, found: list[str], chosen: str) -> None:
    assert kernels.row_kernel(device, installed=found.__contains__) == chosen


def test_description_on_a_cpu() -> None:
    expected = "attention by sdpa, softmax of the head by torch, AdamW by torch"
    assert kernels.describe(CPU, torch.bfloat16) == expected


def test_sdpa_is_bidirectional_softmax_attention() -> None:
    qkv = make_qkv()
    # float64 sums of five terms of order one
    torch.testing.assert_close(kernels.attention(*qkv), plain_attention(*qkv), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kv_heads", [1, 2, 3])
def test_neighbouring_heads_share_keys_and_values(kv_heads: int) -> None:
    q, k, v = (x.repeat(1, 1, 2, 1) for x in make_qkv())
    k, v = k[:, :, :kv_heads], v[:, :, :kv_heads]
    spread = [x.repeat_interleave(6 // kv_heads, dim=2) for x in (k, v)]
    torch.testing.assert_close(kernels.attention(q, k, v), plain_attention(q, *spread), rtol=0, atol=1e-14)


def test_flash_attn_is_called_as_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v as (B, L, H, K), every position attending to every other, the scale 1 / sqrt(K), no dropout."""
    calls: list[dict[str, Any]] = []

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Tensor:
        calls.append(locals().copy())
        return plain_attention(q, k, v)

    module = ModuleType("flash_attn")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(kernels, "attention_kernel", lambda _device, _dtype: "flash-attn")
    qkv = make_qkv()
    assert torch.equal(kernels.attention(*qkv), plain_attention(*qkv))
    (call,) = calls
    assert call["q"].shape == call["k"].shape == call["v"].shape == SHAPE_BLHK
    assert (call["causal"], call["dropout_p"], call["window_size"]) == (False, 0.0, (-1, -1))
    assert call["softmax_scale"] in (None, SHAPE_BLHK[-1] ** -0.5)
    assert (call["softcap"], call["alibi_slopes"], call["return_attn_probs"]) == (0.0, None, False)


def test_adamw_is_the_textbook_update() -> None:
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2)
    p = torch.linspace(-1, 1, 7, dtype=torch.float64)
    expected, m, v = p.clone(), torch.zeros_like(p), torch.zeros_like(p)
    optimizer = kernels.adamw([p], config, CPU)
    for n, gradient in enumerate(make_gradients(4), start=1):
        update(optimizer, p, gradient)
        m, v = 0.8 * m + 0.2 * gradient, 0.95 * v + 0.05 * gradient**2
        expected *= 1 - 0.1 * 0.2
        expected -= 0.1 * (m / (1 - 0.8**n)) / ((v / (1 - 0.95**n)).sqrt() + 1e-3)
    torch.testing.assert_close(p, expected, rtol=0, atol=1e-14)  # four updates of order one in float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_restored_counter_continues_bit_equal(dtype: torch.dtype) -> None:
    *history, last = make_gradients(6, dtype)
    p = torch.linspace(-1, 1, 7, dtype=dtype)
    optimizer = kernels.adamw([p], OptimizerConfig(), CPU)
    for gradient in history:
        update(optimizer, p, gradient)
    restored = p.clone()
    other = kernels.adamw([restored], OptimizerConfig(), CPU)
    kernels.set_adam_step(other, [restored], step=len(history))
    for moment in ("exp_avg", "exp_avg_sq"):
        other.state[restored][moment].copy_(optimizer.state[p][moment])
    update(optimizer, p, last)
    update(other, restored, last)
    assert torch.equal(restored, p)


def test_missing_moments_become_zero() -> None:
    p = torch.ones(7)
    optimizer = kernels.adamw([p], OptimizerConfig(), CPU)
    kernels.set_adam_step(optimizer, [p], step=0)
    assert all(torch.equal(optimizer.state[p][moment], torch.zeros(7)) for moment in ("exp_avg", "exp_avg_sq"))


def test_present_moments_are_kept() -> None:
    p = torch.ones(7)
    optimizer = kernels.adamw([p], OptimizerConfig(), CPU)
    update(optimizer, p, torch.ones(7))
    before = optimizer.state[p]["exp_avg"]
    kernels.set_adam_step(optimizer, [p], step=9)
    assert optimizer.state[p]["exp_avg"] is before


def test_an_optimizer_that_counts_by_group_is_set_too() -> None:
    """As apex does."""
    p = torch.ones(7)
    optimizer = kernels.adamw([p], OptimizerConfig(), CPU)
    optimizer.param_groups[0]["step"] = 0
    kernels.set_adam_step(optimizer, [p], step=9)
    assert optimizer.param_groups[0]["step"] == 9


def test_tuned_cpu_flushes_tiny_numbers_on_every_thread() -> None:
    """In a process of its own, since threads inherit the setting when they are made."""
    work = "import torch; from mdlm_scale import kernels; kernels.tune_cpu(); " \
        "print(float(torch.full((1 << 22,), 1e-30).mul(1e-10).max()))"  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", work]
    assert subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60).stdout == "0.0\n"
