"""The order of samples: every row once an epoch, any step at once, few shards at a time, and a shuffle that is one."""

import time
import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest

from mdlm_scale.data.order import PERIOD, ROUNDS, Index, Ints, quotas, sample_ids, shards_ahead, shuffled

SHAPES = {
    "one row": (1,),
    "one shard": (37,),
    "equal shards": (10,) * 7,
    "last one smaller": (10, 10, 10, 3),
    "uneven shards": (1, 17, 4, 30, 2),
}
MIXTURE = Index(((10,) * 8, (5,) * 6, (7, 7, 2)), quotas=(7, 2, 1), block_shards=2)
NUM_SLOTS = 16
# 10^9 rows, the size of a trillion tokens in rows of 1024
HUGE = Index(((32_258,) * 31_000,))


def run(index: Index, num_samples: int, num_slots: int = NUM_SLOTS, seed: int = 0) -> Ints:
    """The rows in the order in which the steps of a run see them."""
    steps = range(-(-num_samples // num_slots))
    ids = [sample_ids(seed, step, range(num_slots), num_slots, index) for step in steps]
    return np.concatenate(ids)[:num_samples]


def epochs(shard_rows: tuple[int, ...], block_shards: int = 2, num_slots: int = NUM_SLOTS, count: int = 3) -> Ints:
    """(epochs, rows) of one dataset."""
    return run(Index((shard_rows,), block_shards=block_shards), count * sum(shard_rows), num_slots).reshape(count, -1)


def of_dataset(index: Index, d: int, ids: Ints) -> Ints:
    """Those rows that belong to dataset d, counted from its own first."""
    first = sum(map(sum, index.shard_rows[:d]))
    return ids[(ids >= first) & (ids < first + sum(index.shard_rows[d]))] - first


def shards_of(rows: Sequence[int], ids: Ints) -> Ints:
    return np.searchsorted(np.cumsum(rows), ids, side="right")


def permutations(n: int, count: int) -> Ints:
    """(count, n): the permutations of that many random keys."""
    keys = np.random.default_rng(0).integers(2**32, size=(count, ROUNDS)).tolist()
    return np.array([shuffled(key, np.arange(n), n) for key in keys])


@pytest.mark.parametrize("num_slots", [7, 16, 50])
@pytest.mark.parametrize("block_shards", [1, 2, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_comes_once_an_epoch(shape: str, block_shards: int, num_slots: int) -> None:
    """Also when an epoch ends within a step, and when a step holds several epochs."""
    seen = np.sort(epochs(SHAPES[shape], block_shards, num_slots), axis=1)
    assert (seen == np.arange(sum(SHAPES[shape]))).all()


def test_step_at_the_end_of_an_epoch_is_filled_from_the_next() -> None:
    """37 rows in steps of 16: the third step takes the last five of one epoch and the first eleven of another."""
    index = Index((SHAPES["one shard"],))
    seen = run(index, 2 * 37, num_slots=1)
    assert np.array_equal(sample_ids(0, 2, range(NUM_SLOTS), NUM_SLOTS, index), seen[32:48])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_slots", [1, 7, 50])
def test_batch_size_does_not_change_the_order(shape: str, num_slots: int) -> None:
    assert np.array_equal(epochs(SHAPES[shape], num_slots=num_slots), epochs(SHAPES[shape], num_slots=16))


@pytest.mark.parametrize("block_shards", [1, 16])
def test_epochs_differ(block_shards: int) -> None:
    first, second, third = (epoch.tolist() for epoch in epochs(SHAPES["equal shards"], block_shards))
    assert first != second != third != first


def test_shards_come_in_another_order_in_another_epoch() -> None:
    first, second = (shards_of((1,) * 50, epoch).tolist() for epoch in epochs((1,) * 50, block_shards=1, count=2))
    assert first != second


@pytest.mark.parametrize("seed", [1, 2**32, 2**63 + 5], ids=["low word", "high word", "top bit"])
def test_seeds_differ(seed: int) -> None:
    index = Index((SHAPES["equal shards"],))
    assert not np.array_equal(run(index, 70), run(index, 70, seed=seed))


@pytest.mark.parametrize("slots", [range(0, 4), range(5, 6), range(12, 16), range(0), range(16)], ids=str)
@pytest.mark.parametrize("index", [Index((SHAPES["uneven shards"],)), MIXTURE], ids=["one dataset", "mixture"])
def test_slots_alone_are_a_slice_of_the_batch(index: Index, slots: range) -> None:
    whole = sample_ids(0, 3, range(NUM_SLOTS), NUM_SLOTS, index)
    assert np.array_equal(sample_ids(0, 3, slots, NUM_SLOTS, index), whole[slots.start : slots.stop])


def test_far_step_is_reached_at_once() -> None:
    """Milliseconds; a second allows for a busy machine, and a walk over 5 * 10^8 samples takes far longer."""
    start = time.perf_counter()
    sample_ids(0, 10**6, range(512), 512, HUGE)
    assert time.perf_counter() - start < 1


def test_far_step_takes_little_memory() -> None:
    """Some numbers for each of 31 000 shards: a few MB at the peak. One byte for each row would be 1000."""
    index = Index(HUGE.shard_rows)
    tracemalloc.start()
    try:
        sample_ids(1, 10**6, range(512), 512, index)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize("step", [10**6, 10**9])
def test_far_step_reads_few_shards(step: int) -> None:
    """Within one block, or two where one ends."""
    ids = sample_ids(0, step, range(512), 512, HUGE)
    assert 2 <= len(np.unique(shards_of(HUGE.shard_rows[0], ids))) <= 2 * HUGE.block_shards


@pytest.mark.parametrize("block_shards", [1, 2, 3, 16])
def test_rows_of_a_block_come_from_its_shards(block_shards: int) -> None:
    """Twelve shards of ten rows: a block is 10 * block_shards samples, and takes all rows of its shards."""
    shards = shards_of((10,) * 12, epochs((10,) * 12, block_shards).ravel())
    blocks = shards.reshape(-1, 10 * min(block_shards, 12))
    assert [len(np.unique(block)) for block in blocks] == [min(block_shards, 12)] * len(blocks)


@pytest.mark.parametrize("num_slots", [3, 16, 90], ids=["within a block", "across blocks", "several blocks"])
@pytest.mark.parametrize(
    "index",
    [
        Index(((10,) * 8,), block_shards=2),
        Index(((10,) * 3,), block_shards=16),
        Index(((10,) * 8, (5,) * 6), quotas=(2, 1), block_shards=2),
    ],
    ids=["one dataset", "one block", "mixture"],
)
def test_shards_of_a_step_come_before_those_that_follow(index: Index, num_slots: int) -> None:
    """Found by walking through the run: block b of a dataset is its samples b * rows .. (b + 1) * rows - 1."""
    seen = run(index, 2500)
    for step in range(20):
        begin = step * num_slots
        now: set[tuple[int, int]] = set()
        after: set[tuple[int, int]] = set()
        for d, rows in enumerate(index.shard_rows):
            own = of_dataset(index, d, seen)
            first, stop = (len(of_dataset(index, d, seen[:end])) for end in (begin, begin + num_slots))
            in_block = min(index.block_shards, len(rows)) * rows[0]
            low, high = first // in_block * in_block, -(-stop // in_block) * in_block
            now |= {(d, k) for k in shards_of(rows, own[low:high]).tolist()}
            after |= {(d, k) for k in shards_of(rows, own[high : high + in_block]).tolist()}
        ahead = shards_ahead(0, step, num_slots, index)
        assert (set(ahead[: len(now)]), set(ahead[len(now) :])) == (now, after - now)


@pytest.mark.parametrize("index", [Index(((10,) * 8,), block_shards=2), MIXTURE], ids=["one dataset", "mixture"])
def test_shards_of_the_next_step_are_known_a_step_ahead(index: Index) -> None:
    """For steps smaller than a block, whose samples may lack a dataset of a small share."""
    owner = [(d, k) for d, rows in enumerate(index.shard_rows) for k in range(len(rows))]
    all_rows = [rows for dataset in index.shard_rows for rows in dataset]
    late = []
    for step in range(100):
        needed = shards_of(all_rows, sample_ids(0, step + 1, range(4), 4, index)).tolist()
        late += [(step, owner[k]) for k in needed if owner[k] not in shards_ahead(0, step, 4, index)]
    assert late == []


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((0.7, 0.3), (7, 3)), ((5,), (1,)), ((1, 1), (1, 1)), ((3, 1), (3, 1)), ((1, 1e-9), (1, 0))],
    ids=str,
)
def test_quotas_are_the_smallest_whole_numbers(weights: tuple[float, ...], expected: tuple[int, ...]) -> None:
    assert quotas(weights) == expected


@pytest.mark.parametrize("weights", [(1, 1, 1), (1, 2, 4), (0.123456, 0.7, 0.1), (1e-3, 1e3, 1e3)], ids=str)
def test_quotas_are_within_one_of_the_share(weights: tuple[float, ...]) -> None:
    found = quotas(weights)
    off = [abs(quota / sum(found) - weight / sum(weights)) for quota, weight in zip(found, weights, strict=True)]
    assert max(off) < 1 / PERIOD


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 1), (1, 100, 1), (5, 4, 3, 2, 1)], ids=str)
def test_every_stretch_of_a_mixture_has_its_shares(weights: tuple[float, ...]) -> None:
    """Each of D datasets is at most half a sample off its own even pace, and the total is off by their sum: that
    leaves (1 + share * (D - 2)) / 2 samples for a dataset; 1e-6 is for rounding."""
    index = Index(((10,),) * len(weights), quotas(weights))
    share = np.array(index.quotas) / sum(index.quotas)
    dataset, _ = index.positions(0, 2 * PERIOD)
    counts = np.cumsum(dataset[:, None] == np.arange(len(weights)), axis=0)
    off = np.abs(counts - share * np.arange(1, 2 * PERIOD + 1)[:, None]).max(axis=0)
    assert (off <= (1 + share * (len(weights) - 2)) / 2 + 1e-6).all()


