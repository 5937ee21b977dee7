"""What does an engine cost: in time over a bare PyTorch loop on one rank, and in bytes a rank on several?

    python tools/bench_engines.py                                          both, a quarter of an hour on two cores
    python tools/bench_engines.py --only bytes --ranks 4 --json engines.json
    python tools/bench_engines.py --only overhead --tokens 1024 4096 --rounds 50
    python tools/bench_engines.py --tp                                     what ranks send each other, a minute

Overhead. For every number of tokens a step, one process holds a copy of the model for each engine and one for a loop in
plain PyTorch: backward, clip_grad_norm_, fused AdamW. All get the same batch, and none has an average of its weights.
Every round each of them makes one step, in an order that rotates from round to round; a step's time is divided by that
of the bare loop in the same round. Printed are the median of these ratios and its standard error, which is the standard
deviation of the median over bootstrap resamples of the rounds.

Bytes. On real ranks, which talk through gloo, each engine makes one step of two micro-batches, with the average of its
weights, and then the passes of another. Twice in these everything that lasts is alive and no pass is under way: between
the micro-batches, and before the update. There the bytes of the storages of all tensors that Python knows are added up,
each storage once, less what was alive before the model. The larger count (ZeRO 1 has whole gradients until the last
micro-batch, then a part), of the rank that has most, is compared with what `model/sizes.py` foretells.

With --tp instead: the collectives of one step of two micro-batches, on real ranks, for every engine with and without
tensor parallelism.
All are counted, where torch starts them, by group and kind, and set beside what `parallel/traffic.py` foretells.
"""

import argparse
import gc
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from bench_masked_ce import in_own_process, seconds_of
from bench_step import initial
from parity.collectives import Collectives
from parity.ranks import run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from mdlm_scale import kernels
from mdlm_scale.config import (
    BatchConfig,
    Config,
    DataConfig,
    EngineName,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recompute,
    TrainConfig,
)
from mdlm_scale.diffusion import corrupt, noise, schedule
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.sizes import Sizes, sizes
from mdlm_scale.parallel import traffic
from mdlm_scale.parallel.engine import Engine, Judge
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import build_engine, build_model, layout_of, places_of
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.step import forward_backward

