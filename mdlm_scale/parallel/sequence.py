"""Sequence parallelism: between the cut matrices each rank of a tensor-parallel group keeps a slice of the positions.

Norms, dropout and the residual stream are computed once instead of on every rank. Before a matrix cut by columns the
slices are joined, after one cut by rows the partial results are added up and sliced again: together what the single
sum without sequence parallelism moves. The gradient of each is the other.
B sequences, S positions of a slice, L of the whole row, D width, O outputs of a matrix.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

Group = dist.ProcessGroup
# newer names of the same, for which PyTorch 2.13 warns of the older ones
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
Exchange = Callable[[Tensor, Group], Callable[[], Tensor]]  # starts; the function that it returns waits


def joined(x_BSD: Tensor, group: Group) -> Tensor:
    """All positions, (B, L, D); the gradients of all ranks are added up and sliced."""
    return _Paired.apply(x_BSD, group, _gather, _sum_and_scatter)


def summed_slice(x_BLD: Tensor, group: Group) -> Tensor:
    """This rank's slice, (B, S, D), of the sum over all ranks."""
    return _Paired.apply(x_BLD, group, _sum_and_scatter, _gather)


def slice_of_equal(x_BLD: Tensor, group: Group) -> Tensor:
    """This rank's slice, (B, S, D), of what all ranks hold alike."""
    return _Paired.apply(x_BLD, group, _slice, _gather)


def joined_linear(x_BSD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, group: Group) -> Tensor:
    """The matrix product of all positions, (B, L, O). Only the slice is kept for the backward pass, which joins again:
    the joined input would be as large as without sequence parallelism."""
    return _JoinedLinear.apply(x_BSD, weight_OD, bias_O, group)


class _Paired(torch.autograd.Function):
    """An exchange whose gradient is another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, exchange: Exchange, of_gradient: Exchange) -> Tensor:
        ctx.group, ctx.of_gradient = group, of_gradient
        return exchange(x, group)()

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.of_gradient(d_x, ctx.group)(), None, None, None


class _JoinedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, group: Group) -> Tensor:
        ctx.save_for_backward(x_BSD, weight_OD)
        ctx.group, ctx.has_bias = group, bias_O is not None
        return F.linear(_gather(x_BSD, group)(), weight_OD, bias_O)

    @staticmethod
    def backward(ctx: Any, d_BLO: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_BSD, weight_OD = ctx.saved_tensors
        join = _gather(x_BSD, ctx.group)  # on its way during the first product
        d_BLD = d_BLO @ weight_OD
        x_BLD = join()
        scatter = _sum_and_scatter(d_BLD, ctx.group)  # on its way during the second
        d_NO = d_BLO.flatten(0, 1)
        d_weight_OD = d_NO.t() @ x_BLD.flatten(0, 1)
        d_bias_O = d_NO.sum(0) if ctx.has_bias else None
        return scatter(), d_weight_OD, d_bias_O, None


def _gather(x_BSD: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to join the slices; the function waits for (B, L, D)."""
    (B, S, D), T = x_BSD.shape, group.size()
    parts_TBSD = x_BSD.new_empty(T * B, S, D)
    work = all_gather(parts_TBSD, x_BSD.contiguous(), group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return parts_TBSD.view(T, B, S, D).transpose(0, 1).reshape(B, T * S, D)

    return wait


def _slice(x_BLD: Tensor, group: Group) -> Callable[[], Tensor]:
    """This rank's slice, (B, S, D); there is nothing to wait for."""
    return x_BLD.chunk(group.size(), dim=1)[group.rank()].contiguous


def _sum_and_scatter(x_BLD: Tensor, group: Group) -> Callable[[], Tensor]:
    """Start to add up over the ranks; the function waits for this rank's slice, (B, S, D)."""
    (B, L, D), T = x_BLD.shape, group.size()
    parts_TBSD = x_BLD.view(B, T, L // T, D).transpose(0, 1).reshape(T * B, L // T, D)
    own_BSD = x_BLD.new_empty(B, L // T, D)
    work = reduce_scatter(own_BSD, parts_TBSD, group=group, async_op=True)

    def wait() -> Tensor:
        work.wait()
        return own_BSD

    return wait
