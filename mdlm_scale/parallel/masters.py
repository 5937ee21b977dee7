"""The tensors a rank updates itself: its master weights or its shard of them, their norm, clipping, Adam, exchange.

This is the half of an engine that is alike wherever the update is ours: plain, fsdp and DeepSpeed's stage 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mdlm_scale.kernels import set_adam_step
from mdlm_scale.parallel.engine import Judge, Parts, Shard, Update, swap


class Masters:
    def __init__(
        self,
        masters: dict[str, Tensor],
        starts: dict[str, int],
        parts: Parts,
        sum_ranks: Callable[[float], float],
        replicas: int = 1,
    ) -> None:
        """`masters` by parameter name, each from `starts` on in this rank's part of the parameter; `sum_ranks` adds up
        a number over ranks that together hold every element of the model, `replicas` times."""
        self.masters = masters
        self.max_norm = parts.max_norm
        self.sum_ranks = sum_ranks
        self.copies = {name: replicas * parts.cut.copies(name) for name in masters}
        self.optimizer = parts.make_optimizer(masters)
        set_adam_step(self.optimizer, masters.values(), 0)
        moments = self.optimizer.state
        self._shards = {
            name: Shard(
                master=master.detach().view(-1),
                exp_avg=moments[master]["exp_avg"].view(-1),
                exp_avg_sq=moments[master]["exp_avg_sq"].view(-1),
                start=starts[name],
                place=parts.cut.places[name],
            )
            for name, master in masters.items()
        }

    def step(self, judge: Judge, lr: float) -> Update:
        """Judge the norm of the masters' `grad`, clip, update, and let the gradients go."""
        by_name = self.gradients()
        gradients = list(by_name.values())
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        copies = norms.new_tensor([self.copies[name] for name in by_name])
        grad_norm = math.sqrt(self.sum_ranks(float((norms.square() / copies).sum())))
        applied = judge(grad_norm)
        if applied:
            if (scale := self.max_norm / (grad_norm + 1e-6)) < 1:  # the small constant is that of torch and DeepSpeed
                torch._foreach_mul_(gradients, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._push()
        for master in self.masters.values():
            master.grad = None
        return Update(grad_norm, applied)

    def gradients(self) -> dict[str, Tensor]:
        return {name: g for name, master in self.masters.items() if (g := master.grad) is not None}

    def shards(self) -> dict[str, Shard]:
        return self._shards

    def loaded(self, updates: int) -> None:
        set_adam_step(self.optimizer, self.masters.values(), updates)
        self._push()

    def exchange(self, flats: dict[str, Tensor]) -> None:
        for name, shard in self._shards.items():
            swap(shard.master, flats[name])
        self._push()

    def _push(self) -> None:
        """Masters to the weights of the forward pass, where these are others."""
