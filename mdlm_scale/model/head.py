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
import torch.nn.functional as F
from torch import Tensor, nn

from mdlm_scale import kernels
from mdlm_scale.diffusion.corrupt import row_faults
from mdlm_scale.kernels import HALF

Combined = Callable[[], tuple[Tensor, Tensor, Tensor]]
Combine = Callable[[Tensor, Tensor, Tensor], Combined]


@dataclass(frozen=True)
class VocabShard:
    """Which columns of the vocabulary these weights are, and how their sums meet those of the other shards.

    `combine(max, sum of exp(logit - max), target logit)` starts one exchange a chunk and returns a function that waits
    for the same three over the whole vocabulary; the matrix products of the chunk before run meanwhile. `sum_hidden`
    adds the gradient of the hidden rows over the shards.
    """

    start: int = 0
    num_valid: int | None = None  # columns that are tokens; the rest is padding; None: all of them
    combine: Combine | None = None  # None: this is the whole vocabulary
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
        assert self.shard is WHOLE, "logits are of the whole vocabulary, and here is a part of it"
        return F.linear(hidden_MD.to(self.weight.dtype), self.weight, self.bias)


@torch.compiler.disable
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
    fixed_shapes: bool | None = None,
    row_kernel: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of weighted nats of the target tokens, and each row's unweighted nats, (M,), without gradient.

    `chunk_rows` is the largest chunk. With `fixed_shapes`, the default on a GPU, rows of weight 0 complete the last
    one: M differs from step to step, and a GPU's allocator and libraries prefer sizes they have met before.
    `row_kernel` is what `kernels.row_kernel` chooses, if it is not said.
    """
    on_cpu = hidden_MD.device.type == "cpu"
    if chunk_rows is None:
        chunk_rows = _most_rows(on_cpu)
    if fixed_shapes is None:
        fixed_shapes = not on_cpu
    faults = _call_faults(hidden_MD, weight_VD, bias_V, target_M, row_weight_M, chunk_rows)
    if not faults and on_cpu:  # elsewhere a look at values would wait; they were checked where the rows were made
        vocab_size = len(weight_VD) if shard is WHOLE else None
        faults = row_faults(target_M, row_weight_M, mask_id=mask_id, vocab_size=vocab_size)
    if faults:
        raise ValueError(" ".join(faults))

    num_rows = len(hidden_MD)
    chunk_rows = _equal_chunks(num_rows, chunk_rows, on_cpu)
    if fixed_shapes:
        more = -num_rows % chunk_rows
        hidden_MD = F.pad(hidden_MD, (0, 0, 0, more))
        target_M = F.pad(target_M, (0, more), value=int(mask_id == 0))  # any token but the mask
        row_weight_M = F.pad(row_weight_M, (0, more))
    by_triton = (row_kernel or kernels.row_kernel(hidden_MD.device.type)) == "triton"
    with_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (hidden_MD, weight_VD, bias_V))
    with torch.no_grad():
        work = _Pass(hidden_MD, weight_VD, bias_V, target_M, row_weight_M, mask_id, shard, with_gradient, by_triton)
    loss_sum, nll_M = _MaskedCrossEntropy.apply(hidden_MD, weight_VD, bias_V, work, chunk_rows)
    return loss_sum, nll_M[:num_rows]


class _MaskedCrossEntropy(torch.autograd.Function):
    """Gradients are made in the forward pass, for a unit gradient of the sum, and scaled in the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, work: "_Pass", chunk_rows: int) -> Any:
        work.run(chunk_rows)
        ctx.gradients = work.gradients()
        ctx.mark_non_differentiable(work.nll_M)
        return (work.nll_M * work.row_weight_M).sum(), work.nll_M

    @staticmethod
    def backward(ctx: Any, d_sum: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "masked_cross_entropy has no second derivative: its gradients are constants made in the forward pass. "
                "Call backward or autograd.grad without create_graph."
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "This loss was differentiated already, and its gradients are given away. Compute the loss again, or "
                "add up what depends on it and differentiate once."
            )
        gradients, ctx.gradients = ctx.gradients, None
        return (*(d.mul_(d_sum.to(d.dtype)) for d in gradients), None, None)


@dataclass
class _Chunk:
    """Rows whose softmax is under way: exp(logit - own max) is there, the sum over all shards not yet."""

    at: slice
    exp_RV: Tensor
    lacking_R: Tensor | float  # exp(logit - own max) of the target, if exp_RV is without it
    own_max_R: Tensor
    combined: Combined


