"""flash-attn's and apex's functions as they are published, where neither runs: signatures, demands, results.

Parameters and defaults are those of flash-attn 2 since 2.6, and of NVIDIA's apex; what is computed is plain PyTorch.
B sequences, L positions, H heads, K head width.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm_scale import kernels


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
    """All as (B, L, H, K) in half precision; k and v may have fewer heads: query head i reads i // (H / theirs).

    Only what a bidirectional model asks for, and causal attention.
    """
    asked = (dropout_p, window_size, softcap, alibi_slopes, return_attn_probs)
    assert asked == (0.0, (-1, -1), 0.0, None, False), asked
    num_heads, num_kv_heads, width = q.shape[2], k.shape[2], q.shape[3]
    if not (q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16)):
        raise RuntimeError(f"FlashAttention takes fp16 and bf16 alone, not {q.dtype}, {k.dtype}, {v.dtype}")
    assert k.shape == v.shape == (q.shape[0], k.shape[1], num_kv_heads, width)
    assert num_heads % num_kv_heads == 0
    assert width <= 256
    head_H = torch.arange(num_heads) // (num_heads // num_kv_heads)
    k, v = k[:, :, head_H], v[:, :, head_H]
    scores_BHQS = torch.einsum("bqhk,bshk->bhqs", q.double(), k.double()) * (softmax_scale or width**-0.5)
    if causal:
        scores_BHQS = scores_BHQS.masked_fill(torch.ones(scores_BHQS.shape[-2:]).triu(1).bool(), -torch.inf)
    return torch.einsum("bhqs,bshk->bqhk", scores_BHQS.softmax(-1), v.double()).to(q.dtype)


class FusedAdam(torch.optim.Optimizer):
    """Counts updates by group, and keeps moments in float32."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        assert (amsgrad, capturable, master_weights) == (False, False, False)
        self.adam_w_mode = adam_w_mode
        defaults = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps}
        super().__init__(params, defaults | {"weight_decay": weight_decay})

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group)

    def _update(self, p: Tensor, group: dict[str, Any]) -> None:
        if p.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            raise RuntimeError(f"FusedAdam takes fp16, bf16 and fp32 alone, not {p.dtype}")
        state = self.state[p]
        if not state:
            state |= {name: torch.zeros_like(p, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        (beta1, beta2), decay, n = group["betas"], group["weight_decay"], group["step"]
        gradient = p.grad if self.adam_w_mode else p.grad + decay * p
        state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        assert group["bias_correction"]
        mean, square = state["exp_avg"] / (1 - beta1**n), state["exp_avg_sq"] / (1 - beta2**n)
        update = mean / (square.sqrt() + group["eps"]) + (decay * p if self.adam_w_mode else 0)
        p.sub_(group["lr"] * update)


FusedAdam.__module__ = "apex.optimizers.fused_adam"


def install_flash_attn(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor] = flash_attn_func) -> None:
    """As `flash_attn`, and chosen for half precision."""
    module = ModuleType("flash_attn")
    module.flash_attn_func = function  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    real = kernels.attention_kernel
    monkeypatch.setattr(kernels, "attention_kernel", lambda _device, dtype: real("cuda", dtype, lambda _module: True))


def install_apex(monkeypatch: pytest.MonkeyPatch, optimizer: type[torch.optim.Optimizer] = FusedAdam) -> None:
    """As `apex.optimizers`, and chosen where no engine shards."""
    parent, module = ModuleType("apex"), ModuleType("apex.optimizers")
    module.FusedAdam = optimizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "apex", parent)
    monkeypatch.setitem(sys.modules, "apex.optimizers", module)
    real = kernels.adamw_kernel
    monkeypatch.setattr(kernels, "adamw_kernel", lambda _device, sharded=False: real("cuda", sharded, lambda _m: True))
