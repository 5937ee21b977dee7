"""Parity of the noise (P0), and the loader's thread: batches are functions of (seed, step, slot) and of nothing else.

What each rank of a layout makes of a step is, put together, bit for bit what one process makes of it: `torch.equal`,
no tolerances. And the thread that works ahead changes nothing but the time at which a batch is made.
"""

import dataclasses
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from shard_writer import ShardWriter
from torch import Tensor

from mdlm_scale.config import BatchConfig, DataConfig, DiffusionConfig, TimeSampling, TokenizerConfig
from mdlm_scale.data import source as source_module
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.loader import Loader, balance_note
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, record_type
from mdlm_scale.data.source import Source, in_memory
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.errors import DataError
from mdlm_scale.layout import Layout

BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
LENGTH, NUM_ROWS, NUM_SLOTS, MASK_ID = 12, 37, 16, 4  # the first epoch ends within step 2
STEPS = (0, 1, 2, 3, 10**6)  # across the end of an epoch, then a jump
DIFFUSION = DiffusionConfig()
ALONE = Layout()


def records(num_rows: int = NUM_ROWS, length: int = LENGTH, first: int = MASK_ID + 1) -> Records:
    """Rows that all differ, the last with two padded places; the mask id is in the middle of the vocabulary."""
    made = np.empty(num_rows, record_type(length, np.dtype("<u2")))
    made[TOKENS] = np.arange(num_rows * length).reshape(num_rows, length) + first
    made[NUM_TOKENS] = length
    made[NUM_TOKENS][-1] -= 2
    return made


