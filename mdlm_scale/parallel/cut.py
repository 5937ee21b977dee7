"""Which part of each parameter this rank of a tensor-parallel group holds, and what follows from that.

A part is a box of the whole parameter, whole rows or whole columns; the last rank's may reach beyond the end (padding).
Initial weights, checkpoints and the gradient norm are defined on whole parameters; here parts are related to those.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mdlm_scale.kernels import HALF

InitRange = Callable[[str, int, int], Tensor]  # (parameter name, start, number of elements) -> float64


@dataclass(frozen=True)
class Place:
    """Where this rank's tensor lies in the whole parameter; both have one or two dimensions."""

    whole: torch.Size  # of the parameter
    dim: int | None = None  # in which it is cut; None: this rank has all of it, as every rank does
    rank: int = 0  # of `size` that have equal parts, the last with padding
    size: int = 1

    @property
    def is_cut(self) -> bool:
        return self.dim is not None

    @property
    def shape(self) -> torch.Size:
        """Of this rank's tensor."""
        return torch.Size(-(-n // self.size) if i == self.dim else n for i, n in enumerate(self.whole))

    @property
    def offset(self) -> tuple[int, ...]:
        """Of its first element."""
        return tuple(self.rank * n if i == self.dim else 0 for i, n in enumerate(self.shape))

    def boxes(self, start: int, numel: int) -> Iterator[tuple[list[int], list[int], int]]:
        """A flat range of the tensor as boxes of the whole, (offset, size, first element in the tensor), without
        padding; at most three: the end of a row, whole rows, the beginning of a row."""
        assert len(self.shape) <= 2, f"a range of a tensor of shape {tuple(self.shape)} may be more than three boxes"
        width = math.prod(self.shape[1:])
        at, end = start, start + numel
        while at < end:
            row, column = divmod(at, width)
            whole_rows = (end - at) // width if column == 0 else 0
            count = whole_rows * width or min(width - column, end - at)
            local, size = [row, column][: len(self.shape)], [whole_rows or 1, width if whole_rows else count]
            offset = [a + b for a, b in zip(local, self.offset, strict=True)]
            size[0] = min(size[0], self.whole[0] - offset[0])
            if size[0] > 0:
                yield offset, size[: len(self.shape)], at
            at += count

    def part_of(self, whole: Tensor) -> Tensor:
        """This rank's tensor, cut out of the whole parameter; padding is zero."""
        inside = whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]
        missing = [n - m for n, m in zip(self.shape, inside.shape, strict=True)]
        return F.pad(inside, [side for n in reversed(missing) for side in (0, n)]).contiguous()


@dataclass(frozen=True)
class Cut:
    """How a group of tensor-parallel ranks shares a model; by default nobody shares anything."""

    places: dict[str, Place]  # by parameter
    size: int = 1  # ranks of the group
    group: dist.ProcessGroup | None = None
    sequence_parallel: bool = False

    def copies(self, name: str) -> int:
        """Ranks of the group that hold the same elements of a parameter."""
        return 1 if self.places[name].is_cut else self.size

    def init_range(self, of_whole: InitRange) -> InitRange:
        """Initial values of a range of this rank's tensor, from those of the whole parameter; padding is zero."""

        def of_part(name: str, start: int, numel: int) -> Tensor:
            place = self.places[name]
            if not place.is_cut:
                return of_whole(name, start, numel)
            values = torch.zeros(numel, dtype=torch.float64)
            for offset, size, at in place.boxes(start, numel):
                # rows of the box, which lie apart in the whole unless they are complete
                height, run, width = size[0], math.prod(size[1:]), math.prod(place.whole[1:])
                if run == width:
                    height, run = 1, height * run
                first = offset[0] * width + sum(offset[1:])
                for row in range(height):
                    to = at - start + row * run
                    values[to : to + run] = of_whole(name, first + row * width, run)
            return values

        return of_part

    def joined(self, name: str, part: Tensor | None) -> Tensor:
        """The whole parameter, or its gradient, from the parts of all ranks; every rank asks. For tests."""
        assert part is not None, f"{name} has no gradient: read it between forward_backward and step"
        place = self.places[name]
        if place.dim is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, place.dim).narrow(place.dim, 0, place.whole[place.dim])

    def sum_partial(self, gradients: Mapping[str, Tensor]) -> None:
        """With sequence parallelism the gradient of a parameter that is not cut comes from this rank's positions
        alone: add up those of all ranks, in place and in one exchange."""
        partial = [gradient for name, gradient in gradients.items() if not self.places[name].is_cut]
        if self.sequence_parallel:
            flat = torch.cat([gradient.reshape(-1) for gradient in partial])
            dist.all_reduce(flat, group=self.group)
            for gradient, summed in zip(partial, flat.split([g.numel() for g in partial]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def sum_partial_in_backward(self, weights: Mapping[str, Tensor]) -> None:
        """The same while the gradients are made, each by itself, for engines that do not show them in between."""

        def summed(gradient: Tensor) -> Tensor:
            total = gradient.to(torch.float32) if gradient.dtype in HALF else gradient.clone()
            dist.all_reduce(total, group=self.group)
            return total.to(gradient.dtype)

        if self.sequence_parallel:
            for name, weight in weights.items():
                if not self.places[name].is_cut:
                    weight.register_hook(summed)