def test_positions_are_what_counting_gives() -> None:
    """Over three periods, from the start and from the middle."""
    seen = [0, 0, 0]
    for sample in range(30):
        (d,), (position,) = MIXTURE.positions(sample, sample + 1)
        assert position == seen[d], f"sample {sample}"
        seen[d] += 1


@pytest.mark.parametrize("d", range(3))
def test_every_row_of_a_mixture_comes_once_an_epoch_of_its_dataset(d: int) -> None:
    num_rows = sum(MIXTURE.shard_rows[d])
    seen = of_dataset(MIXTURE, d, run(MIXTURE, 1000))
    seen = np.sort(seen[: len(seen) // num_rows * num_rows].reshape(-1, num_rows), axis=1)
    assert len(seen) >= 2, "the test needs whole epochs"
    assert (seen == np.arange(num_rows)).all()


def test_equal_datasets_of_a_mixture_are_shuffled_apart() -> None:
    index = Index(((20,), (20,)), quotas=(1, 1))
    seen = run(index, 40)
    assert of_dataset(index, 0, seen).tolist() != of_dataset(index, 1, seen).tolist()


def test_shuffle_is_a_permutation_of_any_number() -> None:
    sizes = range(1, 201)
    assert [n for n in sizes if sorted(permutations(n, 1)[0].tolist()) != list(range(n))] == []


@pytest.mark.parametrize("n", [2, 3, 5, 7, 10, 100, 1000, 1024])
def test_place_says_nothing_of_the_row(n: int) -> None:
    """Chi-square of place against row, in tenths if there are so many, with (cells - 1)^2 degrees of freedom: within 5
    standard deviations."""
    cells, count = min(n, 10), min(4000, 40_000 // n)
    tenth = np.arange(n) * cells // n
    counted = np.bincount((tenth * cells + tenth[permutations(n, count)]).ravel(), minlength=cells**2)
    expected = (np.bincount(tenth)[:, None] * np.bincount(tenth) / n * count).ravel()
    chi_square = ((counted - expected) ** 2 / expected).sum() * (n - 1) / n
    freedom = (cells - 1) ** 2
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("n", "orders"), [(3, 6), (4, 24)])
def test_every_order_of_few_is_as_likely(n: int, orders: int) -> None:
    """Chi-square over all orders: within 5 standard deviations."""
    counted = np.unique(permutations(n, 3_000), axis=0, return_counts=True)[1]
    expected = 3_000 / orders
    assert len(counted) == orders
    assert abs(((counted - expected) ** 2 / expected).sum() - (orders - 1)) < 5 * (2 * (orders - 1)) ** 0.5


@pytest.mark.parametrize("n", [7, 100, 1000])
def test_few_rows_stay_in_place(n: int) -> None:
    """A random permutation has one fixed point on average, with variance 1: within 5 standard deviations."""
    fixed = int((permutations(n, 200) == np.arange(n)).sum())
    assert abs(fixed - 200) < 5 * 200**0.5


@pytest.mark.parametrize("n", [100, 1000])
def test_neighbours_part(n: int) -> None:
    """Row i + 1 follows row i (n - 1) / n times on average, with variance about 1: within 5 standard deviations."""
    successors = int((np.diff(permutations(n, 200), axis=1) == 1).sum())
    assert abs(successors - 200 * (n - 1) / n) < 5 * 200**0.5


def test_any_row_may_stand_at_any_position_of_an_epoch() -> None:
    """Chi-square over 20 rows in 4 shards, 19 degrees of freedom, epochs being independent: within 5 standard
    deviations. So the shuffles of shards and of rows together leave no row behind."""
    seen = epochs((5,) * 4, num_slots=800, count=800)
    counted = np.array([np.bincount(seen[:, position], minlength=20) for position in (0, 9, 19)])
    chi_square = ((counted - 40) ** 2 / 40).sum(axis=1)
    assert (abs(chi_square - 19) < 5 * (2 * 19) ** 0.5).all()