class _Pass:
    """One pass over the rows: `start` a chunk (logits, their exponentials), then `finish` it (nats, gradients)."""

    def __init__(
        self,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        target_M: Tensor,
        row_weight_M: Tensor,
        mask_id: int,
        shard: VocabShard,
        with_gradient: bool,
        by_triton: bool,
    ) -> None:
        self.wide = torch.float32 if hidden_MD.dtype in HALF else hidden_MD.dtype
        self.hidden_MD, self.weight_VD, self.shard, self.with_gradient = hidden_MD, weight_VD, shard, with_gradient
        self.row_weight_M = row_weight_M.to(self.wide)
        self.by_triton = by_triton
        self.width = len(weight_VD) + (-len(weight_VD) % kernels.ROW_MULTIPLE if by_triton else 0)
        num_valid = len(weight_VD) if shard.num_valid is None else shard.num_valid
        # columns that are no answer, the mask token's and padding, get a bias of -inf
        self.bias_V = bias_V.new_full((self.width,), -torch.inf, dtype=None if by_triton else self.wide)
        self.bias_V[:num_valid] = bias_V[:num_valid]
        if 0 <= mask_id - shard.start < num_valid:
            self.bias_V[mask_id - shard.start] = -torch.inf
        self.column_M = target_M - shard.start
        self.is_here_M = (self.column_M >= 0) & (self.column_M < num_valid)
        self.column_M = torch.where(self.is_here_M, self.column_M, 0)[:, None]
        self.nll_M = hidden_MD.new_empty(len(hidden_MD), dtype=self.wide)
        if with_gradient:
            self.d_hidden_MD = torch.empty_like(hidden_MD)
            self.d_weight_VD = torch.zeros_like(weight_VD, dtype=self.wide)
            self.d_bias_V = torch.zeros_like(bias_V, dtype=self.wide)

    def run(self, chunk_rows: int) -> None:
        """Every chunk. With shards two are open at a time: the exchange of one hides behind the other's products."""
        num_rows = len(self.hidden_MD)
        chunks = [slice(start, min(start + chunk_rows, num_rows)) for start in range(0, num_rows, chunk_rows)]
        numel = min(chunk_rows, num_rows) * self.width
        buffers = [self.hidden_MD.new_empty(numel) for _ in range(1 if self.shard.combine is None else 2)]
        opened: list[_Chunk] = []
        for i, at in enumerate(chunks):
            opened.append(self.start(at, buffers[i % len(buffers)]))
            if len(opened) == len(buffers):
                self.finish(opened.pop(0))
        for chunk in opened:
            self.finish(chunk)

    def start(self, at: slice, buffer: Tensor) -> _Chunk:
        """Logits and their exponentials, and this shard's part of the softmax on its way to the others."""
        rows, columns = at.stop - at.start, len(self.weight_VD)
        hidden_RD, weight_DV, is_here_R = self.hidden_MD[at], self.weight_VD.t(), self.is_here_M[at]
        lacking_R: Tensor | float = 0.0
        if self.by_triton:
            padded_RV = buffer[: rows * self.width].view(rows, self.width)
            logits_RV = torch.mm(hidden_RD, weight_DV, out=padded_RV[:, :columns])
            column_R = torch.where(is_here_R, self.column_M[at].squeeze(1), -1)
            max_R, sum_R, target_R = kernels.softmax_rows(padded_RV, self.bias_V, column_R)
            lacking_R = (target_R - max_R).exp_()
        else:
            # transposed in memory: all three products are faster on a CPU, by a tenth
            logits_RV = torch.mm(hidden_RD, weight_DV, out=buffer[: rows * columns].view(columns, rows).t())
            logits_RV = logits_RV.to(self.wide)
            max_R = _add_and_max(logits_RV, self.bias_V)
            target_R = torch.where(is_here_R, logits_RV.gather(1, self.column_M[at]).squeeze(1), 0.0)
            sum_R = _exp_and_sum(logits_RV, max_R)
        own = (max_R, sum_R, target_R)
        combined = (lambda: own) if self.shard.combine is None else self.shard.combine(*own)
        return _Chunk(at, logits_RV, lacking_R, max_R, combined)

    def finish(self, chunk: _Chunk) -> None:
        """Nats, and gradients: d nats / d logit = (softmax - onehot) * row weight = (exp - sum * onehot) * scale.

        The scale goes to the narrow factor of each product, which spares the R x V matrix one more pass.
        """
        at, exp_RV = chunk.at, chunk.exp_RV
        max_R, sum_R, target_R = chunk.combined()
        self.nll_M[at] = sum_R.log() + max_R - target_R
        if not self.with_gradient:
            return
        # exp is relative to this shard's own max. Where that is 57 nats below another's, its softmax is 0 in effect,
        # and the floor keeps the division below finite
        shift_R = (chunk.own_max_R - max_R).exp_().clamp_min_(1e-25)
        scale_R = self.row_weight_M[at] * shift_R / sum_R
        onehot_R = torch.where(self.is_here_M[at], chunk.lacking_R - sum_R / shift_R, 0.0)
        exp_RV.scatter_add_(1, self.column_M[at], onehot_R[:, None].to(exp_RV.dtype))
        if exp_RV.dtype == self.wide:
            self.d_bias_V.addmv_(exp_RV.t(), scale_R)
            exp_RV = exp_RV.to(self.hidden_MD.dtype)
        else:
            self.d_bias_V += exp_RV.t() @ scale_R.to(exp_RV.dtype)
        torch.mm(exp_RV, self.weight_VD, out=self.d_hidden_MD[at]).mul_(scale_R[:, None])
        scaled_RD = (self.hidden_MD[at] * scale_R[:, None]).to(self.hidden_MD.dtype)
        if self.wide == self.hidden_MD.dtype:
            self.d_weight_VD.addmm_(exp_RV.t(), scaled_RD)
        else:
            self.d_weight_VD += exp_RV.t() @ scaled_RD

    def gradients(self) -> tuple[Tensor, Tensor, Tensor] | None:
        if not self.with_gradient:
            return None
        dtype = self.weight_VD.dtype
        return self.shard.sum_hidden(self.d_hidden_MD), self.d_weight_VD.to(dtype), self.d_bias_V.to(dtype)


