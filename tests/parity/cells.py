"""The matrix: every way to run a step, and how far from one process each may be.

Tolerances. float64: sums in another order differ in the last digits, which 1e-12 of a tensor's largest element leaves
room for, and one Adam update divides by the root of a square, hence 1e-11 for parameters. float32: 1e-5 for gradients,
1e-6 for loss and norm after one step; over a hundred steps rounding grows by itself, so layouts are held to a multiple
of what one process with another order of summation shows.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from mdlm_scale.config import BlockName, EngineName, ParallelConfig, Precision, Recompute
from parity.ranks import run_ranks
from parity.trial import Bug, Trial, run_trial

GROWTH = 10.0  # how many times the rounding of one process a layout may show in float32


@dataclass(frozen=True)
class Cell:
    name: str
    trial: Trial
    slow: bool = False


def fsdp(world_size: int, micro_batch_size: int = 2, **options: Any) -> Trial:
    return Trial(ParallelConfig(engine=EngineName.fsdp, **options), world_size, micro_batch_size=micro_batch_size)


def zero(stage: int, world_size: int, zero_options: dict[str, Any] | None = None, **options: Any) -> Trial:
    """In float64 sums go by all-reduce: DeepSpeed asserts that a reduce-scatter has a narrower dtype."""
    told: dict[str, Any] = {"reduce_scatter": False}
    if stage == 3:  # small parameters are never cut, and here all would be smaller than DeepSpeed's own threshold
        told["stage3_param_persistence_threshold"] = 0
    told |= zero_options or {}
    parallel = ParallelConfig(
        engine=EngineName.deepspeed, zero_stage=stage, deepspeed={"zero_optimization": told}, **options
    )
    return Trial(parallel, world_size)


def plain(micro_batch_size: int = 8, **options: Any) -> Trial:
    return Trial(ParallelConfig(engine=EngineName.plain, **options), micro_batch_size=micro_batch_size)


def float32(trial: Trial) -> Trial:
    """DeepSpeed as it is, reduce-scatter included."""
    parallel = trial.parallel
    if parallel.engine is EngineName.deepspeed:
        told = {k: v for k, v in parallel.deepspeed["zero_optimization"].items() if k != "reduce_scatter"}
        parallel = replace(parallel, deepspeed={"zero_optimization": told})
    return replace(trial, parallel=parallel, precision=Precision.float32)


def modern(trial: Trial) -> Trial:
    """Four heads in two groups; norms and biases do not decay."""
    return replace(trial, block=BlockName.modern)


def short(*cells: Cell) -> list[Cell]:
    return [replace(cell, trial=replace(cell.trial, steps=10)) for cell in cells]


WHOLE = {"stage3_param_persistence_threshold": 100_000}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
FULL, SELECTIVE = {"recompute": Recompute.full}, {"recompute": Recompute.selective}
TP2, TP4 = {"tp_size": 2}, {"tp_size": 4}  # of 61 tokens, which neither divides
SLICED = {"sequence_parallel": True}

CELLS = [
    # a hundred steps
    Cell("accumulation, 8 micro-batches", plain(1)),
    Cell("FSDP2 dp 2", fsdp(2)),
    Cell("FSDP2 dp 4", fsdp(4, 1), slow=True),
    Cell("HSDP 2 x 2", fsdp(4, 1, replicate_size=2)),
    Cell("ZeRO 0 dp 2", zero(0, 2)),
    Cell("ZeRO 1 dp 2", zero(1, 2)),
    Cell("ZeRO 2 dp 2", zero(2, 2), slow=True),
    Cell("ZeRO 3 dp 2", zero(3, 2), slow=True),
    *(Cell(f"ZeRO {stage} dp 4", zero(stage, 4), slow=True) for stage in (1, 3)),
    Cell("FSDP2 tp 2", fsdp(2, 4, **TP2)),
    Cell("FSDP2 tp 2, sequence parallel", fsdp(2, 4, **TP2, **SLICED)),
    Cell("FSDP2 tp 4", fsdp(4, 8, **TP4), slow=True),
    Cell("FSDP2 tp 2 x dp 2", fsdp(4, **TP2), slow=True),
    Cell("HSDP 2 x 1 x tp 2", fsdp(4, **TP2, replicate_size=2), slow=True),
    Cell("ZeRO 1 tp 2 x dp 2", zero(1, 4, **TP2), slow=True),
    Cell("ZeRO 3 tp 2 x dp 2", zero(3, 4, **TP2), slow=True),
    Cell("FSDP2 dp 2", float32(fsdp(2)), slow=True),
    *(Cell(f"ZeRO {stage} dp 2", float32(zero(stage, 2)), slow=True) for stage in range(4)),
    # some steps: what differs is seen in the first
    *short(
        Cell("accumulation, full rows", replace(plain(2), padded=False)),
        Cell("recompute full", plain(**FULL)),
        Cell("recompute selective", plain(**SELECTIVE)),
        Cell("FSDP2 dp 2, full rows", replace(fsdp(2), padded=False)),
        Cell("FSDP2 dp 2, weights stay gathered", fsdp(2, reshard_after_forward=False)),
        Cell("FSDP2 dp 2, offload", fsdp(2, cpu_offload=True)),
        Cell("FSDP2 dp 2, recompute full", fsdp(2, **FULL)),
        Cell("FSDP2 dp 2, recompute selective", fsdp(2, **SELECTIVE)),
        Cell("FSDP2 dp 1", fsdp(1)),
        Cell("FSDP2 dp 3", replace(fsdp(3), global_batch_size=12), slow=True),
        Cell("ZeRO 1 dp 2, recompute full", zero(1, 2, **FULL), slow=True),
        Cell("ZeRO 3 dp 2, small weights stay whole", zero(3, 2, WHOLE)),
        Cell("ZeRO 3 dp 2, many sub-groups", zero(3, 2, {"sub_group_size": 3000}), slow=True),
        Cell("ZeRO 3 dp 2, recompute full", zero(3, 2, **FULL), slow=True),
        Cell("ZeRO 3 dp 2, recompute selective", zero(3, 2, **SELECTIVE), slow=True),
        *(Cell(f"ZeRO {stage} dp 1", zero(stage, 1), slow=True) for stage in range(4)),
        *(Cell(f"ZeRO {stage} dp 4", zero(stage, 4), slow=True) for stage in (0, 2)),
        Cell("ZeRO 1 dp 3", replace(zero(1, 3), global_batch_size=12), slow=True),
        Cell("ZeRO 3 dp 3", replace(zero(3, 3), global_batch_size=12), slow=True),
        Cell("FSDP2 tp 2, no time conditioning", replace(fsdp(2, **TP2), time_conditioning=False)),
        Cell(
            "FSDP2 tp 2, sequence parallel, no time conditioning",
            replace(fsdp(2, **TP2, **SLICED), time_conditioning=False),
        ),
        Cell("FSDP2 tp 2, vocabulary of 62", replace(fsdp(2, **TP2), vocab_size=62)),
        Cell("FSDP2 tp 2, micro-batches of one", fsdp(2, 1, **TP2, **SLICED)),
        *(
            Cell(
                f"FSDP2 tp 2, recompute {how['recompute']}{', sequence parallel' * bool(sliced)}",
                fsdp(2, **TP2, **how, **sliced),
            )
            for how in (FULL, SELECTIVE)
            for sliced in ({}, SLICED)
        ),
        Cell("FSDP2 tp 2, offload", fsdp(2, **TP2, cpu_offload=True), slow=True),
        Cell("FSDP2 tp 2 x dp 2, sequence parallel", fsdp(4, **TP2, **SLICED)),
        Cell("FSDP2 tp 4, sequence parallel", fsdp(4, **TP4, **SLICED), slow=True),
        Cell("HSDP 2 x 1 x tp 2, sequence parallel", fsdp(4, **TP2, **SLICED, replicate_size=2), slow=True),
        Cell("HSDP 2 x 2 x tp 2", fsdp(8, 1, **TP2, replicate_size=2), slow=True),
        *(Cell(f"ZeRO {stage} tp 2", zero(stage, 2, **TP2), slow=stage != 1) for stage in range(4)),
        *(
            Cell(f"ZeRO {stage} tp 2 x dp 2, sequence parallel", zero(stage, 4, **TP2, **SLICED), slow=True)
            for stage in range(4)
        ),
        Cell("ZeRO 3 tp 2, recompute selective", zero(3, 2, **TP2, **SELECTIVE), slow=True),
        Cell("FSDP2 tp 2, compiled blocks", fsdp(2, **TP2, compile=True), slow=True),
        Cell("FSDP2 tp 2, sequence parallel, compiled blocks", fsdp(2, **TP2, **SLICED, compile=True), slow=True),
        Cell("ZeRO 3 tp 2, compiled blocks", zero(3, 2, **TP2, compile=True), slow=True),
        *(Cell(f"ZeRO {stage} tp 2 x dp 2", float32(zero(stage, 4, **TP2)), slow=True) for stage in range(4)),
        Cell("ZeRO 1 tp 2 x dp 2, sequence parallel", float32(zero(1, 4, **TP2, **SLICED)), slow=True),
        Cell("modern, accumulation", modern(plain(1))),
        Cell("modern, recompute selective", modern(plain(**SELECTIVE)), slow=True),
        Cell("modern, FSDP2 dp 2", modern(fsdp(2)), slow=True),
        Cell("modern, FSDP2 tp 2", modern(fsdp(2, **TP2)), slow=True),
        Cell("modern, FSDP2 tp 2, sequence parallel", modern(fsdp(2, **TP2, **SLICED))),
        Cell("modern, FSDP2 tp 2 x dp 2", modern(fsdp(4, **TP2))),
        Cell("modern, FSDP2 tp 2 x dp 2, sequence parallel", modern(fsdp(4, **TP2, **SLICED)), slow=True),
        Cell("modern, HSDP 2 x 1 x tp 2", modern(fsdp(4, **TP2, replicate_size=2)), slow=True),
        *(
            Cell(f"modern, ZeRO {stage} tp 2 x dp 2", modern(zero(stage, 4, **TP2)), slow=stage != 1)
            for stage in range(4)
        ),
        Cell("modern, ZeRO 3 tp 2 x dp 2", float32(modern(zero(3, 4, **TP2))), slow=True),
        Cell("modern, compiled blocks", modern(plain(compile=True)), slow=True),
        Cell("modern, FSDP2 dp 2, compiled blocks", modern(fsdp(2, compile=True)), slow=True),
        Cell("modern, FSDP2 dp 2, compiled blocks, recompute full", modern(fsdp(2, compile=True, **FULL)), slow=True),
        Cell("compiled blocks", plain(compile=True), slow=True),
        Cell("FSDP2 dp 2, compiled blocks", fsdp(2, compile=True), slow=True),
        Cell("ZeRO 1 dp 2, compiled blocks", zero(1, 2, compile=True), slow=True),
        Cell("ZeRO 3 dp 2, compiled blocks", zero(3, 2, compile=True), slow=True),
        *(Cell(f"ZeRO {stage} dp 4", float32(zero(stage, 4)), slow=True) for stage in range(4)),
        *(Cell(f"ZeRO {stage} dp 2, offload", float32(zero(stage, 2, OFFLOAD)), slow=True) for stage in range(1, 4)),
    ),
]


@dataclass
class Differences:
    """Of a run from one process, relative; a tensor's by its largest element, the worst tensor counts."""

    loss: float  # of the first step
    norm: float
    grad: float
    param: float  # after the first step
    ema: float
    losses: float  # over all steps
    params: float  # at the end
    evaluation: float
    is_noise_equal: bool
    traces: list[str] = field(default_factory=list)  # what a refused step or an evaluation changed

    def faults(self, precision: Precision, growth: "Differences | None" = None) -> list[str]:
        """What is out of tolerance."""
        limits = {"loss": 1e-12, "norm": 1e-12, "grad": 1e-12, "param": 1e-11, "ema": 1e-11, "losses": 1e-12,
                  "params": 1e-11, "evaluation": 1e-12}  # fmt: skip
        if precision is Precision.float32:
            assert growth is not None, "float32 is held to what one process shows"
            limits = {"loss": 1e-6, "norm": 1e-6, "grad": 1e-5}
            limits |= {key: GROWTH * getattr(growth, key) for key in ("param", "ema", "losses", "params")}
        figures = {key: getattr(self, key) for key in limits}
        found = [
            f"{key} {figure:.1e} > {limits[key]:.0e}" for key, figure in figures.items() if not figure <= limits[key]
        ]
        if not self.is_noise_equal:
            found.append("noise differs")
        return found + [f"{trace} changed" for trace in self.traces]


