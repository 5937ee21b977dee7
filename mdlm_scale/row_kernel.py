"""The softmax of a chunk of logits as one Triton kernel, in place: what it reads, writes and leaves to the head.

A program takes a row and goes over its columns twice, a tile at a time: first for the largest logit and the sum of
exponentials relative to it, then to write the exponentials over the logits. Half-precision logits are computed with in
float32, but never copied to it.
R rows of a chunk, V vocabulary (of this shard), padded to a multiple of `kernels.ROW_MULTIPLE`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # columns; 16 for each of a program's threads, which fit their registers
NUM_WARPS = 8


def softmax_rows(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's largest logit, sum of exp(logit - largest) and target logit, the bias added; float32 at least.

    The logits become exp(logit - largest), and 0 at the target: its gradient is a difference, and to be rounded once.
    `column_R` is where the target is, -1 if not here (its logit is 0 then). Columns of bias -inf are no answers: what
    their logits are does not matter, and they become 0.
    """
    assert logits_RV.shape[1:] == bias_V.shape, (logits_RV.shape, bias_V.shape)
    assert logits_RV.is_contiguous(), logits_RV.stride()
    wide = torch.promote_types(logits_RV.dtype, torch.float32)
    max_R, sum_R, target_R = logits_RV.new_empty(3, len(logits_RV), dtype=wide).unbind()
    softmax_row[(len(logits_RV),)](
        logits_RV, bias_V, column_R, max_R, sum_R, target_R, len(bias_V),
        lowest=torch.finfo(wide).min, tile=TILE, num_warps=NUM_WARPS,
    )  # fmt: skip
    return max_R, sum_R, target_R


@triton.jit
def softmax_row(
    logits_RV: tl.tensor,
    bias_V: tl.tensor,
    column_R: tl.tensor,
    max_R: tl.tensor,
    sum_R: tl.tensor,
    target_R: tl.tensor,
    width: tl.tensor,
    lowest: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """One row; tensors are pointers here. `lowest` is finite: a row without an answer has that as its largest logit."""
    wide: tl.constexpr = max_R.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    logits_V = logits_RV + row * width
    column = tl.load(column_R + row)
    is_here = column >= 0
    # read before anything is written over: the sums below are met by all threads, and stand between
    target = tl.load(logits_V + column, is_here, 0.0).to(wide) + tl.load(bias_V + column, is_here, 0.0).to(wide)
    tl.store(target_R + row, target)

    largest = tl.full((), lowest, wide)
    total = tl.zeros((), wide)
    for start in range(0, width, tile):
        at = start + tl.arange(0, tile)
        logit = with_bias(logits_V, bias_V, at, width, wide)
        larger = tl.maximum(largest, tl.max(logit, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(logit - larger), 0)
        largest = larger
    tl.store(max_R + row, largest)
    tl.store(sum_R + row, total)

    for start in range(0, width, tile):
        at = start + tl.arange(0, tile)
        exp = tl.exp(with_bias(logits_V, bias_V, at, width, wide) - largest)
        exp = tl.where(at == column, 0.0, exp)
        tl.store(logits_V + at, exp.to(logits_V.dtype.element_ty), at < width)


@triton.jit
def with_bias(logits_V: tl.tensor, bias_V: tl.tensor, at: tl.tensor, width: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Logits of a tile, -inf where there is no answer, whatever the memory holds there."""
    bias = tl.load(bias_V + at, at < width, -float("inf")).to(wide)
    logit = tl.load(logits_V + at, at < width, 0.0).to(wide)
    return tl.where(bias == -float("inf"), bias, logit + bias)
