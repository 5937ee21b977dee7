"""Parity of the noise (P0), and the loader's thread: batches are functions of (seed, step, slot) and of nothing else.

What each rank of a layout makes of a step is, put together, bit for bit what one process makes of it: `torch.equal`,
no tolerances. And the thread that works ahead changes nothing but the time at which a batch is made.
"""

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mdlm_scale.config import BatchConfig, DiffusionConfig, TimeSampling
from mdlm_scale.data.loader import Loader, balance_note
from mdlm_scale.data.source import Source
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout

LENGTH, NUM_ROWS, NUM_SLOTS, MASK_ID = 12, 37, 16, 4  # the first epoch ends within step 2
STEPS = (0, 1, 2, 3, 10**6)  # across the end of an epoch, then a jump
DIFFUSION = DiffusionConfig()
ALONE = Layout()


def rows(num_rows: int = NUM_ROWS, length: int = LENGTH) -> Source:
    """Rows that all differ, the last with two padded places; the mask id is in the middle of the vocabulary."""
    tokens = torch.arange(num_rows * length, dtype=torch.int32).view(num_rows, length)
    return Source(tokens + MASK_ID + 1, last_length=length - 2)


def loader(
    layout: Layout = ALONE,
    micro_batch_size: int = NUM_SLOTS,
    *,
    source: Source | None = None,
    num_slots: int = NUM_SLOTS,
    diffusion: DiffusionConfig = DIFFUSION,
    seed: int = 7,
    prefetch: int = 2,
) -> Loader:
    batch = BatchConfig(num_slots, micro_batch_size)
    return Loader(source or rows(), layout, batch, diffusion, seed, MASK_ID, 2**31, dropout_sites=6, prefetch=prefetch)


def joined(batches: list[Batch]) -> dict[str, Tensor]:
    """Every field of consecutive batches as one; `rows_M` then counts from the first of them."""
    num_rows = [len(batch.x_BL) for batch in batches]
    offsets = [sum(num_rows[:i]) * batches[0].x_BL.shape[1] for i in range(len(batches))]
    fields = {}
    for name in (field.name for field in dataclasses.fields(Batch)):
        values = [getattr(batch, name) for batch in batches]
        if name == "num_tokens":
            fields[name] = torch.tensor(sum(values))
        elif name == "rows_M":
            fields[name] = torch.cat([value + offset for value, offset in zip(values, offsets, strict=True)])
        else:
            fields[name] = torch.cat(values, dim=1 if name == "dropout_keys" else 0)
    return fields


def part(fields: dict[str, Tensor], slots: range) -> dict[str, Tensor]:
    """The fields of some slots out of those of the whole batch."""
    length = fields["x_BL"].shape[1]
    slot_M = fields["rows_M"] // length
    here_M = (slot_M >= slots.start) & (slot_M < slots.stop)
    cut = {name: value[here_M] for name, value in fields.items() if name.endswith("_M")}
    cut |= {name: value[slots.start : slots.stop] for name, value in fields.items() if name.endswith(("_B", "_BL"))}
    cut["rows_M"] = cut["rows_M"] - slots.start * length
    cut["dropout_keys"] = fields["dropout_keys"][:, slots.start : slots.stop]
    cut["num_tokens"] = cut["is_token_BL"].sum()
    return cut


