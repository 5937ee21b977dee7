"""The moving average of the master weights: one flat tensor a parameter, the same ranges as the engine's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mdlm_scale.parallel.engine import Engine


class Ema:
    def __init__(self, engine: Engine, decay: float) -> None:
        self.decay = decay
        self.flats: dict[str, Tensor] = {name: shard.master.clone() for name, shard in engine.shards().items()}

    def update(self, engine: Engine, updates: int) -> None:
        """Move towards the masters after update number `updates`, the first being 1."""
        shards = engine.shards()
        masters = [shards[name].master for name in self.flats]
        torch._foreach_lerp_(list(self.flats.values()), masters, 1 - decay_at(self.decay, updates))

    @contextmanager
    def swapped(self, engine: Engine) -> Iterator[None]:
        """The engine computes with the averaged weights meanwhile."""
        engine.exchange(self.flats)
        try:
            yield
        finally:
            engine.exchange(self.flats)


def decay_at(decay: float, updates: int) -> float:
    """Shorter memory in the first updates, so that the initial weights are forgotten."""
    return min(decay, (1 + updates) / (10 + updates))
