"""Is a plan right? What it foretells of small runs, held to what they need: bytes, exchanges, and the time of a step.

    python tools/bench_plan.py                          both, some minutes on two cores
    python tools/bench_plan.py --only time              measures here, prints an entry for configs/plan/gpus.yaml
    python tools/bench_plan.py --only time --gpu h100   the same on a GPU, whose data sheet stands there

Bytes. On real ranks (gloo), every engine makes two steps; in the second the bytes of all storages that are alive are
added up at every operation, as autograd runs it. The largest sum of any rank is divided into the plan's peak. The
exchanges of such layouts are counted by `bench_engines.py --tp`.

Time. Rates of this machine are measured by themselves: large square products, products of a model's shapes, attention,
copies, the smallest operation. What all other operations reach is set so that the step of one model takes as long as
planned. Then steps of three other models are planned and measured: medians, in turns.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import torch.nn.functional as F
from bench_engines import LR, make_batch
from bench_masked_ce import seconds_of
from bench_step import initial
from parity.ranks import run_ranks
from parity.storages import StoragePeak

from mdlm_scale import kernels
from mdlm_scale.config import (
    BatchConfig,
    BlockName,
    Config,
    DataConfig,
    Device,
    EngineName,
    ModelConfig,
    ParallelConfig,
    Precision,
    Recompute,
    TrainConfig,
)
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import machine as machine_module
from mdlm_scale.run.build import DTYPES, build_engine, build_model, layout_of
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.machine import Machine
from mdlm_scale.run.plan import plan

VOCAB = 8192
LIMIT = {"bytes": 0.05, "time": 0.25}
NOTHING = Machine(*[1.0] * 16, is_cpu=True)  # a machine of which only bytes are asked
FSDP, ZERO, FULL = EngineName.fsdp, EngineName.deepspeed, Recompute.full
# name: ranks, layout, settings of the run that are not the small one's
LAYOUTS: dict[str, tuple[int, ParallelConfig, dict[str, Any]]] = {
    "plain": (1, ParallelConfig(EngineName.plain), {}),
    "plain, one micro-batch": (1, ParallelConfig(EngineName.plain), {"num_micro": 1}),
    **{f"zero{stage}": (2, ParallelConfig(ZERO, zero_stage=stage), {}) for stage in range(4)},
    **{f"zero{stage}, bf16": (2, ParallelConfig(ZERO, zero_stage=stage), {"precision": "bf16"}) for stage in range(4)},
    **{
        f"zero{stage} tp 2 x dp 2": (4, ParallelConfig(ZERO, 2, zero_stage=stage, sequence_parallel=stage % 2 == 1), {})
        for stage in range(4)
    },
    "fsdp": (2, ParallelConfig(FSDP), {}),
    "fsdp, modern, 7 blocks": (2, ParallelConfig(FSDP), {"block": "modern", "num_layers": 7}),
    "fsdp, one micro-batch": (2, ParallelConfig(FSDP), {"num_micro": 1}),
    "fsdp, bf16": (2, ParallelConfig(FSDP), {"precision": "bf16"}),
    "fsdp, recompute": (2, ParallelConfig(FSDP, recompute=FULL), {}),
    "fsdp, not resharded": (2, ParallelConfig(FSDP, reshard_after_forward=False), {}),
    "hsdp 2 x 2": (4, ParallelConfig(FSDP, replicate_size=2), {}),
    "fsdp tp 2 x dp 2": (4, ParallelConfig(FSDP, 2), {}),
    "fsdp tp 2 x dp 2, sliced, recompute": (4, ParallelConfig(FSDP, 2, sequence_parallel=True, recompute=FULL), {}),
}
CALIBRATION = {"hidden_size": 384, "num_layers": 4, "length": 128, "num_rows": 16}
SIZES = [
    {"hidden_size": 256, "num_layers": 6, "length": 256, "num_rows": 8},
    {"hidden_size": 512, "num_layers": 3, "length": 128, "num_rows": 24},
    {"hidden_size": 768, "num_layers": 2, "length": 512, "num_rows": 4},
]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("bytes", "time"), help="one half of the benchmark")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, metavar="NAME", help="whose bytes are counted (all)")
    parser.add_argument("--gpu", metavar="NAME", help="the entry of this machine's GPU; without a GPU there is none")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps, after two to warm up (7)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    if (args.gpu is not None) != torch.cuda.is_available():
        parser.error(f"--gpu names this machine's GPU, and there is {'one' if args.gpu is None else 'none'}")
    return args


def main() -> int:
    args = arguments()
    result: dict[str, Any] = {}
    if args.only != "time":
        result["bytes"] = [compared_bytes(name) for name in args.layouts or LAYOUTS]
    if args.only != "bytes":
        result["time"], machine = compared_time(args.gpu, args.rounds)
        print("\nAn entry for configs/plan/gpus.yaml, as measured here:\n" + entry(machine))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    wrong = [row for what, rows in result.items() for row in rows if abs(row["ratio"] - 1) > LIMIT[what]]
    print(f"{len(wrong)} of {sum(map(len, result.values()))} are further off than {LIMIT}")
    return 1 if wrong else 0


def small_run(
    parallel: ParallelConfig, num_ranks: int, precision: str = "float32", num_micro: int = 2, num_rows: int = 4,
    length: int = 64, hidden_size: int = 256, num_layers: int = 4, block: str = "paper",
) -> Config:  # fmt: skip
    model = ModelConfig(hidden_size, num_layers, hidden_size // 64, block=BlockName(block))
    return Config(
        data=DataConfig(length=length),
        model=model,
        batch=BatchConfig(num_rows * num_micro * num_ranks // parallel.tp_size, num_rows),
        parallel=parallel,
        train=TrainConfig(precision=Precision(precision), device=Device.auto),
    )


def compared_bytes(name: str) -> dict[str, Any]:
    num_ranks, parallel, settings = LAYOUTS[name]
    config = small_run(parallel, num_ranks, **settings)
    counted = max(run_ranks(peak_bytes, num_ranks, config, 1003, tp_size=parallel.tp_size))
    planned = plan(config, NOTHING, num_ranks, 1003).peak_bytes
    print(f"{name:38}{counted / 1e6:9.2f} MB{planned / 1e6:9.2f} planned{planned / counted:8.3f}", flush=True)
    return {"layout": name, "counted": counted, "planned": planned, "ratio": planned / counted}


def peak_bytes(groups: Groups, config: Config, vocab_size: int) -> int:
    """On every rank: the most that it holds in a step which is not the first."""
    layout, cpu = layout_of(config, groups.ranks), torch.device("cpu")
    micro_slots = layout.micro_slots(config.batch.global_batch_size, config.batch.micro_batch_size)
    batches = [make_batch(config, vocab_size, slots) for slots in micro_slots]
    with StoragePeak() as alive:
        model = build_model(config, vocab_size, vocab_size - 1)
        engine = build_engine(config, model, initial, cpu, layout, groups)
        ema = Ema(engine, 0.9999)
        for number in (1, 2):
            alive.peak = 0
            engine.forward_backward(batches, config.batch.global_batch_size * config.data.length)
            engine.step(lambda norm: True, LR)
            ema.update(engine, number)
    return alive.peak


def compared_time(gpu: str | None, rounds: int) -> tuple[list[dict[str, Any]], Machine]:
    """Steps of the three models, planned and measured; and this machine."""
    if gpu is None:
        kernels.tune_cpu()
    device, precision = (torch.device("cpu"), "float32") if gpu is None else (torch.device("cuda"), "bf16")
    configs = [small_run(ParallelConfig(EngineName.plain), 1, precision, 1, **size) for size in (CALIBRATION, *SIZES)]
    works = rates_of(device, DTYPES[Precision(precision)]) | {i: step_of(c, device) for i, c in enumerate(configs)}
    # in turns: what else runs on this machine slows all alike
    timed = [{name: seconds_of(work, device) for name, work in works.items()} for _ in range(2 + rounds)][2:]
    seconds = {name: statistics.median(each[name] for each in timed) for name in works}
    machine = measured_machine(seconds, Precision(precision), gpu)
    machine = replace(machine, rest=fitted(machine, configs[0], seconds[0]))
    rows = []
    for i, size in enumerate(SIZES, start=1):
        planned = plan(configs[i], machine, 1, VOCAB).step_seconds
        print(f"{size}: {seconds[i]:.3f} s, {planned:.3f} planned, ratio {planned / seconds[i]:.2f}", flush=True)
        rows.append({**size, "seconds": seconds[i], "planned": planned, "ratio": planned / seconds[i]})
    return rows, machine


def step_of(config: Config, device: torch.device) -> Callable[[], None]:
    with Groups() as groups:
        engine = build_engine(
            config, build_model(config, VOCAB, VOCAB - 1), initial, device, layout_of(config, groups.ranks), groups
        )
    ema = Ema(engine, 0.9999)
    batch = make_batch(config, VOCAB, range(config.batch.global_batch_size))

    def step() -> None:
        engine.forward_backward([batch], batch.num_tokens)
        engine.step(lambda norm: True, LR)
        ema.update(engine, 1)

    return step


TIMES = 10  # each of the following in a row
SIDE, COPIED = 1024, 2**25  # of the square product, of what is copied
PRODUCT_FLOPS, ATTENTION_FLOPS = 2 * 2 * 2048 * 512 * 2048, 3.5 * 4 * 8 * 8 * 256 * 256 * 64


def rates_of(device: torch.device, dtype: torch.dtype) -> dict[Any, Callable[[], None]]:
    """Work whose time tells a rate."""
    a, b, c = (torch.ones(SIDE, SIDE, device=device, dtype=dtype) for _ in range(3))
    x_ND, w_FD, w_DF = (
        torch.ones(shape, device=device, dtype=dtype) for shape in ((2048, 512), (2048, 512), (512, 2048))
    )
    heads = torch.ones(8, 8, 256, 64, device=device, dtype=dtype, requires_grad=True)
    source, target = (torch.ones(COPIED, device=device) for _ in range(2))
    few = torch.ones(1, device=device)

    def many(work: Callable[[], Any]) -> Callable[[], None]:
        return lambda: [work() for _ in range(TIMES)] and None

    return {
        "square": many(lambda: torch.mm(a, b, out=c)),
        "product": many(lambda: F.linear(F.linear(x_ND, w_FD), w_DF)),
        "attention": many(lambda: F.scaled_dot_product_attention(heads, heads, heads).sum().backward()),
        "copy": many(lambda: target.copy_(source)),
        "few": many(lambda: few.add_(1)),
    }


def measured_machine(seconds: dict[Any, float], precision: Precision, gpu: str | None) -> Machine:
    """Of a GPU's data sheet and links, what its entry says stays; a CPU's limit is the rate of square products."""
    one = {name: each / TIMES for name, each in seconds.items()}
    if gpu is None:
        tflops = 2 * SIDE**3 / one["square"] / 1e12
        known = Machine(
            tflops_bf16=tflops, tflops_float32=tflops, memory_gb=free_gb(), memory_gbps=8 * COPIED / one["copy"] / 1e9,
            per_node=1, node_gbps=1.0, network_gbps=1.0, usable=0.9, links=1.0, hidden=0.1, fused=1.0,
            exchange_us=100.0, is_cpu=True,
        )  # fmt: skip
    else:
        known = machine_module.load(gpu)
    peak = known.peak_flops(precision)
    return replace(
        known,
        product=PRODUCT_FLOPS / one["product"] / peak,
        attention=ATTENTION_FLOPS / one["attention"] / peak,
        operation_us=1e6 * one["few"],
    )


def fitted(machine: Machine, config: Config, seconds: float) -> float:
    """What all other operations must reach, for this step to take as long as it did."""
    low, high = 0.001, 10.0
    for _ in range(50):
        middle = (low * high) ** 0.5
        slow = plan(config, replace(machine, rest=middle), 1, VOCAB).step_seconds > seconds
        low, high = (middle, high) if slow else (low, middle)
    return middle


def free_gb() -> float:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024 / 1e9


def entry(machine: Machine) -> str:
    numbers = {
        key: float(f"{value:.3g}") if isinstance(value, float) else value for key, value in asdict(machine).items()
    }
    return "\n".join(["mine:", *(f"  {key}: {str(value).lower()}" for key, value in numbers.items())])


if __name__ == "__main__":
    sys.exit(main())
