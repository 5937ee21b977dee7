"""Slots and coordinates for one rank to thousands: nothing here needs a process, so every layout can be tried."""

from itertools import chain, product

import pytest

from mdlm_scale.config import BatchConfig, ParallelConfig
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


def ranks(world_size: int, tp_size: int) -> list[Layout]:
    return [Layout(world_size, rank, tp_size) for rank in range(world_size)]


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


@pytest.mark.parametrize(("world_size", "tp_size"), sorted({layout[:2] for layout in LAYOUTS}))
def test_coordinates_number_the_ranks_tensor_parallel_first(world_size: int, tp_size: int) -> None:
    coordinates = [(layout.dp_rank, layout.tp_rank) for layout in ranks(world_size, tp_size)]
    dp_size = Layout(world_size, 0, tp_size).dp_size
    assert coordinates == list(product(range(dp_size), range(tp_size)))


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


def test_batch_that_divides_has_no_fault() -> None:
    assert faults(ParallelConfig(), BatchConfig(512, 8), 1) == []


@pytest.mark.parametrize(("world_size", "tp_size"), [(2, 1), (4096, 8), (1, 2)])
def test_plain_engine_refuses_several_ranks(world_size: int, tp_size: int) -> None:
    (fault,) = faults(ParallelConfig(tp_size=tp_size), BatchConfig(), world_size)
    assert f"engine=plain runs one process, but there are {world_size} with parallel.tp_size={tp_size}" in fault


def test_sizes_below_one_are_all_named() -> None:
    found = faults(ParallelConfig(tp_size=0), BatchConfig(0, -1), 1)
    assert found == [
        "parallel.tp_size=0 must be at least 1.",
        "batch.global_batch_size=0 must be at least 1.",
        "batch.micro_batch_size=-1 must be at least 1.",
    ]