CPU = torch.device("cpu")
LR = 1e-5
WARM_UP_ROUNDS, RESAMPLES = 2, 2000
BYTES_LENGTH = 32  # tokens of the rows that only serve to fill the gradients
ENGINES = {
    "plain": ParallelConfig(engine=EngineName.plain),
    **{f"zero{stage}": ParallelConfig(EngineName.deepspeed, zero_stage=stage) for stage in range(4)},
    "fsdp": ParallelConfig(EngineName.fsdp),
}
SLICED = {"sequence_parallel": True}
SMALL_REACH = {
    "zero_optimization": {
        f"stage3_{name}": 0 for name in ("max_live_parameters", "max_reuse_distance", "param_persistence_threshold")
    }
}
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {  # ranks, and how they share the work
    "fsdp dp 2": (2, ParallelConfig(EngineName.fsdp)),
    "fsdp dp 2, not resharded": (2, ParallelConfig(EngineName.fsdp, reshard_after_forward=False)),
    "hsdp 2 x 2": (4, ParallelConfig(EngineName.fsdp, replicate_size=2)),
    **{f"zero{stage} dp 2": (2, ParallelConfig(EngineName.deepspeed, zero_stage=stage)) for stage in range(4)},
    "fsdp tp 2": (2, ParallelConfig(EngineName.fsdp, tp_size=2)),
    "fsdp tp 2, sliced": (2, ParallelConfig(EngineName.fsdp, tp_size=2, **SLICED)),
    "fsdp tp 2, sliced, recompute": (
        2, ParallelConfig(EngineName.fsdp, tp_size=2, **SLICED, recompute=Recompute.full)
    ),
    "fsdp tp 4": (4, ParallelConfig(EngineName.fsdp, tp_size=4)),
    "fsdp tp 2 x dp 2": (4, ParallelConfig(EngineName.fsdp, tp_size=2)),
    "fsdp tp 2 x dp 2, sliced": (4, ParallelConfig(EngineName.fsdp, tp_size=2, **SLICED)),
    "hsdp 2 x 1 x tp 2, sliced": (4, ParallelConfig(EngineName.fsdp, tp_size=2, **SLICED, replicate_size=2)),
    **{
        f"zero{stage} tp 2 x dp 2, sliced": (4, ParallelConfig(EngineName.deepspeed, 2, zero_stage=stage, **SLICED))
        for stage in range(4)
    },
    "zero3 tp 2 x dp 2, gathered twice": (
        4, ParallelConfig(EngineName.deepspeed, 2, zero_stage=3, deepspeed=SMALL_REACH, **SLICED)
    ),
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("overhead", "bytes"), help="one half of the benchmark")
    parser.add_argument("--width", type=int, default=512, help="of the model (512)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (4)")
    parser.add_argument("--heads", type=int, default=8, help="of the model (8)")
    parser.add_argument("--vocab", type=int, default=8192, help="vocabulary, the mask last (8192)")
    parser.add_argument("--length", type=int, default=128, help="tokens a row (128)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1536, 4096], help="a step (512 1536 4096)")
    parser.add_argument("--rounds", type=int, default=20, help=f"timed, after {WARM_UP_ROUNDS} to warm up (20)")
    parser.add_argument(
        "--tp", action="store_true", help="count the collectives of many layouts instead, with tp 1, 2 and 4"
    )
    parser.add_argument("--ranks", type=int, default=2, help="whose bytes are counted (2)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--time", type=int, metavar="TOKENS", help="only this overhead, in this process; print JSON")
    args = parser.parse_args()
    for tokens in args.tokens:
        if tokens < 1 or tokens % args.length:
            parser.error(f"--tokens {tokens} is not a multiple of --length {args.length}")
    for name, least in {"rounds": 2, "ranks": 1, "vocab": 2}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    return args


def main() -> int:
    args = arguments()
    config = config_of(args)
    if args.time:
        print(json.dumps(overhead(config, args.vocab, args.time // args.length, args.rounds)))
        return 0
    if args.tp:
        return collectives(config, args.vocab, args.json)
    size = sizes(config.model, args.vocab, args.length)
    result: dict[str, Any] = {}
    if args.only != "bytes":
        result["overhead"] = [in_own_process(__file__, "--time", str(tokens)) for tokens in args.tokens]
    if args.only != "overhead":
        result["bytes"] = state_bytes(config, args.vocab, size, args.ranks)
    print(f"\n{size.num_parameters:,} parameters, float32 on the CPU")
    if "overhead" in result:
        _print_overhead(args, result["overhead"])
    if "bytes" in result:
        _print_bytes(args, result["bytes"])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def config_of(args: argparse.Namespace) -> Config:
    """All but the batch and the engine."""
    return Config(
        data=DataConfig(length=args.length),
        model=ModelConfig(hidden_size=args.width, num_layers=args.layers, num_heads=args.heads),
        train=TrainConfig(precision=Precision.float32, device="cpu"),
    )


class Bare:
    """The loop of a PyTorch tutorial, with as much of an engine's face as is asked for here."""

    def __init__(self, config: Config, model: DiT) -> None:
        self.model = model.to_empty(device=CPU)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(initial(name, 0, p.numel()).view(p.shape))
        o = config.optimizer
        self.max_norm = o.max_grad_norm
        self.optimizer = torch.optim.AdamW(
            model.parameters(), LR, (o.beta1, o.beta2), o.eps, weight_decay=o.weight_decay, fused=True
        )

    def forward_backward(self, batches: Sequence[Batch], denominator: float) -> None:
        for batch in batches:
            loss_sum, _ = self.model(batch)
            (loss_sum / denominator).backward()

    def step(self, judge: Judge, lr: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def full_parameter(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach()


def overhead(config: Config, vocab_size: int, num_rows: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of a step of every engine over those of the bare loop."""
    kernels.tune_cpu()
    config = replace(config, batch=BatchConfig(num_rows, num_rows))
    batch = make_batch(config, vocab_size, range(num_rows))
    with Groups() as groups:
        groups.open(CPU, timeout_minutes=10.0)
        rounds = timed_rounds(make_loops(config, vocab_size, groups), batch, num_rounds)
    ratios = {name: [seconds[name] / seconds["bare"] for seconds in rounds] for name in ENGINES}
    return {
        "tokens": batch.num_tokens,
        "bare_seconds": statistics.median(seconds["bare"] for seconds in rounds),
        "engines": {
            name: {
                "ratio": statistics.median(each),
                "ratio_se": median_se(each),
                "seconds": statistics.median(seconds[name] for seconds in rounds),
            }
            for name, each in ratios.items()
        },
    }


def make_loops(config: Config, vocab_size: int, groups: Groups) -> dict[str, Engine | Bare]:
    """Every engine and the bare loop, each with a model of its own and the same weights."""
    mask_id = vocab_size - 1
    bare = Bare(config, build_model(config, vocab_size, mask_id))

    def copied(name: str, start: int, numel: int) -> Tensor:  # computing them anew takes longer than some rounds
        return bare.full_parameter(name).view(-1)[start : start + numel]

    loops: dict[str, Engine | Bare] = {"bare": bare}
    for name, parallel in ENGINES.items():
        own = replace(config, parallel=parallel)
        model = build_model(own, vocab_size, mask_id)
        loops[name] = build_engine(own, model, copied, CPU, layout_of(own, groups.ranks), groups)
    return loops


def timed_rounds(loops: dict[str, Engine | Bare], batch: Batch, num_rounds: int) -> list[dict[str, float]]:
    """Seconds of a step by loop, for every round after those that warm up."""
    names = list(loops)

    def step(loop: Engine | Bare) -> None:
        loop.forward_backward([batch], batch.num_tokens)
        loop.step(lambda norm: True, LR)

    rounds = []
    for number in range(WARM_UP_ROUNDS + num_rounds):
        first = number % len(names)
        order = names[first:] + names[:first]
        rounds.append({name: seconds_of(partial(step, loops[name]), CPU) for name in order})
        told = "  ".join(f"{name} {rounds[-1][name]:.2f}" for name in names)
        print(f"{batch.num_tokens} tokens, round {number - WARM_UP_ROUNDS + 1}: {told}", file=sys.stderr, flush=True)
    return rounds[WARM_UP_ROUNDS:]


def median_se(values: Sequence[float]) -> float:
    """The standard error of the median, by bootstrap: no shape of the distribution is assumed."""
    draw = random.Random(0)
    return statistics.stdev(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))


def make_batch(config: Config, vocab_size: int, slots: range) -> Batch:
    """These slots of a step of `config.batch.global_batch_size` random rows, corrupted."""
    diffusion, num_rows = config.diffusion, config.batch.global_batch_size
    slot_B = torch.arange(slots.start, slots.stop)
    x_BL = noise.random_bits(0, "bench", 0, slot_B, config.data.length) % (vocab_size - 1)
    return corrupt.corrupted(
        x_BL, torch.ones_like(x_BL, dtype=torch.bool), noise.times(diffusion, 0, 0, num_rows)[slot_B],
        config=diffusion, schedule=schedule.from_config(diffusion), seed=0, step=0, slots=slots,
        mask_id=vocab_size - 1, vocab_size=vocab_size,
        dropout_sites=build_model(config, vocab_size, vocab_size - 1).num_dropout_sites,
    )  # fmt: skip


def state_bytes(config: Config, vocab_size: int, size: Sizes, num_ranks: int) -> dict[str, Any]:
    """What a rank keeps, counted and foretold, by engine."""
    config = replace(config, data=DataConfig(length=BYTES_LENGTH))
    result = {}
    for name, parallel in ENGINES.items():
        world_size = 1 if parallel.engine is EngineName.plain else num_ranks
        parts = size.state_bytes(parallel, shard_size=world_size, weight_bytes=4)
        own = replace(config, parallel=parallel, batch=BatchConfig(4 * world_size, 2))
        ranks = run_ranks(counted_bytes, world_size, own, vocab_size)
        between, before_update = (max(counts) for counts in zip(*ranks, strict=True))
        counted, formula = max(between, before_update), sum(parts.values())
        result[name] = {
            "counted": counted, "formula": formula, "ratio": counted / formula,
            "between_micro_batches": between, "before_update": before_update, "parts": parts,
        }  # fmt: skip
        print(f"{name} on {world_size}: {counted / 1e6:.1f} MB, {formula / 1e6:.1f} MB foretold", flush=True)
    return result


def counted_bytes(groups: Groups, config: Config, vocab_size: int) -> tuple[int, int]:
    """On every rank: the bytes of its state between two micro-batches, and before the update."""
    layout, num_rows = layout_of(config, groups.ranks), config.batch.global_batch_size
    micro_slots = layout.micro_slots(num_rows, config.batch.micro_batch_size)
    batches = Watched(make_batch(config, vocab_size, slots) for slots in micro_slots)
    before = live_bytes()
    model = build_model(config, vocab_size, vocab_size - 1)
    engine = build_engine(config, model, initial, CPU, layout, groups)
    ema = Ema(engine, 0.9999)
    num_tokens = num_rows * config.data.length
    engine.forward_backward(batches, num_tokens)
    engine.step(lambda norm: True, LR)
    ema.update(engine, 1)
    engine.forward_backward(batches, num_tokens)
    return batches.between - before, live_bytes() - before


class Watched(list[Batch]):
    """Micro-batches of a step; counts what is alive when one is done with and the next not yet asked for."""

    between = 0

    def __iter__(self) -> Iterator[Batch]:
        for i in range(len(self)):
            if i:
                self.between = live_bytes()
            yield self[i]


def live_bytes() -> int:
    """Of all storages that a tensor of this process refers to, each counted once."""
    gc.collect()
    # by type, for isinstance asks objects of other packages for their class, and some of them load modules to answer
    found: list[Any] = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages: dict[int, int] = {}
    while found:
        tensor = found.pop()
        if tensor.is_leaf and tensor.grad is not None:
            found.append(tensor.grad)
        if isinstance(tensor, DTensor):
            found.append(tensor._local_tensor)  # it has no storage itself
        elif tensor.device.type != "meta" and not isinstance(tensor, FakeTensor):  # torch.compile leaves fakes behind
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def collectives(config: Config, vocab_size: int, json_file: str | None) -> int:
    """Print and write what the ranks of every layout of LAYOUTS send each other in a step; 0 if it is as foretold."""
    config, rows = replace(config, data=DataConfig(length=BYTES_LENGTH)), []
    print(f"{'rank 0 of':36}{'group':10}{'kind':16}{'count':>7}{'foretold':>10}{'MB':>10}{'foretold':>10}")
    for name, (world_size, parallel) in LAYOUTS.items():
        own = replace(config, parallel=parallel, batch=BatchConfig(4 * world_size // parallel.tp_size, 2))
        found = run_ranks(collective_rows, world_size, own, vocab_size, tp_size=parallel.tp_size)[0]
        for row in found:
            count, size = row["count_foretold"], row["bytes_foretold"]
            told = ("", "") if size is None else ("buckets" if count is None else count, f"{size / 1e6:.3f}")
            note = f"  {row['hooks']} of them by hooks, one a parameter and micro-batch" if row["hooks"] else ""
            print(
                f"{name:36}{row['group']:10}{row['kind']:16}{row['count']:7}{told[0]:>10}"
                f"{row['bytes'] / 1e6:10.3f}{told[1]:>10}{note}",
                flush=True,
            )
        rows += [{"layout": name, **row} for row in found]
    if json_file:
        Path(json_file).write_text(json.dumps({"collectives": rows}, indent=1) + "\n")
    wrong = [row for row in rows if not is_as_foretold(row)]
    print(
        f"{len(rows) - len(wrong)} of {len(rows)} lines as foretold; numbers are sums of a few (losses, norms, flags)"
    )
    return 1 if wrong else 0


def collective_rows(groups: Groups, config: Config, vocab_size: int) -> list[dict[str, Any]]:
    """On every rank: the collectives of a step that is not the first, by group and kind, counted and foretold."""
    layout, parallel = layout_of(config, groups.ranks), config.parallel
    micro_slots = layout.micro_slots(config.batch.global_batch_size, config.batch.micro_batch_size)
    batches = [make_batch(config, vocab_size, slots) for slots in micro_slots]
    model = build_model(config, vocab_size, vocab_size - 1)
    engine = build_engine(config, model, initial, CPU, layout, groups)
    for _ in range(2):
        with Collectives({"all": None, **_groups_by_name(groups, layout)}) as counter:
            forward_backward(engine, batches, groups)
            engine.step(lambda norm: True, LR)
    work = traffic.Work(
        config.model, parallel, layout, places_of(config, vocab_size, layout), config.batch.micro_batch_size,
        config.data.length, [len(batch.rows_M) for batch in batches], weight_bytes=4, on_cpu=True,
    )  # fmt: skip
    foretold: dict[Any, Any] = traffic.of_step(work)
    hooks = sum(each.count or 0 for _, each in traffic.partial_gradients(work) if (each.count or 0) > 1)
    return [
        {
            "group": group, "kind": kind, "count": counter.count[group, kind], "bytes": counter.bytes[group, kind],
            "count_foretold": None if kind == "numbers" else getattr(foretold.get((group, kind)), "count", 0),
            "bytes_foretold": None if kind == "numbers" else getattr(foretold.get((group, kind)), "bytes", 0),
            "hooks": hooks if (group, kind) == ("tp", "all-reduce") else 0,
        }
        for group, kind in sorted(counter.count.keys() | foretold.keys())
    ]  # fmt: skip


def _groups_by_name(groups: Groups, layout: Layout) -> dict[str, Any]:
    """Those of the formula; with replicas, FSDP's groups are its own."""
    if layout.replicate_size == 1:
        return {"tp": groups.tp, "dp": groups.dp}
    first = layout.tp_rank + layout.replicate_rank * layout.shard_size * layout.tp_size
    shards = [first + i * layout.tp_size for i in range(layout.shard_size)]
    first = layout.tp_rank + layout.shard_rank * layout.tp_size
    replicas = [first + i * layout.shard_size * layout.tp_size for i in range(layout.replicate_size)]
    return {"tp": groups.tp, "dp": shards, "replicas": replicas}


def is_as_foretold(row: dict[str, Any]) -> bool:
    """Counts to the last one where the formula has them; bytes too, but for what DeepSpeed's buckets are padded by."""
    if row["kind"] == "numbers":
        return True
    if row["count_foretold"] is None:
        return row["bytes_foretold"] <= row["bytes"] <= 1.01 * row["bytes_foretold"]
    return (row["count"], row["bytes"]) == (row["count_foretold"], row["bytes_foretold"])


def _print_overhead(args: argparse.Namespace, curve: list[dict[str, Any]]) -> None:
    print(
        f"\nA step's time over a bare loop's: one rank, {torch.get_num_threads()} threads, rows of {args.length}; "
        f"median of {args.rounds} rounds +- its standard error (bootstrap)"
    )
    print(f"{'tokens a step':14}" + "".join(f"{point['tokens']:>18}" for point in curve))
    print(f"{'bare, seconds':14}" + "".join(f"{point['bare_seconds']:18.3f}" for point in curve))
    for name in ENGINES:
        cells = (f"{e['ratio']:.3f} +- {e['ratio_se']:.3f}" for e in (point["engines"][name] for point in curve))
        print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))


def _print_bytes(args: argparse.Namespace, found: dict[str, Any]) -> None:
    parts = list(found["plain"]["parts"])
    print(f"\nMB of a rank's state, {args.ranks} ranks (plain: 1); by part as foretold")
    columns = f"{'between':>10}{'at update':>10}{'foretold':>10}{'ratio':>8}  "
    print(f"{'':8}{columns}" + "".join(f"{part:>11}" for part in parts))
    for name, each in found.items():
        shares = "".join(f"{each['parts'][part] / 1e6:11.1f}" for part in parts)
        counts = (each[key] / 1e6 for key in ("between_micro_batches", "before_update", "formula"))
        print(f"{name:8}" + "".join(f"{count:10.1f}" for count in counts) + f"{each['ratio']:8.3f}  {shares}")


if __name__ == "__main__":
    sys.exit(main())
