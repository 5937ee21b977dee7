"""The engine of one process: the whole model here, nothing to communicate.

In half precision the weights of the forward pass are copies of float32 masters, and the gradients of micro-batches
are added up in float32; otherwise weights and masters are the same tensors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.kernels import HALF, set_adam_step
from mdlm_scale.parallel.engine import InitRange, MakeOptimizer, Shard, Update


class PlainEngine:
    def __init__(
        self,
        model: nn.Module,
        init_range: InitRange,
        make_optimizer: MakeOptimizer,
        max_norm: float,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`model` is on the meta device; its weights are made here."""
        self.model = model.to(dtype).to_empty(device=device)
        self.device = device
        self.max_norm = max_norm
        self.weights = dict(self.model.named_parameters())
        self.masters: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, weight in self.weights.items():
                if dtype in HALF:
                    self.masters[name] = torch.empty_like(weight, dtype=torch.float32)
                else:
                    self.masters[name] = weight
                self.masters[name].copy_(init_range(name, 0, weight.numel()).view(weight.shape))
        self.optimizer = make_optimizer(list(self.masters.values()))
        self.loaded(updates=0)

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.model(batch.to(self.device))[1]

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        nlls = []
        for batch in batches:
            loss_sum, nll_M = self.model(batch.to(self.device))
            (loss_sum / denominator).backward()
            nlls.append(nll_M)
            self._gather_gradients()
        return nlls

    def step(self, judge: Callable[[float], bool], lr: float) -> Update:
        gradients = [g for master in self.masters.values() if (g := master.grad) is not None]
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        grad_norm = float(torch.linalg.vector_norm(norms))
        applied = judge(grad_norm)
        if applied:
            if grad_norm > self.max_norm:
                torch._foreach_mul_(gradients, self.max_norm / grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._push()
        for master in self.masters.values():
            master.grad = None
        return Update(grad_norm, applied)

    def shards(self) -> dict[str, Shard]:
        moments = self.optimizer.state
        return {
            name: Shard(
                master=master.detach().view(-1),
                exp_avg=moments[master]["exp_avg"].view(-1),
                exp_avg_sq=moments[master]["exp_avg_sq"].view(-1),
                start=0,
                shape=master.shape,
            )
            for name, master in self.masters.items()
        }

    def loaded(self, updates: int) -> None:
        set_adam_step(self.optimizer, updates)
        self._push()

    def exchange(self, flats: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, master in self.masters.items():
                kept = master.detach().view(-1).clone()
                master.view(-1).copy_(flats[name])
                flats[name].copy_(kept)
        self._push()

    def full_gradient(self, name: str) -> Tensor:
        gradient = self.masters[name].grad
        assert gradient is not None, f"{name} has no gradient: read it between forward_backward and step"
        return gradient

    def full_parameter(self, name: str) -> Tensor:
        return self.weights[name].detach()

    def _gather_gradients(self) -> None:
        """Add half-precision gradients to the masters'."""
        for name, weight in self.weights.items():
            master = self.masters[name]
            if weight is not master and weight.grad is not None:
                wide = weight.grad.to(master.dtype)
                master.grad = wide if master.grad is None else master.grad.add_(wide)
                weight.grad = None

    def _push(self) -> None:
        """Copy masters to the half-precision weights."""
        with torch.no_grad():
            for name, weight in self.weights.items():
                if weight is not self.masters[name]:
                    weight.copy_(self.masters[name])