_references: list[tuple[Trial, dict[str, Any]]] = []
_growths: list[tuple[Trial, Differences]] = []


def run(trial: Trial, bug: Bug | None = None) -> list[dict[str, Any]]:
    return run_ranks(run_trial, trial.world_size, trial, bug, tp_size=trial.parallel.tp_size)


def reference(trial: Trial) -> dict[str, Any]:
    """One process, the whole batch at once, in the same precision; kept for the cells to come."""
    alone = replace(
        plain(trial.global_batch_size),
        global_batch_size=trial.global_batch_size,
        precision=trial.precision,
        steps=trial.steps,
        padded=trial.padded,
        time_conditioning=trial.time_conditioning,
        block=trial.block,
        vocab_size=trial.vocab_size,
    )
    for known, result in _references:
        if known == alone:
            return result
    (result,) = run(alone)
    _references.append((alone, result))
    return result


def growth_for(trial: Trial) -> Differences | None:
    """What rounding alone does in float32: one process that adds up in another order. None in float64."""
    if trial.precision is Precision.float64:
        return None
    alone = replace(plain(1), precision=Precision.float32, steps=trial.steps, block=trial.block)
    for known, found in _growths:
        if known == alone:
            return found
    _growths.append((alone, differences(alone)))
    return _growths[-1][1]


