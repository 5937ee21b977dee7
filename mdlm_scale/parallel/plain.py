"""The engine of one process: the whole model here, nothing to communicate.

In half precision the weights of the forward pass are copies of float32 masters, and the gradients of micro-batches
are added up in float32; otherwise weights and masters are the same tensors.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.kernels import HALF
from mdlm_scale.parallel.engine import Parts
from mdlm_scale.parallel.masters import Masters


class PlainEngine(Masters):
    def __init__(self, parts: Parts, sum_ranks: Callable[[float], float] = lambda whole: whole) -> None:
        model = parts.model.to(parts.dtype).to_empty(device=parts.device)
        self.model: Callable[[Batch], tuple[Tensor, Tensor]] = model
        self.device = parts.device
        self.cut = parts.cut
        self.weights = dict(model.named_parameters())
        masters: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, weight in self.weights.items():
                masters[name] = torch.empty_like(weight, dtype=torch.float32) if parts.dtype in HALF else weight
                masters[name].copy_(parts.init_range(name, 0, weight.numel()).view(weight.shape))
        super().__init__(masters, dict.fromkeys(masters, 0), parts, sum_ranks)
        self._push()

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.model(batch.to(self.device))[1]

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        nlls = []
        for batch in batches:
            loss_sum, nll_M = self.model(batch.to(self.device))
            self._backward(loss_sum / denominator)
            nlls.append(nll_M)
            self._gather_gradients()
        return nlls

    def full_gradient(self, name: str) -> Tensor:
        return self.cut.joined(name, self.masters[name].grad)

    def full_parameter(self, name: str) -> Tensor:
        return self.cut.joined(name, self.weights[name].detach())

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

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
