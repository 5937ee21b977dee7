"""The tensors a rank updates itself: its master weights or its shard of them, their norm, clipping, Adam, exchange.

Serves the engines that leave the update to us: plain, fsdp and DeepSpeed's stage 0.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from mdlm_scale.kernels import set_adam_step
from mdlm_scale.parallel.engine import Judge, Parts, Shard, Update, clip_scale, swap


class Masters:
    def __init__(
        self,
        tensors: dict[str, Tensor],
        starts: dict[str, int],
        shapes: dict[str, torch.Size],
        parts: Parts,
        sum_shards: Callable[[float], float],
    ) -> None:
        """`tensors` by parameter name, each from `starts` on in the tensor of `shapes`; `sum_shards` adds up a number
        over the ranks that hold the other shards."""
        self.tensors = tensors
        self.max_norm = parts.max_norm
        self.sum_shards = sum_shards
        self.optimizer = parts.make_optimizer(list(tensors.values()))
        self.set_updates(0)
        moments = self.optimizer.state
        self.shards = {
            name: Shard(
                master=tensor.detach().view(-1),
                exp_avg=moments[tensor]["exp_avg"].view(-1),
                exp_avg_sq=moments[tensor]["exp_avg_sq"].view(-1),
                start=starts[name],
                shape=shapes[name],
            )
            for name, tensor in tensors.items()
        }

    def step(self, judge: Judge, lr: float) -> Update:
        """Judge the norm of the tensors' `grad`, clip, update, and let the gradients go."""
        gradients = [g for tensor in self.tensors.values() if (g := tensor.grad) is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        grad_norm = math.sqrt(self.sum_shards(float(norms.square().sum())))
        applied = judge(grad_norm)
        if applied:
            if (scale := clip_scale(grad_norm, self.max_norm)) < 1:
                torch._foreach_mul_(gradients, scale)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        for tensor in self.tensors.values():
            tensor.grad = None
        return Update(grad_norm, applied)

    def set_updates(self, updates: int) -> None:
        set_adam_step(self.optimizer, list(self.tensors.values()), updates)

    def exchange(self, flats: dict[str, Tensor]) -> None:
        for name, shard in self.shards.items():
            swap(shard.master, flats[name])