def differing(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def together(layouts: list[Layout], micro_batch_size: int, step: int, diffusion: DiffusionConfig) -> dict[str, Tensor]:
    ranks = (loader(layout, micro_batch_size, diffusion=diffusion) for layout in layouts)
    return joined([batch for rank in ranks for batch in rank.make(step)])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
def test_ranks_together_make_the_batch_of_one(dp_size: int, micro_batch_size: int, step: int) -> None:
    layouts = [Layout(dp_size, rank) for rank in range(dp_size)]
    ours = together(layouts, micro_batch_size, step, DIFFUSION)
    assert differing(ours, joined(loader().make(step))) == []


@pytest.mark.parametrize(
    "diffusion",
    [
        DiffusionConfig(time_sampling=TimeSampling.stratified),
        DiffusionConfig(time_sampling=TimeSampling.iid),
        DiffusionConfig(num_times=10),
    ],
    ids=["stratified", "iid", "discrete"],
)
def test_ranks_together_make_the_batch_of_one_for_any_times(diffusion: DiffusionConfig) -> None:
    ours = together([Layout(4, rank) for rank in range(4)], 2, 2, diffusion)
    assert differing(ours, joined(loader(diffusion=diffusion).make(2))) == []


@pytest.mark.parametrize("step", [0, 2])
def test_tensor_parallel_peers_make_the_same_batch(step: int) -> None:
    first, second = (joined(loader(Layout(8, rank, tp_size=2), 2).make(step)) for rank in (4, 5))
    assert differing(first, second) == []


@pytest.mark.parametrize("rank", [0, 1, 2047, 4095])
def test_ranks_of_a_large_cluster_make_their_part(rank: int) -> None:
    """4096 ranks of two slots each, over more than one epoch in a step."""
    source, num_slots = rows(5000, 4), 2 * 4096
    whole = joined(loader(source=source, num_slots=num_slots, micro_batch_size=num_slots).make(3))
    ours = joined(loader(Layout(4096, rank), 1, source=source, num_slots=num_slots).make(3))
    assert differing(ours, part(whole, range(2 * rank, 2 * rank + 2))) == []


def test_no_two_slots_share_a_time() -> None:
    """One seed for all ranks must not mean one noise for all ranks."""
    assert len(joined(loader().make(0))["t_B"].unique()) == NUM_SLOTS


@pytest.mark.parametrize("field", ["x_BL", "z_BL", "t_B", "dropout_keys"])
def test_steps_differ(field: str) -> None:
    first, second = (joined(loader().make(step))[field] for step in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("field", ["x_BL", "z_BL", "t_B", "dropout_keys"])
def test_seeds_differ(field: str) -> None:
    first, second = (joined(loader(seed=seed).make(0))[field] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_padding_of_the_last_row_is_not_scored() -> None:
    """Steps 0 to 2 hold every row of the first epoch, so the padded one too."""
    fields = joined([batch for step in range(3) for batch in loader().make(step)])
    is_padded = ~fields["is_token_BL"].flatten()
    assert int(is_padded.sum()) == 2, "the test needs the padded row"
    assert not is_padded[fields["rows_M"]].any()


@pytest.fixture(params=[1, 5], ids=["prefetch 1", "prefetch 5"])
def running(request: pytest.FixtureRequest) -> Iterator[Loader]:
    made = loader(micro_batch_size=4, prefetch=request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "steps",
    [[0, 1, 2, 3, 4], [5, 6, 90, 91, 92], [9, 10, 3, 4, 0, 10], [2, 2, 2]],
    ids=["in order", "forth", "back and forth", "again"],
)
def test_thread_makes_what_the_step_asks_for(running: Loader, steps: list[int]) -> None:
    got = [joined(running.at(step)) for step in steps]
    assert [differing(ours, joined(running.make(step))) for ours, step in zip(got, steps, strict=True)] == [[]] * len(
        got
    )


def test_exception_in_the_thread_reaches_the_caller() -> None:
    empty = loader(source=Source(torch.empty(0, LENGTH, dtype=torch.int32), last_length=0))
    try:
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            empty.at(0)
    finally:
        empty.close()


def test_close_ends_the_thread(running: Loader) -> None:
    before = set(threading.enumerate())
    running.at(0)
    started = set(threading.enumerate()) - before
    running.close()
    assert [len(started), *(thread.is_alive() for thread in started)] == [1, False]


@pytest.mark.parametrize(
    ("time_sampling", "uneven"),
    [(TimeSampling.lattice, False), (TimeSampling.stratified, True), (TimeSampling.iid, True)],
)
def test_uneven_work_is_announced(time_sampling: TimeSampling, uneven: bool) -> None:
    note = balance_note(Layout(16, 0), BatchConfig(64, 4), DiffusionConfig(time_sampling=time_sampling))
    assert (note is not None) == uneven
