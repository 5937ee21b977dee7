"""The model and the engine of a run, out of its configuration; which engine serves, and what it needs."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import Config, Device, EngineName, ParallelConfig, Precision, Recompute, outside
from mdlm_scale.layout import Layout
from mdlm_scale.model.dit import DiT
from mdlm_scale.parallel import traffic
from mdlm_scale.parallel.cut import Cut, InitRange, Place
from mdlm_scale.parallel.engine import Engine, Parts
from mdlm_scale.parallel.groups import Groups, World
from mdlm_scale.parallel.plain import PlainEngine
from mdlm_scale.parallel.zero_json import KNOWN_VERSION
from mdlm_scale.run import optimizer

DTYPES = {Precision.bf16: torch.bfloat16, Precision.float32: torch.float32, Precision.float64: torch.float64}

_DEFAULTS = ParallelConfig()
_OF_ONE_ENGINE = {
    "zero_stage": EngineName.deepspeed,
    "deepspeed": EngineName.deepspeed,
    "replicate_size": EngineName.fsdp,
    "reshard_after_forward": EngineName.fsdp,
    "cpu_offload": EngineName.fsdp,
}


def with_engine(config: Config, world_size: int) -> Config:
    """The configuration with `auto` replaced by the engine it stands for."""
    if config.parallel.engine is not EngineName.auto:
        return config
    engine = EngineName.plain if world_size == 1 else EngineName.deepspeed
    return replace(config, parallel=replace(config.parallel, engine=engine))


def layout_of(config: Config, ranks: World) -> Layout:
    return Layout(ranks.size, ranks.rank, config.parallel.tp_size, config.parallel.replicate_size)


def device_of(config: Config, ranks: World) -> torch.device:
    """Where this rank computes."""
    if config.train.device == Device.cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)
    return device


def build_model(config: Config, vocab_size: int, mask_id: int) -> DiT:
    """On the meta device: an engine makes the weights, or its part of them."""
    with torch.device("meta"):
        model = DiT(config.model, vocab_size, mask_id)
    model.recompute = config.parallel.recompute
    if config.parallel.compile:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)  # the forward alone: engines hang their hooks around it
    return model


def build_engine(
    config: Config, model: DiT, init_range: InitRange, device: torch.device, layout: Layout, groups: Groups
) -> Engine:
    """The process groups must be open, unless the engine is the plain one."""
    parallel = config.parallel
    dtype = DTYPES[config.train.precision]
    without_decay = optimizer.undecayed(model)

    def make_optimizer(params: Mapping[str, Tensor]) -> torch.optim.Optimizer:
        groups = optimizer.groups(params, without_decay)
        return kernels.adamw(groups, config.optimizer, device, is_sharded(parallel))

    cut = _cut(config, model, groups)
    parts = Parts(model, cut, cut.init_range(init_range), make_optimizer, config.optimizer.max_grad_norm, device, dtype)
    if parallel.engine is EngineName.plain:
        return PlainEngine(parts)
    if parallel.engine is EngineName.fsdp:
        from mdlm_scale.parallel.fsdp import FsdpEngine

        return FsdpEngine(parts, parallel, layout, groups)
    from mdlm_scale.parallel.deepspeed import Zero0Engine, ZeroEngine  # seconds to import

    return (ZeroEngine if parallel.zero_stage else Zero0Engine)(parts, parallel, config.batch, layout, groups)


def places_of(config: Config, vocab_size: int, layout: Layout) -> dict[str, Place]:
    """Which part of each parameter a tensor-parallel rank holds."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in DiT(config.model, vocab_size, mask_id=0).named_parameters()}
    if layout.tp_size == 1:
        return {name: Place(shape) for name, shape in shapes.items()}
    from mdlm_scale.parallel import tensor  # seconds to import

    return {name: tensor.place(name, shape, layout.tp_rank, layout.tp_size) for name, shape in shapes.items()}


