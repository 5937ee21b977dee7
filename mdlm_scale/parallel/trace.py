"""What one micro-batch does and holds, counted while the real model passes over tensors without data.

On the meta device, as a GPU would compute it, or on fake tensors of a CPU. Tensor-parallel layers are the real ones;
their collectives are left out (`traffic.py` knows them). Nothing is allocated, whatever the size; blocks are all alike,
so two short models tell of any depth.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mdlm_scale.config import ModelConfig, Recompute
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.model.dit import DiT

aten = torch.ops.aten
_ALIKE = {  # of the same cost as another, which PyTorch knows
    aten.addmm_: aten.addmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True)
class Operation:
    kind: str  # product, attention, or rest
    flops: int
    bytes: int  # read and written


@dataclass(frozen=True)
class Trace:
    """Bytes are of what the passes make, weights and their gradients left out."""

    operations: Counter[Operation]
    kept: int  # when the forward pass reaches the head: what the blocks keep for the backward pass
    in_head: int  # the most beyond that, while head and loss are computed, forward and backward
    in_block: int  # the most beyond that, in the backward pass of a block

    @property
    def peak(self) -> int:
        return self.kept + max(self.in_head, self.in_block)

    def along(self, other: "Trace", times: int) -> "Trace":
        """As far beyond this as `times` the way from here to the other."""
        operations = {
            key: self.operations[key] + times * (other.operations[key] - self.operations[key])
            for key in self.operations | other.operations
        }
        numbers = {
            name: getattr(self, name) + times * (getattr(other, name) - getattr(self, name))
            for name in ("kept", "in_head", "in_block")
        }
        return Trace(Counter(operations), **numbers)


@dataclass(frozen=True)
class Passes:
    """One micro-batch, forward and backward, on one rank."""

    model: ModelConfig
    vocab_size: int
    length: int
    micro_batch_size: int
    recompute: Recompute
    dtype: torch.dtype
    tp_size: int = 1
    sequence_parallel: bool = False
    on_cpu: bool = False


def of_model(passes: Passes) -> Trace:
    """Of the whole depth."""
    one, two = (of_depth(passes, depth) for depth in (1, 2))
    return one.along(two, passes.model.num_layers - 1)


def of_depth(passes: Passes, num_layers: int) -> Trace:
    fake = FakeTensorMode() if passes.on_cpu else nullcontext()
    device = torch.device("cpu" if passes.on_cpu else "meta")
    with fake, _tp_group(passes.tp_size) as group:
        with torch.device("meta"):
            model = DiT(replace(passes.model, num_layers=num_layers), passes.vocab_size, passes.vocab_size - 1)
        model.recompute = passes.recompute
        if group is not None:
            from mdlm_scale.parallel import tensor  # seconds to import

            tensor.cut(model, group, passes.sequence_parallel)
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                fresh = nn.Parameter(torch.empty(p.shape, dtype=passes.dtype, device=device))
                fresh.register_post_accumulate_grad_hook(_forget)
                setattr(module, name, fresh)
        return _run(model, _batch(passes, model.num_dropout_sites, device))


def _run(model: DiT, batch: Batch) -> Trace:
    with _Counter() as counter:
        kept: list[int] = []
        head_peak: list[int] = []

        def head_is_done(_: Tensor) -> None:
            head_peak.append(counter.peak)
            counter.peak = counter.live

        model.head.register_forward_pre_hook(lambda *_: kept.append(counter.live))
        model.head.weight.register_post_accumulate_grad_hook(head_is_done)
        model(batch)[0].backward()
    return Trace(counter.operations, kept[0], max(0, head_peak[0] - kept[0]), max(0, counter.peak - kept[0]))


def _batch(passes: Passes, dropout_sites: int, device: torch.device) -> Batch:
    """Half of the tokens masked."""
    B, L = passes.micro_batch_size, passes.length
    M = B * L // 2

    def of(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    keys = of(dropout_sites, B, dtype=torch.int32) if dropout_sites else None
    double = torch.float64
    return Batch(
        x_BL=of(B, L), z_BL=of(B, L), t_B=of(B, dtype=double), sigma_B=of(B, dtype=double),
        is_token_BL=of(B, L, dtype=torch.bool), rows_M=of(M), target_M=of(M), weight_M=of(M, dtype=double),
        elbo_weight_M=of(M, dtype=double), dropout_keys=keys, num_tokens=B * L,
    )  # fmt: skip


def _forget(p: Tensor) -> None:
    p.grad = None


@contextmanager
def _tp_group(size: int) -> Iterator[dist.ProcessGroup | None]:
    """A group of ranks that do not exist."""
    if size == 1:
        yield None
        return
    before = sys.excepthook  # it is wrapped, to name the rank
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        sys.excepthook = before


class _Counter(TorchDispatchMode):
    """Operations, and bytes of storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[Operation] = Counter()
        self.live = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":  # nobody is there to talk to
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        if func is aten._local_scalar_dense.default:
            return 0  # no value is there to be wrong, where a CPU looks at them
        out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        theirs = {leaf.untyped_storage()._cdata for leaf in inputs}
        made = [leaf for leaf in outputs if leaf.untyped_storage()._cdata not in theirs]
        if made or func._schema.is_mutable:  # else a view
            self.operations[_operation(func, args, kwargs, out, [*inputs, *(made or outputs)])] += 1
        for leaf in made:
            self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._known.pop(key, 0)


def _operation(func: Any, args: Any, kwargs: Any, out: Any, tensors: list[Tensor]) -> Operation:
    packet = func._overloadpacket
    formula = flop_registry.get(_ALIKE.get(packet, packet))
    flops = 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    kind = "rest" if formula is None else "attention" if "attention" in str(packet) else "product"
    # an expanded tensor is read once
    return Operation(
        kind, flops, sum(min(each.untyped_storage().nbytes(), each.numel() * each.itemsize) for each in tensors)
    )
