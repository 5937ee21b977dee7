"""The order of samples: every row once an epoch, any step at once, and a shuffle that looks like one."""

import time

import pytest
import torch
from torch import Tensor

from mdlm_scale.data.order import sample_ids, shuffled

NUM_ROWS = (1, 2, 3, 7, 64, 1000, 1001)


def visits(num_rows: int, global_batch_size: int, num_epochs: int, seed: int = 0) -> Tensor:
    """(epochs, rows): the rows in the order in which the steps of a run see them."""
    num_steps = -(-num_epochs * num_rows // global_batch_size)
    slots = range(global_batch_size)
    ids = torch.cat([sample_ids(seed, step, slots, global_batch_size, num_rows) for step in range(num_steps)])
    return ids[: num_epochs * num_rows].view(num_epochs, num_rows)


def permutations(num_rows: int, num_epochs: int) -> Tensor:
    """(epochs, rows): the permutation of each epoch."""
    epoch = torch.arange(num_epochs).repeat_interleave(num_rows)
    index = torch.arange(num_rows).repeat(num_epochs)
    return shuffled(0, epoch, index, num_rows).view(num_epochs, num_rows)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("global_batch_size", [7, 16, 50])
def test_every_row_comes_once_an_epoch(num_rows: int, global_batch_size: int) -> None:
    """Also when an epoch ends within a step, and when a step holds several epochs."""
    seen = visits(num_rows, global_batch_size, num_epochs=3).sort(dim=1).values
    assert torch.equal(seen, torch.arange(num_rows).expand(3, -1))


def test_batch_size_does_not_change_the_order() -> None:
    assert torch.equal(visits(64, 8, num_epochs=2), visits(64, 32, num_epochs=2))


def test_epochs_differ() -> None:
    first, second = visits(64, 16, num_epochs=2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [1, 2**32, 2**63 + 5], ids=["low word", "high word", "top bit"])
def test_seeds_differ(seed: int) -> None:
    assert not torch.equal(visits(64, 16, 1, seed=0), visits(64, 16, 1, seed=seed))


@pytest.mark.parametrize("slots", [range(0, 4), range(5, 6), range(12, 16), range(0)])
def test_slots_alone_are_a_slice_of_the_batch(slots: range) -> None:
    whole = sample_ids(0, 3, range(16), 16, 37)
    assert torch.equal(sample_ids(0, 3, slots, 16, 37), whole[slots.start : slots.stop])


def test_far_step_is_reached_at_once() -> None:
    """Milliseconds; a second allows for a busy machine, and a walk over 5 * 10^8 samples takes far longer."""
    start = time.perf_counter()
    sample_ids(0, 10**6, range(512), 512, 10**9)
    assert time.perf_counter() - start < 1


@pytest.mark.parametrize("step", [10**6, 10**9])
def test_far_step_stays_within_the_rows(step: int) -> None:
    ids = sample_ids(0, step, range(512), 512, 10**9)
    assert ids[(ids < 0) | (ids >= 10**9)].tolist() == []


@pytest.mark.parametrize("num_rows", [10, 100, 1000, 1024])
def test_position_says_nothing_of_the_row(num_rows: int) -> None:
    """Chi-square of position deciles against row deciles, 9 * 9 degrees of freedom: within 5 standard deviations."""
    num_epochs = 40_000 // num_rows
    position = torch.arange(num_rows).expand(num_epochs, -1)
    cell = position * 10 // num_rows * 10 + permutations(num_rows, num_epochs) * 10 // num_rows
    decile = torch.bincount(torch.arange(num_rows) * 10 // num_rows).double()
    expected = (decile[:, None] * decile / num_rows * num_epochs).flatten()
    counted = torch.bincount(cell.flatten(), minlength=100)
    chi_square = float(((counted - expected) ** 2 / expected).sum()) * (num_rows - 1) / num_rows
    assert abs(chi_square - 81) < 5 * (2 * 81) ** 0.5


@pytest.mark.parametrize("num_rows", [7, 100, 1000])
def test_few_rows_stay_in_place(num_rows: int) -> None:
    """A random permutation has one fixed point on average, with variance 1: within 5 standard deviations."""
    num_epochs = 200
    fixed = int((permutations(num_rows, num_epochs) == torch.arange(num_rows)).sum())
    assert abs(fixed - num_epochs) < 5 * num_epochs**0.5


@pytest.mark.parametrize("num_rows", [100, 1000])
def test_neighbours_part(num_rows: int) -> None:
    """Row i + 1 follows row i (n - 1) / n times an epoch, with variance about 1: within 5 standard deviations."""
    num_epochs = 200
    successors = int((permutations(num_rows, num_epochs).diff(dim=1) == 1).sum())
    assert abs(successors - num_epochs * (num_rows - 1) / num_rows) < 5 * num_epochs**0.5
