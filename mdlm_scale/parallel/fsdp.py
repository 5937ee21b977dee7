"""PyTorch's fully sharded data parallelism (FSDP2), its only door: every rank holds a part of each parameter's rows.

A block's weights are gathered for its forward and its backward pass, and its gradients reduced to shards after every
micro-batch. With replicas (HSDP) a replica's ranks shard it, and gradients are summed over the replicas once a step.
The shards are the masters, at least float32; in half precision the gathered weights are rounded, gradients reduced in
float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mdlm_scale.config import ParallelConfig
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.kernels import HALF
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.engine import Judge, Parts, Update
from mdlm_scale.parallel.groups import Groups, Over
from mdlm_scale.parallel.masters import Masters


class FsdpEngine(Masters):
    def __init__(self, parts: Parts, config: ParallelConfig, layout: Layout, groups: Groups) -> None:
        """Only this rank's shards are made."""
        self.device, self.cut = parts.device, parts.cut
        self.model = parts.model.to(torch.float32 if parts.dtype in HALF else parts.dtype)
        _shard(self.model, _mesh(self.device, layout), config, parts.dtype)
        self.model.to_empty(device="cpu" if config.cpu_offload else self.device)
        self.weights: dict[str, DTensor] = dict(self.model.named_parameters())  # type: ignore[arg-type]
        locals_ = {name: weight.to_local().detach() for name, weight in self.weights.items()}
        starts = {name: _start(weight, layout) for name, weight in self.weights.items()}
        for name, local in locals_.items():
            local.view(-1).copy_(parts.init_range(name, starts[name], local.numel()))
        super().__init__(
            locals_,
            starts,
            parts,
            sum_ranks=lambda squares: groups.sum([squares], over=Over.all)[0],
            replicas=layout.replicate_size,
        )

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            nll_M = self.model(batch.to(self.device))[1]
        # without a backward pass some weights stay gathered, and a later change of the shards would not reach them
        for module in self._sharded():
            module.reshard()
        return nll_M

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> list[Tensor]:
        nlls = []
        assert isinstance(self.model, FSDPModule)
        for number, batch in enumerate(batches, 1):
            self.model.set_requires_all_reduce(number == len(batches))  # of the modules inside too
            loss_sum, nll_M = self.model(batch.to(self.device))
            (loss_sum / denominator).backward()
            nlls.append(nll_M)
        for name, weight in self.weights.items():
            gradient: Any = weight.grad
            self.masters[name].grad = None if gradient is None else gradient.to_local()
        self.cut.sum_partial(self.gradients())
        return nlls

    def step(self, judge: Judge, lr: float) -> Update:
        update = super().step(judge, lr)
        for weight in self.weights.values():
            weight.grad = None
        return update

    def full_gradient(self, name: str) -> Tensor:
        gradient: Any = self.weights[name].grad
        assert gradient is not None, f"{name} has no gradient: read it between forward_backward and step"
        return self.cut.joined(name, gradient.full_tensor())

    def full_parameter(self, name: str) -> Tensor:
        weight: Any = self.weights[name].detach()
        return self.cut.joined(name, weight.full_tensor())

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.model.modules() if isinstance(module, FSDPModule)]


def _mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    names = ("replicate", "shard", "tp")
    mesh = init_device_mesh(
        device.type, (layout.replicate_size, layout.shard_size, layout.tp_size), mesh_dim_names=names
    )
    return mesh["replicate", "shard"] if layout.replicate_size > 1 else mesh["shard"]


def _shard(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, dtype: torch.dtype) -> None:
    """Each block is a unit of gathering, the rest of the model another."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # the model casts where it must
    if dtype in HALF:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if config.cpu_offload else OffloadPolicy()
    blocks = model.blocks
    assert isinstance(blocks, nn.ModuleList), f"model.blocks is {type(blocks).__name__}, not a list of blocks"
    for module in (*blocks, model):
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=config.reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )
        assert isinstance(module, FSDPModule)
        # sums, not means; neither setting reaches the modules inside, and gloo knows no scaled sum
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def _start(weight: DTensor, layout: Layout) -> int:
    """Where this rank's rows begin in the whole parameter: rows are dealt in blocks of equal size, the last shorter."""
    num_rows = weight.shape[0]
    first = min(layout.shard_rank * -(-num_rows // layout.shard_size), num_rows)
    return first * (weight.numel() // num_rows)