def crossing_note(config: Config, vocab_size: int, layout: Layout, local_size: int) -> str | None:
    """What it costs that ranks which share matrices are on several machines; None if they are on one."""
    if local_size % layout.tp_size == 0:
        return None
    batch, length = config.batch, config.data.length
    num_micro = batch.global_batch_size // (batch.micro_batch_size * layout.dp_size)
    rows = [batch.micro_batch_size * length // 2] * num_micro
    work = traffic.Work(
        config.model, config.parallel, layout, places_of(config, vocab_size, layout), batch.micro_batch_size, length,
        rows, DTYPES[config.train.precision].itemsize,
    )  # fmt: skip
    sent = traffic.sent_bytes(traffic.of_step(work), "tp", layout.tp_size)
    inside = max(n for n in range(1, local_size + 1) if local_size % n == 0 and layout.tp_size % n == 0)
    return (
        f"parallel.tp_size={layout.tp_size} reaches over machines, which have {local_size} ranks each: in every step "
        f"each rank sends {sent / 1e9:,.3g} GB between them, and waits for it. With parallel.tp_size={inside} that "
        f"would stay inside a machine."
    )


def _cut(config: Config, model: DiT, groups: Groups) -> Cut:
    """Give each tensor-parallel rank its part of the model."""
    if config.parallel.tp_size == 1:
        return Cut({name: Place(p.shape) for name, p in model.named_parameters()})
    from mdlm_scale.parallel import tensor  # seconds to import

    assert groups.tp is not None, f"the process groups were opened without tp_size={config.parallel.tp_size}"
    return tensor.cut(model, groups.tp, config.parallel.sequence_parallel)


def is_sharded(parallel: ParallelConfig) -> bool:
    """Whether a rank's optimizer sees only a part of the model."""
    return parallel.engine is EngineName.fsdp or (parallel.engine is EngineName.deepspeed and parallel.zero_stage > 0)


def faults(config: Config, layout: Layout | None) -> list[str]:
    """What is wrong with the engine's settings; what depends on the layout is left out if that is wrong itself."""
    parallel = config.parallel
    other = f"{parallel.engine}{' (auto in one process)' if parallel.engine is EngineName.plain else ''}"
    found = [
        f"parallel.{name}={getattr(parallel, name)} is a setting of parallel.engine={owner}, not of {other}."
        for name, owner in _OF_ONE_ENGINE.items()
        if owner is not parallel.engine and getattr(parallel, name) != getattr(_DEFAULTS, name)
    ]
    found += outside("parallel", parallel, ("timeout_minutes", "start_minutes"), lambda n: n > 0, "be above 0")
    if parallel.sequence_parallel and parallel.tp_size == 1:
        found.append("parallel.sequence_parallel is for parallel.tp_size above 1: the ranks that share matrices do it.")
    if parallel.compile and parallel.recompute is Recompute.selective:
        found.append(  # what is kept would be seen as changed: compiled code reuses memory
            "parallel.recompute=selective is not for compiled blocks (parallel.compile=true), which choose by "
            "themselves what to compute again. Use recompute=none or full, or compile=false."
        )
    if parallel.tp_size > 1 and parallel.engine is not EngineName.plain:
        try:
            from mdlm_scale.parallel import tensor
        except ImportError as error:
            found.append(
                f"parallel.tp_size={parallel.tp_size} needs megatron-core, which cannot be imported ({error}). Install "
                f"it: pip install megatron-core; or set parallel.tp_size=1."
            )
        else:
            found += tensor.faults(parallel, config.model, config.data)
    if parallel.engine is EngineName.deepspeed:
        try:
            from mdlm_scale.parallel import deepspeed
        except ImportError as error:
            return [
                *found,
                f"parallel.engine=deepspeed needs DeepSpeed, which cannot be imported ({error}). Install it: "
                f"DS_BUILD_OPS=0 pip install deepspeed=={KNOWN_VERSION}; or choose parallel.engine=fsdp.",
            ]
        found += deepspeed.faults(parallel, config.batch, layout, config.train.precision)
    return found
