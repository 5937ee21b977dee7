"""Who does what: sizes of the groups, a rank's coordinates, and the slots of the global batch it owns.

Pure Python, so that every rule can be tested for thousands of ranks in milliseconds. The ranks are a box: replicas of
the model, ranks that shard a replica, ranks that share each matrix; the last are neighbours and own the same slots:

    rank = (replicate_rank * shard_size + shard_rank) * tp_size + tp_rank,    dp_size = replicate_size * shard_size
"""

from dataclasses import dataclass

from mdlm_scale.config import BatchConfig, EngineName, ParallelConfig, outside


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    replicate_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def shard_size(self) -> int:
        return self.dp_size // self.replicate_size

    @property
    def shard_rank(self) -> int:
        return self.dp_rank % self.shard_size

    @property
    def replicate_rank(self) -> int:
        return self.dp_rank // self.shard_size

    def slots(self, num_slots: int) -> range:
        """The contiguous block of the global batch that this rank computes."""
        own = num_slots // self.dp_size
        return range(self.dp_rank * own, (self.dp_rank + 1) * own)

    def micro_slots(self, num_slots: int, micro_batch_size: int) -> list[range]:
        """The same block, cut into the micro-batches of one step."""
        slots = self.slots(num_slots)
        return [slots[i : i + micro_batch_size] for i in range(0, len(slots), micro_batch_size)]

    def describe(self) -> str:
        dp = f"dp {self.dp_size}"
        if self.replicate_size > 1:
            dp += f" ({self.replicate_size} replicas x {self.shard_size} shards)"
        return f"{self.world_size} rank{'s'[: self.world_size > 1]}: {dp}, tp {self.tp_size}"


def faults(parallel: ParallelConfig, batch: BatchConfig, world_size: int) -> list[str]:
    """What is wrong with running this batch on `world_size` ranks."""
    found = outside("parallel", parallel, ("tp_size", "replicate_size"))
    if found := found + outside("batch", batch, ("global_batch_size", "micro_batch_size")):
        return found
    if parallel.engine is EngineName.plain and (world_size > 1 or parallel.tp_size > 1):
        return [
            f"parallel.engine=plain runs one process, but there are {world_size} with parallel.tp_size="
            f"{parallel.tp_size}. Choose parallel.engine=fsdp or deepspeed, or start one process."
        ]
    replicate_size = parallel.replicate_size if parallel.engine is EngineName.fsdp else 1  # others refuse the setting
    if world_size % (parallel.tp_size * replicate_size):
        return [_world_fault(parallel.tp_size, replicate_size, world_size)]
    dp_size = world_size // parallel.tp_size
    unit = batch.micro_batch_size * dp_size
    if batch.global_batch_size % unit:
        return [_batch_fault(batch, dp_size, unit)]
    return []


def _world_fault(tp_size: int, replicate_size: int, world_size: int) -> str:
    """Every factor, and the nearest layouts: fewer or more ranks, or other factors of these ranks."""
    unit = tp_size * replicate_size
    numbers = [n for n in (world_size // unit * unit, -(-world_size // unit) * unit) if n]
    pairs = [(t, r) for t in _divisors(world_size) for r in _divisors(world_size // t)]
    t, r = min(pairs, key=lambda pair: (abs(pair[0] - tp_size) + abs(pair[1] - replicate_size), pair))
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    return (
        f"{ranks} cannot be laid out as tp_size * replicate_size * shards = {tp_size} * {replicate_size} * "
        f"shards: {unit} does not divide {world_size}. Nearest that work: {' or '.join(map(str, numbers))} ranks, or "
        f"parallel.tp_size={t} and parallel.replicate_size={r} on {world_size}."
    )


def _batch_fault(batch: BatchConfig, dp_size: int, unit: int) -> str:
    global_size, micro_size = batch.global_batch_size, batch.micro_batch_size
    below = global_size // unit * unit
    near = ", ".join(str(n) for n in (below, below + unit) if n)
    fault = (
        f"batch.global_batch_size={global_size} is not a multiple of micro_batch_size * dp_size = "
        f"{micro_size} * {dp_size} = {unit}. Nearest that work: {near}"
    )
    if global_size % dp_size == 0:  # the batch is part of the run's meaning, the micro-batch is not
        fitting = [n for n in _divisors(global_size // dp_size) if n <= micro_size]
        return f"{fault}; or batch.micro_batch_size={max(fitting)} with {global_size}."
    return f"{fault}."


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
