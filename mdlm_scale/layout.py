"""Who does what: sizes of the groups, a rank's coordinates, and the slots of the global batch it owns.

Pure Python, so that every rule can be tested for thousands of ranks in milliseconds. Ranks of one tensor-parallel
group are neighbours (rank = dp_rank * tp_size + tp_rank) and own the same slots.
"""

from dataclasses import dataclass

from mdlm_scale.config import BatchConfig, EngineName, ParallelConfig


@dataclass(frozen=True)
class Layout:
    world_size: int = 1
    rank: int = 0
    tp_size: int = 1

    @property
    def dp_size(self) -> int:
        return self.world_size // self.tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    def slots(self, num_slots: int) -> range:
        """The contiguous block of the global batch that this rank computes."""
        own = num_slots // self.dp_size
        return range(self.dp_rank * own, (self.dp_rank + 1) * own)

    def micro_slots(self, num_slots: int, micro_batch_size: int) -> list[range]:
        """The same block, cut into the micro-batches of one step."""
        slots = self.slots(num_slots)
        return [slots[i : i + micro_batch_size] for i in range(0, len(slots), micro_batch_size)]


def faults(parallel: ParallelConfig, batch: BatchConfig, world_size: int) -> list[str]:
    """What is wrong with running this batch on `world_size` ranks."""
    sizes = {
        "parallel.tp_size": parallel.tp_size,
        "batch.global_batch_size": batch.global_batch_size,
        "batch.micro_batch_size": batch.micro_batch_size,
    }
    found = [f"{key}={size} must be at least 1." for key, size in sizes.items() if size < 1]
    if found:
        return found
    if parallel.engine is EngineName.plain and (world_size > 1 or parallel.tp_size > 1):
        return [
            f"parallel.engine=plain runs one process, but there are {world_size} with parallel.tp_size="
            f"{parallel.tp_size}. Start one process, without a multi-process launcher."
        ]
    if world_size % parallel.tp_size:
        return [f"parallel.tp_size={parallel.tp_size} does not divide the {world_size} ranks."]
    dp_size = world_size // parallel.tp_size
    unit = batch.micro_batch_size * dp_size
    if batch.global_batch_size % unit:
        below = batch.global_batch_size // unit * unit
        near = ", ".join(str(n) for n in (below, below + unit) if n)
        return [
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of micro_batch_size * dp_size = "
            f"{batch.micro_batch_size} * {dp_size} = {unit}. Nearest that work: {near}."
        ]
    return []
