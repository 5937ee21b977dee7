"""What a run would need on GPUs that are not here: memory of each, exchanges, time of a step; which layouts would fit.

Parameters, operations and bytes are those of the real model, passed through on the meta device and cut by the real
layout; only times come from a model of a machine (`machine.py`).
"""

import json
from argparse import Namespace
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from mdlm_scale import config as config_module
from mdlm_scale import layout as layout_module
from mdlm_scale.config import Config, Device, EngineName, ModelConfig, ParallelConfig, Recompute
from mdlm_scale.data import tokenizer
from mdlm_scale.errors import raise_if_any
from mdlm_scale.layout import Layout
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel import memory, trace, traffic
from mdlm_scale.parallel.cut import Place
from mdlm_scale.parallel.groups import World
from mdlm_scale.parallel.trace import Passes, Trace
from mdlm_scale.run import build
from mdlm_scale.run import machine as machine_module
from mdlm_scale.run.machine import Machine
from mdlm_scale.run.main import faults
from mdlm_scale.run.metrics import json_faults, write_json

SHOWN = 10  # layouts of a search


@dataclass(frozen=True)
class Exchange:
    """One kind of collective in a step."""

    group: str
    kind: str
    ranks: int
    link: str
    count: int | None  # None: in buckets of the engine's choice
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    layout: str
    settings: dict[str, Any]
    num_parameters: int
    moments: dict[str, dict[str, int]]  # bytes by kind, at each
    peak_bytes: int
    usable_bytes: int
    exchanges: list[Exchange]
    seconds: dict[str, float]  # of a step, by what takes them
    step_seconds: float
    mfu: float
    tokens_per_second: float
    days: float
    gpu_hours: float

    @property
    def missing_bytes(self) -> int:
        return max(0, self.peak_bytes - self.usable_bytes)


def main(args: Namespace) -> int:
    """`python -m mdlm_scale.plan`: the exit code."""
    machine = machine_module.load(args.gpu)
    config = config_module.load(args.config, args.overrides)
    raise_if_any(json_faults(args.json))
    config = build.with_engine(replace(config, train=replace(config.train, device=Device.cpu)), args.gpus)
    if not args.search:
        raise_if_any([*faults(config, World(size=args.gpus)), *_not_planned(config)])
    vocab_size = config.tokenizer.vocab_size or tokenizer.load(config.tokenizer).vocab_size
    if args.search:
        fitting, refused = search(config, machine, args.gpus, vocab_size)
        _print_search(fitting, refused, _settings(config))
        result: dict[str, Any] = {"fitting": [asdict(each) for each in fitting], "refused": refused}
        said = "" if fitting else f"No layout of {args.gpus} x {args.gpu} fits: take more, or larger ones."
    else:
        made = plan(config, machine, args.gpus, vocab_size)
        _print_plan(made, config, args)
        result = asdict(made)
        said = _misfit(made, config, machine, args, vocab_size) if made.missing_bytes else ""
    if args.json:
        write_json(args.json, json.dumps(result, indent=1) + "\n")
    raise_if_any([said] if said else [])
    return 0


