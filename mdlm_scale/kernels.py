"""The only door to flash-attn, apex and Triton: what is fastest here and installed, else PyTorch's own.

Each choice is made by a function of what is there (`attention_kernel`, `row_kernel`, `adamw_kernel`), so that it can be
tested where none of the packages can run; `describe` says it once at the start of a run, `run/self_test.py` checks it.
B sequences, L positions, H heads, K head width, R rows of logits, V vocabulary.
"""

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mdlm_scale.config import OptimizerConfig

HALF = (torch.bfloat16, torch.float16)
ROW_MULTIPLE = 16  # columns: a GPU reads rows that begin and end there 16 bytes at a time


def attention(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    """Bidirectional softmax attention, every position to every other; (B, L, H, K) in and out.

    Keys and values may have fewer heads, G: head h then reads theirs number h // (H / G).
    """
    if attention_kernel(q_BLHK.device.type, q_BLHK.dtype) == "flash-attn":
        from flash_attn import flash_attn_func

        return flash_attn_func(q_BLHK, k_BLHK, v_BLHK, causal=False)
    q_BHLK, k_BHLK, v_BHLK = (x.transpose(1, 2) for x in (q_BLHK, k_BLHK, v_BLHK))
    if q_BLHK.is_meta:  # only shapes, for a plan: those of a GPU's kernel
        return torch.ops.aten._scaled_dot_product_flash_attention(q_BHLK, k_BHLK, v_BHLK)[0].transpose(1, 2)
    is_grouped = k_BHLK.shape[1] < q_BHLK.shape[1]
    return F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, enable_gqa=is_grouped).transpose(1, 2)


def softmax_rows(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The softmax of the head's rows by Triton, in place, where `row_kernel` chose that; `row_kernel.py` says more."""
    if logits_RV.is_meta:  # only shapes, for a plan
        wide = torch.promote_types(logits_RV.dtype, torch.float32)
        max_R, sum_R, target_R = logits_RV.new_empty(3, len(logits_RV), dtype=wide).unbind()
        return max_R, sum_R, target_R
    from mdlm_scale import row_kernel

    return row_kernel.softmax_rows(logits_RV, bias_V, column_R)


def adamw(
    params: Iterable[Tensor] | Iterable[dict[str, Any]],
    config: OptimizerConfig,
    device: torch.device,
    sharded: bool = False,
) -> torch.optim.Optimizer:
    """AdamW, of parameters or of groups with settings of their own; `sharded` if the engine cuts the parameters. The
    learning rate is set by the caller before every step."""
    options: dict[str, Any] = {
        "lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps, "weight_decay": config.weight_decay
    }  # fmt: skip
    if adamw_kernel(device.type, sharded) == "apex":
        from apex.optimizers import FusedAdam

        return FusedAdam(params, adam_w_mode=True, **options)
    return torch.optim.AdamW(params, fused=True, **options)


def set_adam_step(optimizer: torch.optim.Optimizer, params: Iterable[Tensor], step: int) -> None:
    """Make Adam's state of `params` where it is missing (zero moments), and set its counter of updates."""
    for group in optimizer.param_groups:
        if "step" in group or type(optimizer).__module__.startswith("apex."):
            group["step"] = step  # apex counts by group
    for p in params:
        state = optimizer.state[p]
        if "exp_avg" not in state:
            state |= {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        state["step"] = torch.tensor(float(step), device=p.device)


def tune_cpu(num_processes: int = 1) -> None:
    """Settings of this process that make a CPU train up to twice as fast; call before the first parallel work.

    Attention's gradients soon hold numbers below 1e-38, which a CPU computes with many times slower: they become 0 (the
    threads of a parallel region inherit that from their maker). And the C library is told to reuse freed blocks, rather
    than return each large one to the system and pay for its pages again: a quarter of a step. Several processes of one
    machine share its cores: with a thread each for every core they are ten times slower.
    """
    if num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_processes))
    torch.set_flush_denormal(True)
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc
        m_mmap_max, m_trim_threshold = -4, -1
        library.mallopt(m_mmap_max, 0)
        library.mallopt(m_trim_threshold, -1)


def attention_kernel(device: str, dtype: torch.dtype, installed: Callable[[str], bool] | None = None) -> str:
    """`flash-attn` on CUDA in half precision, where it is installed; else PyTorch's `sdpa`."""
    found = (installed or _installed)("flash_attn")
    return "flash-attn" if device == "cuda" and dtype in HALF and found else "sdpa"


def row_kernel(device: str, installed: Callable[[str], bool] | None = None) -> str:
    """`triton` for the softmax of the head's rows on CUDA, where it is installed; else `torch`. A plan counts on it."""
    return "triton" if device == "meta" or (device == "cuda" and (installed or _installed)("triton")) else "torch"


def adamw_kernel(device: str, sharded: bool = False, installed: Callable[[str], bool] | None = None) -> str:
    """apex's FusedAdam on CUDA, where NVIDIA's apex is installed and no engine shards; else PyTorch's fused AdamW."""
    found = (installed or _installed)("apex.optimizers")  # PyPI's `apex` is another project and has no optimizers
    return "apex" if device == "cuda" and found and not sharded else "torch"


def describe(device: torch.device, dtype: torch.dtype, sharded: bool = False) -> str:
    chosen = {
        "attention": attention_kernel(device.type, dtype),
        "softmax of the head": row_kernel(device.type),
        "AdamW": adamw_kernel(device.type, sharded),
    }
    return ", ".join(f"{what} by {kernel}" for what, kernel in chosen.items())


_found: dict[str, bool] = {}


def _installed(module: str) -> bool:
    """And wanted: MDLM_PLAIN_KERNELS=1 in the environment leaves everything to PyTorch."""
    if module not in _found:
        try:
            is_wanted = os.environ.get("MDLM_PLAIN_KERNELS", "0") == "0"
            _found[module] = is_wanted and importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # the parent package is missing
            _found[module] = False
    return _found[module]
