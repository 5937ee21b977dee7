"""What ranks send each other in one step, by a formula: which collectives, over which group, how many bytes.

Bytes are those of the whole tensor: what an all-gather makes, what a reduce-scatter starts from. A few numbers that are
added up as well (counts, losses, norms, flags) are left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mdlm_scale.config import EngineName, ModelConfig, ParallelConfig, Recompute
from mdlm_scale.layout import Layout
from mdlm_scale.model.head import num_chunks
from mdlm_scale.parallel.cut import Place

Key = tuple[str, str]  # (group, kind), e.g. ("tp", "all-reduce")


@dataclass(frozen=True)
class Traffic:
    count: int | None  # None: in buckets of the engine's choice
    bytes: int

    def __add__(self, other: "Traffic") -> "Traffic":
        count = None if self.count is None or other.count is None else self.count + other.count
        return Traffic(count, self.bytes + other.bytes)

    def __mul__(self, times: int) -> "Traffic":
        return Traffic(None if self.count is None else self.count * times, self.bytes * times)


@dataclass(frozen=True)
class Work:
    """One step of one rank."""

    model: ModelConfig
    parallel: ParallelConfig
    layout: Layout
    places: Mapping[str, Place]  # of the parameters, as this rank's tensor-parallel group shares them
    micro_batch_size: int
    length: int
    rows: Sequence[int]  # masked rows of each micro-batch
    weight_bytes: int  # of one weight, and of one activation
    on_cpu: bool = False

    @property
    def wide_bytes(self) -> int:
        return max(4, self.weight_bytes)


def of_step(work: Work) -> dict[Key, Traffic]:
    """Everything that this rank takes part in."""
    found: dict[Key, Traffic] = {}
    parts = [*_blocks(work), *_head(work), *partial_gradients(work)] if work.layout.tp_size > 1 else []
    for key, traffic in (*parts, *_data_parallel(work)):
        if traffic.bytes:
            found[key] = found.get(key, Traffic(0, 0)) + traffic
    return found


def partial_gradients(work: Work) -> list[tuple[Key, Traffic]]:
    """With sequence parallelism, of parameters that are not cut: together once a step, by DeepSpeed from stage 1 on
    each by itself after every micro-batch."""
    if not work.parallel.sequence_parallel:
        return []
    shapes = [place.shape for place in work.places.values() if not place.is_cut]
    if work.parallel.engine is EngineName.deepspeed and work.parallel.zero_stage:
        each = Traffic(len(shapes), work.wide_bytes * sum(map(math.prod, shapes)))
        return [(("tp", "all-reduce"), each * len(work.rows))]
    shards = work.layout.shard_size if work.parallel.engine is EngineName.fsdp else 1
    return [(("tp", "all-reduce"), Traffic(1, work.wide_bytes * sum(padded(s, shards) // shards for s in shapes)))]


def sent_bytes(traffic: Mapping[Key, Traffic], group: str, size: int) -> float:
    """What a rank sends over a group of `size`, if the ranks stand in a ring: a sum of all goes round twice."""
    rounds = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
    return sum(rounds[kind] * t.bytes * (size - 1) / size for (over, kind), t in traffic.items() if over == group)


def _blocks(work: Work) -> list[tuple[Key, Traffic]]:
    """Of tensor parallelism, but for the head: a block has two pairs of matrices."""
    rows = Traffic(1, work.micro_batch_size * work.length * work.model.hidden_size * work.weight_bytes)
    pairs = 2 * work.model.num_layers
    forward = pairs if work.parallel.recompute is Recompute.none else 2 * pairs
    if not work.parallel.sequence_parallel:
        counts = {"all-reduce": 1 + forward + pairs}  # the embedding; sums of outputs, and of gradients of inputs
    else:
        counts = {
            "all-reduce": 1,  # the embedding, before it is sliced
            "all-gather": forward + 2 * pairs + 2,  # inputs, again with gradients of outputs; the last norm, embedding
            "reduce-scatter": forward + pairs + 1,
        }
    return [(("tp", kind), rows * count * len(work.rows)) for kind, count in counts.items()]


def _head(work: Work) -> list[tuple[Key, Traffic]]:
    """One small exchange a chunk of rows; without sequence parallelism a sum of the gradients of the hidden rows."""
    found = []
    for num_rows in work.rows:
        exchanged = 3 * num_rows * work.wide_bytes * work.layout.tp_size
        found.append((("tp", "all-gather"), Traffic(num_chunks(num_rows, work.on_cpu), exchanged)))
        if not work.parallel.sequence_parallel:
            hidden = num_rows * work.model.hidden_size * work.weight_bytes
            found.append((("tp", "all-reduce"), Traffic(1, hidden)))
    return found


def _data_parallel(work: Work) -> list[tuple[Key, Traffic]]:
    parallel, micro = work.parallel, len(work.rows)
    shapes = [place.shape for place in work.places.values()]
    if work.layout.dp_size == 1:
        return []
    if parallel.engine is EngineName.fsdp:
        shards, units = work.layout.shard_size, work.model.num_layers + 1
        dealt = sum(padded(shape, shards) for shape in shapes)
        passes = 2 if parallel.reshard_after_forward else 1
        sharded = {
            ("dp", "all-gather"): Traffic(units, dealt * work.weight_bytes) * passes * micro,
            ("dp", "reduce-scatter"): Traffic(units, dealt * work.wide_bytes) * micro,
        }
        replicated = {("replicas", "all-reduce"): Traffic(units, dealt // shards * work.wide_bytes)}
        return [*(sharded.items() if shards > 1 else ()), *(replicated.items() if parallel.replicate_size > 1 else ())]
    whole = sum(map(math.prod, shapes))
    gradients, weights = Traffic(None, whole * work.wide_bytes), Traffic(None, whole * work.weight_bytes)
    large = Traffic(
        None, work.weight_bytes * sum(n for s in shapes if (n := math.prod(s)) >= persistence_threshold(parallel))
    )
    again = micro - 1 if whole <= gathered_at_most(parallel) else 2 * micro - 1
    return {
        0: [(("dp", "all-reduce"), gradients)],
        1: [(("dp", "all-reduce"), gradients), (("dp", "all-gather"), weights)],
        2: [(("dp", "all-reduce"), gradients * micro), (("dp", "all-gather"), weights)],
        # small ones stay gathered between updates, large ones from a forward to its backward pass, in small models
        3: [(("dp", "reduce-scatter"), gradients * micro), (("dp", "all-gather"), weights + large * again)],
    }[parallel.zero_stage]


def persistence_threshold(parallel: ParallelConfig) -> int:
    """Parameters below stay whole at stage 3; by default DeepSpeed's default."""
    return _of_stage_3(parallel, "param_persistence_threshold", 100_000)


def gathered_at_most(parallel: ParallelConfig) -> int:
    """Elements that stage 3 keeps gathered from the forward to the backward pass; larger models are gathered again."""
    limits = ("max_live_parameters", "max_reuse_distance")
    return max(_of_stage_3(parallel, name, 1_000_000_000) for name in limits)


def _of_stage_3(parallel: ParallelConfig, name: str, default: int) -> int:
    return int(parallel.deepspeed.get("zero_optimization", {}).get(f"stage3_{name}", default))


def padded(shape: torch.Size, shards: int) -> int:
    """Elements of a parameter whose rows are dealt to shards of equal size."""
    rows = -(-shape[0] // shards) * shards
    return rows * (math.prod(shape) // shape[0])
