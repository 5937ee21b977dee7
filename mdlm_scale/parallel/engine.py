"""What the loop asks of whoever holds weights, gradients and optimizer state. One protocol, one class an engine.

Gradients are sums over the global batch divided once by its number of real tokens; they are never averaged over ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mdlm_scale.diffusion.corrupt import Batch

InitRange = Callable[[str, int, int], Tensor]  # (parameter name, start, number of elements) -> float64
MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Shard:
    """This rank's range of one parameter: flat tensors that alias the engine's memory."""

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    start: int  # of the range, in the row-major tensor of this tensor-parallel rank
    shape: torch.Size  # of that tensor
    tp_dim: int | None = None  # the dimension that tensor parallelism cuts


@dataclass(frozen=True)
class Update:
    grad_norm: float  # global, before clipping
    applied: bool


class Engine(Protocol):
    def forward(self, batch: Batch) -> Tensor:
        """Nats of each masked row, (M,), without gradients; every rank calls it equally often."""

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        """Gradients of (sum of weighted nats of all micro-batches) / denominator; returns each one's nats, (M,)."""

    def step(self, judge: Callable[[float], bool], lr: float) -> Update:
        """Show the gradient norm to `judge`, then clip and update; if refused, nothing changes but the gradients go."""

    def shards(self) -> dict[str, Shard]:
        """This rank's part of every parameter and its moments, by name."""

    def loaded(self, updates: int) -> None:
        """What `shards` shows was overwritten: take it over, with Adam's counter."""

    def exchange(self, flats: dict[str, Tensor]) -> None:
        """Swap the masters' contents with these tensors of the same ranges, in place."""

    def full_gradient(self, name: str) -> Tensor:
        """A whole gradient, between `forward_backward` and `step`; for tests."""

    def full_parameter(self, name: str) -> Tensor:
        """A whole parameter, as the forward pass uses it; for tests."""
