"""Slots and coordinates for one rank to thousands: nothing here needs a process, so every layout can be tried."""

import re
from itertools import chain, product

import pytest

from mdlm_scale.config import BatchConfig, EngineName, ParallelConfig
from mdlm_scale.layout import Layout, faults

# (world_size, tp_size, micro_batch_size, grad_accum)
LAYOUTS = [
    (world_size, tp_size, micro_batch_size, grad_accum)
    for world_size in (1, 2, 3, 4, 6, 8, 24, 64, 512, 4096)
    for tp_size in (1, 2, 8)
    for micro_batch_size, grad_accum in ((1, 1), (3, 2), (4, 1))
    if world_size % tp_size == 0
]
of_every_layout = pytest.mark.parametrize(("world_size", "tp_size", "micro_batch_size", "grad_accum"), LAYOUTS)

# (world_size, tp_size, replicate_size)
BOXES = [
    (world_size, tp_size, replicate_size)
    for world_size in (1, 2, 3, 4, 6, 8, 12, 24, 64, 384, 4096)
    for tp_size in (1, 2, 3, 8)
    for replicate_size in (1, 2, 3, 16, 512)
    if world_size % (tp_size * replicate_size) == 0
]
of_every_box = pytest.mark.parametrize(("world_size", "tp_size", "replicate_size"), BOXES)


def ranks(world_size: int, tp_size: int, replicate_size: int = 1) -> list[Layout]:
    return [Layout(world_size, rank, tp_size, replicate_size) for rank in range(world_size)]


def sharded(tp_size: int = 1, replicate_size: int = 1) -> ParallelConfig:
    return ParallelConfig(EngineName.fsdp, tp_size, replicate_size=replicate_size)


@of_every_layout
def test_slots_partition_the_batch_in_order(
    world_size: int, tp_size: int, micro_batch_size: int, grad_accum: int
) -> None:
    num_slots = world_size // tp_size * micro_batch_size * grad_accum
    firsts = (layout for layout in ranks(world_size, tp_size) if layout.tp_rank == 0)
    assert list(chain.from_iterable(layout.slots(num_slots) for layout in firsts)) == list(range(num_slots))


@of_every_layout
def test_tensor_parallel_peers_own_the_same_slots(
    world_size: int, tp_size: int, micro_batch_size: int, grad_accum: int
) -> None:
    num_slots = world_size // tp_size * micro_batch_size * grad_accum
    slots = [layout.slots(num_slots) for layout in ranks(world_size, tp_size)]
    assert slots == [slots[rank - rank % tp_size] for rank in range(world_size)]


@of_every_layout
def test_micro_batches_partition_the_slots(
    world_size: int, tp_size: int, micro_batch_size: int, grad_accum: int
) -> None:
    num_slots = world_size // tp_size * micro_batch_size * grad_accum
    for layout in ranks(world_size, tp_size):
        own, micro = layout.slots(num_slots), layout.micro_slots(num_slots, micro_batch_size)
        expected = [own[i * micro_batch_size : (i + 1) * micro_batch_size] for i in range(grad_accum)]
        assert micro == expected, layout


@of_every_box
def test_coordinates_number_the_ranks_tensor_parallel_fastest(
    world_size: int, tp_size: int, replicate_size: int
) -> None:
    box = ranks(world_size, tp_size, replicate_size)
    shard_size = world_size // (tp_size * replicate_size)
    assert [(layout.replicate_rank, layout.shard_rank, layout.tp_rank) for layout in box] == list(
        product(range(replicate_size), range(shard_size), range(tp_size))
    )


@of_every_box
def test_data_parallel_ranks_are_counted_across_replicas(world_size: int, tp_size: int, replicate_size: int) -> None:
    for layout in ranks(world_size, tp_size, replicate_size):
        assert layout.dp_rank == layout.replicate_rank * layout.shard_size + layout.shard_rank, layout


@of_every_box
def test_sizes_multiply_to_the_world(world_size: int, tp_size: int, replicate_size: int) -> None:
    layout = Layout(world_size, 0, tp_size, replicate_size)
    assert layout.shard_size * layout.replicate_size == layout.dp_size
    assert layout.dp_size * layout.tp_size == world_size


@of_every_box
def test_replicas_do_not_move_slots(world_size: int, tp_size: int, replicate_size: int) -> None:
    """How the model is sharded decides nothing about the data."""
    num_slots = world_size // tp_size * 6
    pairs = zip(ranks(world_size, tp_size, replicate_size), ranks(world_size, tp_size), strict=True)
    for replicated, single in pairs:
        assert replicated.micro_slots(num_slots, 3) == single.micro_slots(num_slots, 3), replicated