def write(folder: Path, rows: Records, *, compress: bool = False) -> str:
    """Shards of seven rows."""
    folder.mkdir()
    writer = ShardWriter(folder, rows.dtype, shard_bytes=480, compress=compress)
    writer.add(rows)
    told = {"name": BYTES.name, "fingerprint": BYTES.fingerprint, "vocab_size": BYTES.vocab_size}
    writer.finish({"tokenizer": told})
    return str(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """The same rows mapped, unpacked into a cache and fetched into it; and a mixture with others."""
    base = tmp_path_factory.mktemp("data")
    raw, packed = write(base / "raw", records()), write(base / "packed", records(), compress=True)
    other = write(base / "other", records(20, first=30_000))
    wheres = {"folder": raw, "compressed": packed, "address": f"file://{raw}", "mixture": {raw: 3.0, other: 1.0}}
    made = {}
    for name, where in wheres.items():
        config = DataConfig(length=LENGTH, block_shards=2, cache_dir=str(base / f"cache of {name}"))
        made[name] = source_module.load(where, "train", config, BYTES, source_module.open_cache(config))
    assert made["folder"].index.shard_rows == ((7, 7, 7, 7, 7, 2),)
    return made


@pytest.fixture
def folder(sources: dict[str, Source]) -> Source:
    return sources["folder"]


def loader(
    source: Source,
    layout: Layout = ALONE,
    micro_batch_size: int = NUM_SLOTS,
    *,
    num_slots: int = NUM_SLOTS,
    diffusion: DiffusionConfig = DIFFUSION,
    seed: int = 7,
    prefetch: int = 2,
) -> Loader:
    batch = BatchConfig(num_slots, micro_batch_size)
    return Loader(source, layout, batch, diffusion, seed, MASK_ID, 2**31, dropout_sites=6, prefetch=prefetch)


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


def together(
    source: Source, dp_size: int, step: int, micro_batch_size: int = 2, diffusion: DiffusionConfig = DIFFUSION
) -> dict[str, Tensor]:
    """What the ranks make of a step, put together."""
    layouts = [Layout(dp_size, rank) for rank in range(dp_size)]
    ranks = (loader(source, layout, micro_batch_size, diffusion=diffusion) for layout in layouts)
    return joined([batch for rank in ranks for batch in rank.make(step)])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("micro_batch_size", [1, 2])
@pytest.mark.parametrize("dp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["folder", "mixture"])
def test_ranks_together_make_the_batch_of_one(
    sources: dict[str, Source], name: str, dp_size: int, micro_batch_size: int, step: int
) -> None:
    ours = together(sources[name], dp_size, step, micro_batch_size)
    assert differing(ours, joined(loader(sources[name]).make(step))) == []


@pytest.mark.parametrize(
    "diffusion",
    [
        DiffusionConfig(time_sampling=TimeSampling.stratified),
        DiffusionConfig(time_sampling=TimeSampling.iid),
        DiffusionConfig(num_times=10),
    ],
    ids=["stratified", "iid", "discrete"],
)
def test_ranks_together_make_the_batch_of_one_for_any_times(folder: Source, diffusion: DiffusionConfig) -> None:
    ours = together(folder, 4, 2, diffusion=diffusion)
    assert differing(ours, joined(loader(folder, diffusion=diffusion).make(2))) == []


@pytest.mark.parametrize("step", [0, 2])
def test_tensor_parallel_peers_make_the_same_batch(folder: Source, step: int) -> None:
    first, second = (joined(loader(folder, Layout(8, rank, tp_size=2), 2).make(step)) for rank in (4, 5))
    assert differing(first, second) == []


@pytest.mark.parametrize("rank", [0, 1, 2047, 4095])
def test_ranks_of_a_large_cluster_make_their_part(rank: int) -> None:
    """4096 ranks of two slots each, over more than one epoch in a step."""
    source, num_slots = Source([in_memory(records(5000, 4))]), 2 * 4096
    whole = joined(loader(source, num_slots=num_slots, micro_batch_size=num_slots).make(3))
    ours = joined(loader(source, Layout(4096, rank), 1, num_slots=num_slots).make(3))
    assert differing(ours, part(whole, range(2 * rank, 2 * rank + 2))) == []


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ["compressed", "address"])
def test_rows_from_elsewhere_make_the_same_batch(sources: dict[str, Source], name: str, step: int) -> None:
    ours, theirs = (joined(loader(sources[where]).make(step)) for where in (name, "folder"))
    assert differing(ours, theirs) == []


@pytest.mark.parametrize("dp_size", [1, 4])
def test_ranks_see_every_row_once_an_epoch(folder: Source, dp_size: int) -> None:
    """Five steps of 16 hold two epochs of 37 rows; a row is known by its first token."""
    first = torch.cat([together(folder, dp_size, step)["x_BL"][:, 0] for step in range(5)])
    rows = (first[: 2 * NUM_ROWS] - MASK_ID - 1) // LENGTH
    assert torch.equal(rows.view(2, -1).sort(dim=1).values, torch.arange(NUM_ROWS).expand(2, -1))


def test_no_two_slots_share_a_time(folder: Source) -> None:
    """One seed for all ranks must not mean one noise for all ranks."""
    assert len(joined(loader(folder).make(0))["t_B"].unique()) == NUM_SLOTS


@pytest.mark.parametrize("field", ["x_BL", "z_BL", "t_B", "dropout_keys"])
def test_steps_differ(folder: Source, field: str) -> None:
    first, second = (joined(loader(folder).make(step))[field] for step in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("field", ["x_BL", "z_BL", "t_B", "dropout_keys"])
def test_seeds_differ(folder: Source, field: str) -> None:
    first, second = (joined(loader(folder, seed=seed).make(0))[field] for seed in (0, 1))
    assert not torch.equal(first, second)


def test_padding_of_the_last_row_is_not_scored(folder: Source) -> None:
    """Steps 0 to 2 hold every row of the first epoch, so the padded one too."""
    fields = joined([batch for step in range(3) for batch in loader(folder).make(step)])
    is_last = fields["x_BL"][:, 0] == int(records()[TOKENS][-1, 0])
    is_padded = ~fields["is_token_BL"].flatten()
    assert int(is_padded.sum()) == 2 * int(is_last.sum()) > 0, "the test needs the padded row"
    assert not is_padded[fields["rows_M"]].any()


@pytest.fixture(params=[1, 5], ids=["prefetch 1", "prefetch 5"])
def running(request: pytest.FixtureRequest, folder: Source) -> Iterator[Loader]:
    made = loader(folder, micro_batch_size=4, prefetch=request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "steps",
    [[0, 1, 2, 3, 4], [5, 6, 90, 91, 92], [9, 10, 3, 4, 0, 10], [2, 2, 2]],
    ids=["in order", "forth", "back and forth", "again"],
)
def test_thread_makes_what_the_step_asks_for(running: Loader, steps: list[int]) -> None:
    got = [joined(running.at(step)) for step in steps]
    running.close()  # rows are read by one thread at a time
    assert [differing(ours, joined(running.make(step))) for ours, step in zip(got, steps, strict=True)] == [[]] * len(
        got
    )


@pytest.mark.parametrize("attempt", range(3))
def test_run_that_stops_anywhere_goes_on_with_the_same_batches(tmp_path: Path, attempt: int) -> None:
    """In a new process nothing is left but the step number: other loaders on other sources, of another layout."""
    where, num_steps = write(tmp_path / "rows", records()), 12
    stop = random.Random(attempt).randrange(1, num_steps)
    seen = []
    for layouts, steps in (([ALONE], range(stop)), ([Layout(2, 0), Layout(2, 1)], range(stop, num_steps))):
        config = DataConfig(length=LENGTH, block_shards=2)
        cache = source_module.open_cache(config)
        ranks = [loader(source_module.load(where, "train", config, BYTES, cache), each, 4) for each in layouts]
        seen += [joined([batch for rank in ranks for batch in rank.at(step)]) for step in steps]
        for rank in ranks:
            rank.close()
    whole = loader(ranks[0].source)
    assert [k for k in range(num_steps) if differing(seen[k], joined(whole.make(k)))] == []


def test_exception_in_the_thread_reaches_the_caller(tmp_path: Path) -> None:
    """A shard that is corrupt, which only the thread can see; its file is named."""
    where = write(tmp_path / "rows", records())
    config = DataConfig(length=LENGTH)
    source = source_module.load(where, "train", config, BYTES, source_module.open_cache(config))
    path = tmp_path / "rows" / "shard.00003.mds"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    broken = loader(source)
    try:
        with pytest.raises(DataError, match=r"rows/shard\.00003\.mds' is corrupt"):
            [broken.at(step) for step in range(3)]
    finally:
        broken.close()


def test_token_outside_the_vocabulary_names_the_step(folder: Source) -> None:
    small = dataclasses.replace(loader(folder), vocab_size=10)
    with pytest.raises(DataError, match=r"Step 1, slots 0 to 15: the text holds token id \d+, outside the vocabulary"):
        small.make(1)


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
