"""Which kernel is chosen where, and that each choice computes what it should.

B sequences, L positions, H heads, K head width.
"""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import BlockName, ModelConfig, OptimizerConfig
from mdlm_scale.model.dit import DiT

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
        ("meta", [], "triton"),  # a plan of a GPU counts on it
    ],
)
def test_triton_is_chosen_where_it_can_run(device: str, found: list[str], chosen: str) -> None:
    assert kernels.row_kernel(device, installed=found.__contains__) == chosen


@pytest.mark.parametrize(("wish", "chosen"), [(None, "flash-attn"), ("0", "flash-attn"), ("1", "sdpa")])
def test_a_user_can_do_without(wish: str | None, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(kernels, "_found", {})
    monkeypatch.delenv("MDLM_PLAIN_KERNELS", raising=False)
    if wish is not None:
        monkeypatch.setenv("MDLM_PLAIN_KERNELS", wish)
    assert kernels.attention_kernel("cuda", torch.bfloat16) == chosen


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


@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_flash_attn_as_published_gives_what_sdpa_does(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v as (B, L, H, K), every position attending to every other; fewer key and value heads serve the queries."""
    q_BLHK, *kv_BLHK = (x.repeat(1, 1, 2, 1).cumsum(2).bfloat16() for x in make_qkv())  # no two heads alike
    qkv_BLHK = [q_BLHK, *(x[:, :, :num_kv_heads] for x in kv_BLHK)]
    published.install_flash_attn(monkeypatch)
    actual = kernels.attention(*qkv_BLHK)
    # by sdpa, for this is float64; the stand-in's result is rounded to bf16
    torch.testing.assert_close(actual.double(), kernels.attention(*(x.double() for x in qkv_BLHK)), rtol=2**-8, atol=0)
    assert actual.dtype == torch.bfloat16


@pytest.mark.parametrize("block", [{}, {"block": BlockName.modern, "num_kv_heads": 2}], ids=["paper", "modern"])
def test_the_model_calls_flash_attn_as_published(block: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = DiT(ModelConfig(num_layers=1, hidden_size=32, num_heads=4, **block), vocab_size=11, mask_id=10)
    for number, p in enumerate(model.parameters()):
        p.data = torch.sin(torch.arange(p.numel()) * 0.7 + number).view(p.shape) / 4
    z_BL, rows_M = torch.arange(16).view(2, 8) % 11, torch.arange(16)
    exact = model.double().logits(z_BL, torch.ones(2), rows_M)
    calls: list[tuple[Tensor, ...]] = []

    def flash_attn_func(*qkv: Tensor, **options: Any) -> Tensor:
        calls.append(qkv)
        return published.flash_attn_func(*qkv, **options)

    published.install_flash_attn(monkeypatch, flash_attn_func)
    actual = model.bfloat16().logits(z_BL, torch.ones(2), rows_M)
    assert [[x.stride(-1) for x in qkv] for qkv in calls] == [[1, 1, 1]]  # once, and as it can be read
    assert (actual - exact).abs().max() <= 2**-4 * exact.abs().max()  # weights, and a layer's results, in bf16


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


def test_fused_adam_as_published_gives_what_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that differ in weight decay; the learning rate is set before every step."""
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2)

    def trained() -> list[Tensor]:
        matrix, vector = torch.linspace(-1, 1, 7), torch.linspace(2, 3, 7)
        groups: list[Any] = [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}]
        optimizer = kernels.adamw(groups, config, CPU)
        kernels.set_adam_step(optimizer, [matrix, vector], step=0)
        for n, gradient in enumerate(make_gradients(4, torch.float32), start=1):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / n
            vector.grad = gradient.flip(0)
            update(optimizer, matrix, gradient)
        moments = [optimizer.state[p][name] for p in (matrix, vector) for name in ("exp_avg", "exp_avg_sq")]
        return [matrix, vector, *moments]

    expected = trained()
    published.install_apex(monkeypatch)
    torch.testing.assert_close(trained(), expected, rtol=1e-6, atol=1e-6)  # four updates of order one in float32


@pytest.mark.parametrize(
    ("by_apex", "dtype"), [(False, torch.float32), (False, torch.float64), (True, torch.float32)], ids=str
)
def test_a_restored_counter_continues_bit_equal(
    by_apex: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_apex:
        published.install_apex(monkeypatch)
    *history, last = make_gradients(6, dtype)
    p = torch.linspace(-1, 1, 7, dtype=dtype)
    optimizer = kernels.adamw([p], OptimizerConfig(), CPU)
    assert isinstance(optimizer, published.FusedAdam) == by_apex
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


def test_tuned_cpu_flushes_tiny_numbers_on_every_thread() -> None:
    """In a process of its own, since threads inherit the setting when they are made."""
    work = "import torch; from mdlm_scale import kernels; kernels.tune_cpu(); " \
        "print(float(torch.full((1 << 22,), 1e-30).mul(1e-10).max()))"  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", work]
    assert subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60).stdout == "0.0\n"