@of_every_box
def test_layout_that_fits_has_no_fault(world_size: int, tp_size: int, replicate_size: int) -> None:
    batch = BatchConfig(world_size // tp_size * 6, 3)
    assert faults(sharded(tp_size, replicate_size), batch, world_size) == []


@pytest.mark.parametrize(
    ("layout", "described"),
    [
        (Layout(), "1 rank: dp 1, tp 1"),
        (Layout(4096, 7, 8), "4096 ranks: dp 512, tp 8"),
        (Layout(24, 0, 2, 3), "24 ranks: dp 12 (3 replicas x 4 shards), tp 2"),
    ],
)
def test_description(layout: Layout, described: str) -> None:
    assert layout.describe() == described


def test_world_that_does_not_fit_names_every_factor_and_the_nearest() -> None:
    assert faults(sharded(2, 3), BatchConfig(), 16) == [
        "16 ranks cannot be laid out as tp_size * replicate_size * shards = 2 * 3 * shards: 6 does not divide 16. "
        "Nearest that work: 12 or 18 ranks, or parallel.tp_size=2 and parallel.replicate_size=2 on 16."
    ]


WORLDS = [*range(1, 50), 63, 64, 65, 510, 512, 4095, 4096]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("replicate_size", [1, 2, 3, 7, 16])
def test_proposed_worlds_work(tp_size: int, replicate_size: int) -> None:
    """The numbers of ranks and the factors that the fault names have none, and none that fit are nearer."""
    unit = tp_size * replicate_size
    for world_size in (world_size for world_size in WORLDS if world_size % unit):
        (fault,) = faults(sharded(tp_size, replicate_size), BatchConfig(), world_size)
        found = re.search(r"work: ([\d or]+) ranks, or parallel.tp_size=(\d+) and parallel.replicate_size=(\d+)", fault)
        assert found, fault
        numbers = [int(number) for number in found[1].split(" or ")]
        fitting = range(unit, world_size + unit, unit)
        assert numbers == sorted(sorted(fitting, reverse=True)[:2]), fault
        for number in numbers:
            assert faults(sharded(tp_size, replicate_size), BatchConfig(number, 1), number) == [], fault
        other = sharded(int(found[2]), int(found[3]))
        assert faults(other, BatchConfig(world_size, 1), world_size) == [], fault
        distance = abs(other.tp_size - tp_size) + abs(other.replicate_size - replicate_size)
        for t, r in product(range(1, tp_size + distance), range(1, replicate_size + distance)):
            fits = world_size % (t * r) == 0
            assert not fits or abs(t - tp_size) + abs(r - replicate_size) >= distance, fault


@pytest.mark.parametrize(
    ("global_batch_size", "micro_batch_size", "nearest", "fitting"),
    [(500, 8, "496, 504", 5), (7, 2, "6, 8", 1), (3, 8, "8", 3)],
)
def test_batch_that_does_not_divide_names_the_nearest(
    global_batch_size: int, micro_batch_size: int, nearest: str, fitting: int
) -> None:
    assert faults(ParallelConfig(), BatchConfig(global_batch_size, micro_batch_size), 1) == [
        f"batch.global_batch_size={global_batch_size} is not a multiple of micro_batch_size * dp_size = "
        f"{micro_batch_size} * 1 = {micro_batch_size}. Nearest that work: {nearest}; "
        f"or batch.micro_batch_size={fitting} with {global_batch_size}."
    ]


def test_batch_too_uneven_for_any_micro_batch_names_only_batches() -> None:
    (fault,) = faults(sharded(tp_size=2), BatchConfig(500, 8), 32)
    assert fault == (
        "batch.global_batch_size=500 is not a multiple of micro_batch_size * dp_size = 8 * 16 = 128. "
        "Nearest that work: 384, 512."
    )


@pytest.mark.parametrize("world_size", [1, 2, 6, 64, 4096])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8, 12])
def test_proposed_batches_work(world_size: int, micro_batch_size: int) -> None:
    """The nearest batches and the largest micro-batch that the fault names have none."""
    parallel, unit = sharded(), micro_batch_size * world_size
    for global_batch_size in (n for n in (*range(1, 40), 500, 512, 4096, 6144, 12288) if n % unit):
        (fault,) = faults(parallel, BatchConfig(global_batch_size, micro_batch_size), world_size)
        found = re.search(r"work: ([\d, ]+)(?:; or batch.micro_batch_size=(\d+) with (\d+))?\.$", fault)
        assert found, fault
        batches = [int(number) for number in found[1].split(", ")]
        assert batches == sorted(sorted(range(unit, global_batch_size + unit, unit), reverse=True)[:2]), fault
        for batch in batches:
            assert faults(parallel, BatchConfig(batch, micro_batch_size), world_size) == [], fault
        fitting = [n for n in range(1, micro_batch_size) if global_batch_size % (n * world_size) == 0]
        assert (found[2] and int(found[2])) == (max(fitting) if fitting else None), fault
        if fitting:
            assert faults(parallel, BatchConfig(int(found[3]), max(fitting)), world_size) == [], fault


def test_batch_that_divides_has_no_fault() -> None:
    assert faults(ParallelConfig(), BatchConfig(512, 8), 1) == []


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (4096, 8), (1, 2)])
def test_plain_engine_refuses_several_ranks(world_size: int, tp_size: int) -> None:
    (fault,) = faults(ParallelConfig(EngineName.plain, tp_size), BatchConfig(), world_size)
    assert f"engine=plain runs one process, but there are {world_size} with parallel.tp_size={tp_size}" in fault


def test_sizes_below_one_are_all_named() -> None:
    found = faults(sharded(tp_size=0, replicate_size=-2), BatchConfig(0, -1), 1)
    assert found == [
        "parallel.tp_size=0 must be at least 1.",
        "parallel.replicate_size=-2 must be at least 1.",
        "batch.global_batch_size=0 must be at least 1.",
        "batch.micro_batch_size=-1 must be at least 1.",
    ]


@pytest.mark.parametrize("engine", [EngineName.plain, EngineName.deepspeed])
def test_replicas_of_an_engine_without_them_are_no_fault_of_the_layout(engine: EngineName) -> None:
    """The engine refuses the setting by name, which no advice about ranks may hide."""
    assert faults(ParallelConfig(engine=engine, replicate_size=2), BatchConfig(), 1) == []