def differences(trial: Trial, bug: Bug | None = None) -> Differences:
    """Every rank of a run against one process; tensor-parallel ranks have the same slots."""
    ranks, one, tp_size = run(trial, bug), reference(trial), trial.parallel.tp_size
    own = ranks[0]
    steps = range(len(one["noise"]))
    noises = [
        [[slot for rank in ranks[tp_rank::tp_size] for slot in rank["noise"][step]] for step in steps]
        for tp_rank in range(tp_size)
    ]
    return Differences(
        loss=_number(own["loss"][0], one["loss"][0]),
        norm=_number(own["norm"][0], one["norm"][0]),
        grad=_worst(ranks, one, "gradients"),
        param=_worst(ranks, one, "parameters 0"),
        ema=_worst(ranks, one, "ema"),
        losses=max(map(_number, own["loss"], one["loss"])),
        params=_worst(ranks, one, "parameters"),
        evaluation=_number(own["evaluation"], one["evaluation"]),
        is_noise_equal=all(noise == one["noise"] for noise in noises),
        traces=[f"rank {i}: {trace}" for i, rank in enumerate(ranks) for trace in rank["traces"]],
    )


def _number(own: float, one: float) -> float:
    return abs(own - one) / abs(one)


def _worst(ranks: list[dict[str, Any]], one: dict[str, Any], what: str) -> float:
    """The largest difference of any element of any tensor on any rank, relative to its tensor's largest."""
    expected: dict[str, Tensor] = one[what]
    assert all(rank[what].keys() == expected.keys() for rank in ranks)
    return max(
        float((rank[what][name] - value).abs().max() / value.abs().max())
        for rank in ranks
        for name, value in expected.items()
    )
