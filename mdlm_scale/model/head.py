"""The vocabulary projection and its loss, on masked rows only: hidden rows in, nats out, in one pass over row chunks.

Only a chunk of logits exists at a time. Loss and gradients are computed together while it does: softmax needs the
logits, and the gradient needs only the softmax, so nothing is computed twice and nothing of size M x V is kept.
The mask token is never an answer: its column has no probability and no gradient.
M masked rows, D width, V vocabulary (of this shard), R rows of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mdlm_scale.kernels import HALF

Combine = Callable[[Tensor, Tensor, Tensor], Callable[[], tuple[Tensor, Tensor, Tensor]]]


def _alone(max_R: Tensor, sum_R: Tensor, target_R: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    return lambda: (max_R, sum_R, target_R)


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary these weights are, and how their sums meet those of the other shards.

    `combine(max, sum of exp(logit - max), target logit)` starts one exchange a chunk and returns a function that waits
    for the same three over the whole vocabulary; `sum_hidden` adds the gradient of the hidden rows over the shards.
    """

    start: int = 0
    num_valid: int | None = None  # columns that are tokens; the rest is padding; None: all of them
    combine: Combine = _alone
    sum_hidden: Callable[[Tensor], Tensor] = lambda d_hidden_MD: d_hidden_MD


WHOLE = VocabShard()


class Head(nn.Module):
    def __init__(self, width: int, vocab_size: int, mask_id: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width))
        self.bias = nn.Parameter(torch.empty(vocab_size))
        self.mask_id = mask_id
        self.shard = WHOLE

    def forward(self, hidden_MD: Tensor, target_M: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
        hidden_MD = hidden_MD.to(self.weight.dtype)
        return masked_cross_entropy(
            hidden_MD, self.weight, self.bias, target_M, weight_M, mask_id=self.mask_id, shard=self.shard
        )

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden_MD.to(self.weight.dtype), self.weight, self.bias)


def masked_cross_entropy(
    hidden_MD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    target_M: Tensor,
    row_weight_M: Tensor,
    *,
    mask_id: int,
    shard: VocabShard = WHOLE,
    chunk_rows: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of weighted nats of the target tokens, and each row's unweighted nats, (M,), without gradient."""
    if chunk_rows is None:
        chunk_rows = 512 if hidden_MD.device.type == "cpu" else 4096
    return _MaskedCrossEntropy.apply(
        hidden_MD, weight_VD, bias_V, target_M, row_weight_M, mask_id, shard, chunk_rows, torch.is_grad_enabled()
    )


class _MaskedCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, for a unit gradient of the sum, and scaled in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        target_M: Tensor,
        row_weight_M: Tensor,
        mask_id: int,
        shard: VocabShard,
        chunk_rows: int,
        with_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float32 if hidden_MD.dtype in HALF else hidden_MD.dtype
        num_rows, vocab_size = len(hidden_MD), len(weight_VD)
        nll_M = hidden_MD.new_empty(num_rows, dtype=wide)
        local_target_M = target_M - shard.start
        num_valid = vocab_size if shard.num_valid is None else shard.num_valid
        is_here_M = (local_target_M >= 0) & (local_target_M < num_valid)
        local_target_M = torch.where(is_here_M, local_target_M, 0)
        weight_M = row_weight_M.to(wide)
        excluded = _excluded_columns(vocab_size, num_valid, mask_id - shard.start)
        if with_gradient:
            d_hidden_MD = torch.empty_like(hidden_MD)
            d_weight_VD = torch.zeros_like(weight_VD, dtype=wide)
            d_bias_V = torch.zeros_like(bias_V, dtype=wide)
        # a row stride that is a multiple of 64 elements keeps the CPU's matrix product on its fast path
        stride = -(-vocab_size // 64) * 64
        buffer = hidden_MD.new_empty(min(chunk_rows, max(num_rows, 1)), stride)
        for start in range(0, num_rows, chunk_rows):
            at = slice(start, min(start + chunk_rows, num_rows))
            logits_RV = buffer[: at.stop - at.start, :vocab_size]
            torch.addmm(bias_V, hidden_MD[at], weight_VD.t(), out=logits_RV)
            for columns in excluded:
                logits_RV[:, columns] = -torch.inf
            logits_RV = logits_RV.to(wide)
            max_R = logits_RV.amax(1).clamp_min(torch.finfo(wide).min)  # a shard without a valid column has -inf
            target_R = torch.where(is_here_M[at], logits_RV.gather(1, local_target_M[at, None]).squeeze(1), 0.0)
            exp_RV = logits_RV.sub_(max_R[:, None]).exp_()
            own_max_R = max_R
            max_R, sum_R, target_R = shard.combine(max_R, exp_RV.sum(1), target_R)()
            nll_M[at] = sum_R.log() + max_R - target_R
            if not with_gradient:
                continue
            # d nats / d logit = softmax - onehot, times the row's weight
            scale_R = weight_M[at] * (own_max_R - max_R).exp_() / sum_R
            d_logits_RV = exp_RV.mul_(scale_R[:, None])
            d_logits_RV.scatter_add_(
                1, local_target_M[at, None], torch.where(is_here_M[at], -weight_M[at], 0.0)[:, None]
            )
            d_bias_V += d_logits_RV.sum(0)
            d_logits_RV = d_logits_RV.to(hidden_MD.dtype)
            torch.mm(d_logits_RV, weight_VD, out=d_hidden_MD[at])
            if wide == hidden_MD.dtype:
                d_weight_VD.addmm_(d_logits_RV.t(), hidden_MD[at])
            else:
                d_weight_VD += d_logits_RV.t() @ hidden_MD[at]
        if with_gradient:
            ctx.save_for_backward(
                shard.sum_hidden(d_hidden_MD), d_weight_VD.to(weight_VD.dtype), d_bias_V.to(bias_V.dtype)
            )
        ctx.scaled = False
        ctx.mark_non_differentiable(nll_M)
        return (nll_M * weight_M).sum(), nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        assert not ctx.scaled, "this loss was differentiated already: its gradients are scaled in place, once"
        ctx.scaled = True
        d_hidden_MD, d_weight_VD, d_bias_V = ctx.saved_tensors
        gradients = (d.mul_(d_sum.to(d.dtype)) for d in (d_hidden_MD, d_weight_VD, d_bias_V))
        return (*gradients, None, None, None, None, None, None)


def _excluded_columns(vocab_size: int, num_valid: int, mask: int) -> list[slice]:
    """Columns of this shard that are no answer: the mask token's, if it is here, and padding after the valid ones."""
    excluded = [slice(num_valid, vocab_size)] if num_valid < vocab_size else []
    return excluded + ([slice(mask, mask + 1)] if 0 <= mask < num_valid else [])
