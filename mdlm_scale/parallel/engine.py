"""What the loop asks of whoever holds weights, gradients and optimizer state. One protocol, one class an engine.

Gradients are sums over the global batch divided once by its number of real tokens; they are never averaged over ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.parallel.cut import Cut, InitRange, Place

MakeOptimizer = Callable[[Mapping[str, Tensor]], torch.optim.Optimizer]  # of tensors by their parameters' names
Judge = Callable[[float], bool]  # of the global gradient norm; every rank comes to the same verdict


@dataclass(frozen=True)
class Parts:
    """What every engine is built of."""

    model: nn.Module  # on the meta device; the engine makes the weights, or its part of them
    cut: Cut  # how tensor-parallel ranks share it
    init_range: InitRange  # of this rank's part
    make_optimizer: MakeOptimizer
    max_norm: float  # of the gradients, after clipping
    device: torch.device
    dtype: torch.dtype  # of weights and matrix products; masters are at least float32


@dataclass(frozen=True)
class Shard:
    """This rank's range of one parameter: flat tensors that alias the engine's memory."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    start: int  # of the range, in the row-major tensor of this tensor-parallel rank
    place: Place  # of that tensor in the whole parameter


@dataclass(frozen=True)
class Update:
    grad_norm: float  # global, before clipping; not finite if the gradients are not
    applied: bool


class Engine(Protocol):
    def forward(self, batch: Batch) -> Tensor:
        """Nats of each masked row, (M,), without gradients; every rank calls it equally often."""

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        """Gradients of (sum of weighted nats of all micro-batches) / denominator; returns each one's nats, (M,)."""

    def step(self, judge: Judge, lr: float) -> Update:
        """Show the gradient norm to `judge`, then clip and update; if refused, nothing changes but the gradients go."""

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every parameter and its moments, by name; none of what other ranks hold."""

    def loaded(self, updates: int) -> None:
        """What `shards` shows was overwritten: take it over, with Adam's counter."""

    def exchange(self, flats: dict[str, Tensor]) -> None:
        """Swap the masters' contents with these tensors of the same ranges, in place."""

    def full_gradient(self, name: str) -> Tensor:
        """A whole gradient, between `forward_backward` and `step`; every rank asks, in the same order. For tests."""

    def full_parameter(self, name: str) -> Tensor:
        """A whole parameter, as the forward pass uses it; every rank asks, in the same order. For tests."""


def swap(master: Tensor, flat: Tensor) -> None:
    """Exchange the contents of two tensors of one size; needs a third for the moment."""
    kept = master.clone()
    master.copy_(flat)
    flat.copy_(kept)