def plan(config: Config, machine: Machine, num_gpus: int, vocab_size: int) -> Plan:
    layout, parallel, batch = build.layout_of(config, World(size=num_gpus)), config.parallel, config.batch
    length, dtype = config.data.length, build.DTYPES[config.train.precision]
    places = _places(config.model, vocab_size, parallel.tp_size)
    size = _sizes(config.model, vocab_size, length)
    # FSDP deals whole rows: the first rank has most
    dealt = layout.shard_size if parallel.engine is EngineName.fsdp else 1
    here = replace(size, num_parameters=sum(traffic.padded(place.shape, dealt) for place in places.values()))
    passes = _trace(Passes(
        config.model, vocab_size, length, batch.micro_batch_size, parallel.recompute, dtype, parallel.tp_size,
        parallel.sequence_parallel, machine.is_cpu,
    ))  # fmt: skip
    num_micro = batch.global_batch_size // (batch.micro_batch_size * layout.dp_size)
    rows = [batch.micro_batch_size * length // 2] * num_micro
    work = traffic.Work(
        config.model, parallel, layout, places, batch.micro_batch_size, length, rows, dtype.itemsize, machine.is_cpu
    )
    state = here.state_bytes(parallel, layout.shard_size, dtype.itemsize)
    moments = memory.moments(work, state, passes)
    exchanges = _exchanges(work, machine)
    seconds = _seconds(config, machine, passes, exchanges, num_micro, here.num_parameters // _cut(parallel, layout))
    step = sum(seconds.values())
    tokens = batch.global_batch_size * length
    days = config.train.num_steps * step / 86400
    return Plan(
        layout=layout.describe(),
        settings=_settings(config),
        num_parameters=size.num_parameters,
        moments=moments,
        peak_bytes=max(sum(moment.values()) for moment in moments.values()),
        usable_bytes=int(machine.usable_bytes),
        exchanges=exchanges,
        seconds=seconds,
        step_seconds=step,
        mfu=size.step_flops(tokens, tokens // 2) / step / num_gpus / machine.peak_flops(config.train.precision),
        tokens_per_second=tokens / step,
        days=days,
        gpu_hours=24 * days * num_gpus,
    )


def search(config: Config, machine: Machine, num_gpus: int, vocab_size: int) -> tuple[list[Plan], list[dict[str, Any]]]:
    """Every layout that fits, the fastest first; and the others with their reasons. Micro-batches are doubled."""
    fitting, refused = [], []
    for parallel in _candidates(config, machine, num_gpus):
        micro_batch_size = 1
        while True:
            batch = replace(config.batch, micro_batch_size=micro_batch_size)
            own = replace(config, parallel=parallel, batch=batch)
            wrong = layout_module.faults(parallel, batch, num_gpus) or _cut_faults(own)
            if wrong:
                if micro_batch_size == 1:
                    refused.append({"settings": _settings(own), "reason": " ".join(wrong)})
                break
            made = plan(own, machine, num_gpus, vocab_size)
            if made.missing_bytes:
                reason = f"{made.peak_bytes / 1e9:.1f} GB, {made.missing_bytes / 1e9:.1f} too many"
                refused.append({"settings": made.settings, "reason": reason})
                break
            fitting.append(made)
            micro_batch_size *= 2
    return sorted(fitting, key=lambda each: each.step_seconds), refused


def _candidates(config: Config, machine: Machine, num_gpus: int) -> list[ParallelConfig]:
    found = []
    cuts = [n for n in (1, 2, 4, 8) if n <= machine.per_node and num_gpus % n == 0]
    for tp_size in cuts:
        dp_size = num_gpus // tp_size
        on_node = max(1, machine.per_node // tp_size)
        replicas = sorted({1, max(1, dp_size // on_node), max(1, dp_size // (4 * on_node))} - {dp_size}) or [1]
        for recompute in Recompute:
            if config.parallel.compile and recompute is Recompute.selective:
                continue  # refused
            common = ParallelConfig(
                tp_size=tp_size,
                sequence_parallel=tp_size > 1 and config.data.length % tp_size == 0,
                recompute=recompute,
                compile=config.parallel.compile,
            )
            found += [replace(common, engine=EngineName.fsdp, replicate_size=n) for n in replicas if dp_size % n == 0]
            found += [replace(common, engine=EngineName.deepspeed, zero_stage=stage) for stage in range(4)]
    return found


def _seconds(
    config: Config, machine: Machine, passes: Trace, exchanges: list[Exchange], num_micro: int, num_updated: int
) -> dict[str, float]:
    """Of a step. Exchanges of tensor parallelism are waited for; the others run behind the passes, if their engine
    lets them."""
    parallel = config.parallel
    once = machine.seconds(passes.operations, config.train.precision, parallel.compile)
    found = {kind: each * num_micro for kind, each in once.items()}
    taken = {name: sum(each.seconds for each in exchanges if each.group == name) for name in ("tp", "dp", "replicas")}
    found["tensor parallelism"] = taken["tp"]
    overlaps = parallel.engine is EngineName.fsdp or parallel.zero_stage == 3
    hidden, each_micro = machine.hidden * sum(found.values()) / num_micro * overlaps, taken["dp"] / num_micro
    waits = [max(0.0, each_micro - hidden)] * (num_micro - 1)  # replicas exchange in the last micro-batch alone
    found["data parallelism"] = sum(waits) + max(0.0, each_micro + taken["replicas"] - hidden)
    found["update"] = machine.update_seconds(num_updated)
    return found


def _exchanges(work: traffic.Work, machine: Machine) -> list[Exchange]:
    layout = work.layout
    is_fsdp = work.parallel.engine is EngineName.fsdp
    groups = {  # ranks, and how far apart they stand
        "tp": (layout.tp_size, 1),
        "dp": (layout.shard_size if is_fsdp else layout.dp_size, layout.tp_size),
        "replicas": (layout.replicate_size, layout.tp_size * layout.shard_size),
    }
    found = []
    for (group, kind), each in traffic.of_step(work).items():
        size, stride = groups[group]
        link = "node" if size * stride <= machine.per_node else "network"
        seconds = machine.exchange_seconds(kind, each, size, stride)
        found.append(Exchange(group, kind, size, link, each.count, each.bytes, seconds))
    return found


def _cut(parallel: ParallelConfig, layout: Layout) -> int:
    """Among how many ranks the update is divided."""
    return layout.shard_size if build.is_sharded(parallel) else 1


def _cut_faults(config: Config) -> list[str]:
    if config.parallel.tp_size == 1:
        return []
    from mdlm_scale.parallel import tensor  # seconds to import

    return tensor.faults(config.parallel, config.model, config.data)


def _not_planned(config: Config) -> list[str]:
    zero = config.parallel.deepspeed.get("zero_optimization", {})
    names = [f"parallel.deepspeed.zero_optimization.{key}" for key in zero if key.startswith("offload")]
    names += ["parallel.cpu_offload"] * config.parallel.cpu_offload
    return [f"{name}: what is offloaded to the host is not planned. Plan without it." for name in names]


# what layouts of a search have in common
_trace = cache(trace.of_model)
_sizes = cache(sizes)


@cache
def _places(model: ModelConfig, vocab_size: int, tp_size: int) -> dict[str, Place]:
    return build.places_of(Config(model=model), vocab_size, Layout(tp_size, tp_size=tp_size))


def _settings(config: Config) -> dict[str, Any]:
    """What makes a layout, as it is typed."""
    parallel = config.parallel
    chosen: dict[str, Any] = {"batch.micro_batch_size": config.batch.micro_batch_size}
    names = ["engine", "tp_size", "sequence_parallel", "recompute"]
    names += {EngineName.fsdp: ["replicate_size"], EngineName.deepspeed: ["zero_stage"]}.get(parallel.engine, [])
    return chosen | {f"parallel.{name}": getattr(parallel, name) for name in names}


def _misfit(made: Plan, config: Config, machine: Machine, args: Namespace, vocab_size: int) -> str:
    said = (
        f"This layout does not fit {args.gpu}: {made.peak_bytes / 1e9:.1f} GB are needed, "
        f"{made.missing_bytes / 1e9:.1f} more than can be used."
    )
    fitting, _ = search(config, machine, args.gpus, vocab_size)
    if not fitting:
        return f"{said} No layout of {args.gpus} GPUs does: take more, or larger ones."
    typed = [_typed(each.settings, _settings(config)) for each in fitting[:3]]
    return "\n  ".join([f"{said} These fit, the fastest first:", *typed])


def _typed(settings: dict[str, Any], given: dict[str, Any]) -> str:
    """What to type for these settings, where others are given."""
    changed = [f"{key}={str(value).lower()}" for key, value in settings.items() if given.get(key) != value]
    return " ".join(changed) or "(as it is)"


def _print_plan(made: Plan, config: Config, args: Namespace) -> None:
    parallel, tokens = config.parallel, config.batch.global_batch_size * config.data.length
    stage = f" stage {parallel.zero_stage}" if parallel.engine is EngineName.deepspeed else ""
    print(
        f"{args.config} on {args.gpus} x {args.gpu}: {made.layout}; {parallel.engine}{stage}, recompute "
        f"{parallel.recompute}{', sequence parallel' * parallel.sequence_parallel}{', compiled' * parallel.compile}, "
        f"{config.train.precision}\n{made.num_parameters:,} parameters; {tokens:,} tokens a step, micro-batches of "
        f"{config.batch.micro_batch_size} x {config.data.length}; {config.train.num_steps:,} steps\n"
    )
    kinds = dict.fromkeys(kind for moment in made.moments.values() for kind, size in moment.items() if size)
    print(f"{'GB of a GPU':18}" + "".join(f"{kind:>{max(9, len(kind) + 2)}}" for kind in kinds) + f"{'sum':>9}")
    for name, moment in made.moments.items():
        cells = (f"{moment[kind] / 1e9:.2f}" if moment.get(kind) else "" for kind in kinds)
        total = sum(moment.values())
        row = "".join(f"{cell:>{max(9, len(kind) + 2)}}" for cell, kind in zip(cells, kinds, strict=True))
        print(f"  {name:16}{row}{total / 1e9:9.2f}{'  the peak' * (total == made.peak_bytes)}")
    fits = "DOES NOT FIT" if made.missing_bytes else "fits"
    print(f"  {fits}: {made.peak_bytes / made.usable_bytes:.0%} of {made.usable_bytes / 1e9:.1f} GB that can be used\n")
    if made.exchanges:
        print(f"{'exchanges a step':24}{'ranks':>6}{'link':>9}{'times':>12}{'GB':>10}{'seconds':>10}")
    for each in made.exchanges:
        times = "in buckets" if each.count is None else f"{each.count:,}"
        numbers = f"{each.ranks:6}{each.link:>9}{times:>12}{each.bytes / 1e9:10.2f}{each.seconds:10.3f}"
        print(f"  {each.group + ' ' + each.kind:22}{numbers}")
    parts = ", ".join(f"{_TOLD[name]} {seconds:.3g}" for name, seconds in made.seconds.items() if seconds)
    behind = sum(each.seconds for each in made.exchanges if each.group != "tp") - made.seconds["data parallelism"]
    hidden = f"\n     behind these run {behind:.3g} of exchanges" if behind > 0.0005 * made.step_seconds else ""
    print(
        f"\nstep {made.step_seconds:.3g} s: {parts}{hidden}\n"
        f"     MFU {made.mfu:.1%}, {made.tokens_per_second:,.0f} tokens/s\n"
        f"run  {made.days:.3g} days, {made.gpu_hours:,.0f} GPU-hours; evaluations and saves come on top"
    )


_TOLD = {
    "product": "matrix products", "attention": "attention", "rest": "other operations",
    "tensor parallelism": "exchanges inside blocks", "data parallelism": "waiting for other exchanges",
    "update": "update",
}  # fmt: skip


def _print_search(fitting: list[Plan], refused: list[dict[str, Any]], given: dict[str, Any]) -> None:
    """The fastest, and of what does not fit the layouts that no micro-batch makes fit."""
    if fitting:
        print(f"{len(fitting)} layouts fit, the fastest first:\n{'s/step':>8}{'MFU':>7}{'GB':>8}{'days':>10}")
    for each in fitting[:SHOWN]:
        numbers = f"{each.step_seconds:8.3g}{each.mfu:7.1%}{each.peak_bytes / 1e9:8.3g}{each.days:10.3g}"
        print(f"{numbers}  {_typed(each.settings, given)}")
    never = [row for row in refused if row["settings"]["batch.micro_batch_size"] == 1]
    if never:
        print(f"\n{len(never)} fit with no micro-batch{', some of them:' if len(never) > SHOWN else ':'}")
    for row in never[:: max(1, len(never) // SHOWN)][:SHOWN]:
        print(f"  {row['reason']}: {_typed(row['settings'], given)}")
    if larger := len(refused) - len(never):
        print(f"\n{larger} fit, but with no larger micro-batch; --json names all, with reasons")