def _add_and_max(logits_RV: Tensor, bias_V: Tensor) -> Tensor:
    """Add the bias in place; the largest logit of each row, finite also where a shard has no answer at all."""
    max_R = logits_RV.new_full((len(logits_RV),), torch.finfo(logits_RV.dtype).min)
    columns = _tile_columns(logits_RV)
    for tile_RT, bias_T in zip(logits_RV.split(columns, 1), bias_V.split(columns), strict=True):
        torch.maximum(max_R, tile_RT.add_(bias_T).amax(1), out=max_R)
    return max_R


def _exp_and_sum(logits_RV: Tensor, max_R: Tensor) -> Tensor:
    """Replace logits by exp(logit - max); the sum of each row."""
    sum_R = torch.zeros_like(max_R)
    for tile_RT in logits_RV.split(_tile_columns(logits_RV), 1):
        sum_R += tile_RT.sub_(max_R[:, None]).exp_().sum(1)
    return sum_R


def _tile_columns(logits_RV: Tensor) -> int:
    """As many columns as stay in a CPU's second-level caches (3/4 MB a thread) from one operation to the next."""
    if logits_RV.device.type != "cpu":
        return logits_RV.shape[1]
    return max(1, torch.get_num_threads() * 3 * 2**18 // (len(logits_RV) * logits_RV.itemsize))


def num_chunks(num_rows: int, on_cpu: bool) -> int:
    """How many chunks there are: shards of the vocabulary exchange their sums once for each."""
    return -(-num_rows // _equal_chunks(num_rows, _most_rows(on_cpu), on_cpu)) if num_rows else 0


def _most_rows(on_cpu: bool) -> int:
    return 528 if on_cpu else 4096


def _equal_chunks(num_rows: int, most: int, on_cpu: bool) -> int:
    """Rows of a chunk: as few chunks as possible, equal, and of a size that matrix products like."""
    equal = -(-num_rows // max(1, -(-num_rows // most)))
    # on a CPU an odd number of cache lines: columns whose distance is a power of two would evict each other
    nice = (-(-equal // 16) | 1) * 16 if on_cpu else -(-equal // 128) * 128
    return min(nice, most)


def _call_faults(
    hidden_MD: Tensor, weight_VD: Tensor, bias_V: Tensor, target_M: Tensor, row_weight_M: Tensor, chunk_rows: int
) -> list[str]:
    """What is wrong with a call, told without looking at values."""
    found = []
    shapes = [tuple(x.shape) for x in (hidden_MD, weight_VD, bias_V, target_M, row_weight_M)]
    (M, D), (V, _) = (shape if len(shape) == 2 else (-1, -1) for shape in shapes[:2])
    if shapes != [(M, D), (V, D), (V,), (M,), (M,)]:
        found.append(
            "hidden, weight, bias, target and row_weight must have shapes (M, D), (V, D), (V,), (M,), (M,); they have "
            + ", ".join(map(str, shapes)) + "."
        )  # fmt: skip
    if not hidden_MD.dtype == weight_VD.dtype == bias_V.dtype:
        dtypes = f"{hidden_MD.dtype}, {weight_VD.dtype}, {bias_V.dtype}"
        found.append(f"hidden, weight and bias must have one dtype; they have {dtypes}.")
    if target_M.dtype != torch.int64 or not row_weight_M.is_floating_point():
        dtypes = f"{target_M.dtype} and {row_weight_M.dtype}"
        found.append(f"target must be int64 and row_weight floating point; they are {dtypes}.")
    if chunk_rows < 1:
        found.append(f"chunk_rows={chunk_rows} must be at least 1.")
    return found
