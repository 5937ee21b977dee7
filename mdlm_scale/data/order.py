"""Which sample stands in which slot of which step: a pure function, with O(1) time to reach any step.

Rows are visited in epochs. In each, the shards of a dataset are shuffled and taken in blocks, and the rows of a block
are shuffled among themselves: whoever must fetch shards needs those of one block at a time, and can fetch the next
meanwhile. The tail of an epoch runs on into the next, so every row is seen exactly once an epoch whatever the batch
size. A mixture takes its samples from its datasets in a fixed sequence of quotas, so the position in each of them is
known for every step. Memory is a table of shards, never of rows.

Shuffles are keyed permutations: a Feistel network on the next power of two, walked until it lands below n.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from mdlm_scale.diffusion.noise import random_bits

ROUNDS = 8  # even: the two halves of a number may differ by a bit, and must end where they began
PERIOD = 10_000  # samples after which the sequence of a mixture repeats; a share is a multiple of 1 / PERIOD

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Index:
    """The shape of the data: rows of each shard of each dataset. Sample ids count through all of them."""

    shard_rows: tuple[tuple[int, ...], ...]
    quotas: tuple[int, ...] = (1,)  # samples of each dataset in a period
    block_shards: int = 16

    @cached_property
    def num_rows(self) -> list[int]:
        """Of each dataset."""
        return [sum(rows) for rows in self.shard_rows]

    @cached_property
    def first_ids(self) -> list[Ints]:
        """Of each dataset: the first sample id of each shard."""
        starts = np.concatenate([[0], np.cumsum(self.num_rows)])
        return [start + _starts(np.array(rows)) for start, rows in zip(starts, self.shard_rows, strict=False)]

    @cached_property
    def sequence(self) -> tuple[Ints, Ints]:
        """Of each sample in a period: its dataset, and how many of that dataset came before it."""
        when = [((i + 0.5) / quota, d, i) for d, quota in enumerate(self.quotas) for i in range(quota)]
        _, dataset, earlier = zip(*sorted(when), strict=True)
        return np.array(dataset), np.array(earlier)

    def positions(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Of samples start .. stop-1 of the run: the dataset, and the position within its own samples."""
        dataset, earlier = self.sequence
        period, offset = np.divmod(np.arange(start, stop), len(dataset))
        dataset_B = dataset[offset]
        return dataset_B, period * np.array(self.quotas)[dataset_B] + earlier[offset]

    def num_before(self, d: int, sample: int) -> int:
        """How many samples of a dataset come before one of the run."""
        dataset, _ = self.sequence
        period, offset = divmod(sample, len(dataset))
        return period * self.quotas[d] + int((dataset[:offset] == d).sum())


def sample_ids(seed: int, step: int, slots: range, global_batch_size: int, index: Index) -> Ints:
    """The rows that the given slots of a step train on."""
    first = step * global_batch_size
    dataset_B, position_B = index.positions(first + slots.start, first + slots.stop)
    ids_B = np.empty_like(position_B)
    for d in np.unique(dataset_B).tolist():
        here = dataset_B == d
        ids_B[here] = _ids_of_dataset(seed, index, d, position_B[here])
    return ids_B


def shards_ahead(seed: int, step: int, global_batch_size: int, index: Index) -> list[tuple[int, int]]:
    """(dataset, shard) in the order of need: the blocks that a step reads from, then the ones that follow."""
    now: list[tuple[int, int]] = []
    later: list[tuple[int, int]] = []
    for d in np.flatnonzero(index.quotas).tolist():
        begin, end = (index.num_before(d, k * global_batch_size) for k in (step, step + 1))
        num_blocks = -(-len(index.shard_rows[d]) // index.block_shards)
        first, last = (_block_number(seed, index, d, position) for position in (begin, max(begin, end - 1)))
        for number in range(first, last + 2):
            epoch, block = divmod(number, num_blocks)
            start = block * index.block_shards
            shards = _epoch(index, seed, d, epoch)[0][start : start + index.block_shards]
            (now if number <= last else later).extend((d, shard) for shard in shards.tolist())
    return list(dict.fromkeys([*now, *later]))


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the ratio of the weights as nearly as a period allows; 0 where a weight is too small."""
    shares = [weight * PERIOD / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_rest = sorted(range(len(shares)), key=lambda d: counts[d] - shares[d])
    for d in by_rest[: PERIOD - sum(counts)]:
        counts[d] += 1
    common = math.gcd(*counts)
    return tuple(count // common for count in counts)


def shuffled(keys: Sequence[int], place: Ints, num_rows: int) -> Ints:
    """A permutation of 0 .. num_rows-1, applied to each place."""
    bits = max(1, (num_rows - 1).bit_length())
    result = _feistel(keys, place, bits)
    while len(outside := np.flatnonzero(result >= num_rows)):  # half of them at worst: a few turns
        result[outside] = _feistel(keys, result[outside], bits)
    return result


def _ids_of_dataset(seed: int, index: Index, d: int, position_B: Ints) -> Ints:
    ids_B = np.empty_like(position_B)
    epoch_B, within_B = np.divmod(position_B, index.num_rows[d])
    for epoch in np.unique(epoch_B).tolist():
        shards, starts, block_starts = _epoch(index, seed, d, epoch)
        block_B = np.where(epoch_B == epoch, np.searchsorted(block_starts, within_B, side="right") - 1, -1)
        for block in np.unique(block_B[block_B >= 0]).tolist():
            here = block_B == block
            begin = block_starts[block]
            end = block_starts[block + 1] if block + 1 < len(block_starts) else index.num_rows[d]
            keys = _keys(seed, f"order of rows {d}", epoch, block)
            place_B = begin + shuffled(keys, within_B[here] - begin, int(end - begin))
            shard_B = np.searchsorted(starts, place_B, side="right") - 1
            ids_B[here] = index.first_ids[d][shards[shard_B]] + place_B - starts[shard_B]
    return ids_B


@lru_cache(maxsize=64)
def _epoch(index: Index, seed: int, d: int, epoch: int) -> tuple[Ints, Ints, Ints]:
    """The shards of a dataset in the order of an epoch, where each begins, and where each block begins."""
    rows = np.array(index.shard_rows[d])
    shards = shuffled(_keys(seed, f"order of shards {d}", epoch, 0), np.arange(len(rows)), len(rows))
    starts = _starts(rows[shards])
    return shards, starts, starts[:: index.block_shards]


def _block_number(seed: int, index: Index, d: int, position: int) -> int:
    """Counted through all epochs."""
    epoch, within = divmod(position, index.num_rows[d])
    block_starts = _epoch(index, seed, d, epoch)[2]
    return epoch * len(block_starts) + int(np.searchsorted(block_starts, within, side="right")) - 1


def _starts(rows: Ints) -> Ints:
    return np.cumsum(rows) - rows


@lru_cache(maxsize=1024)
def _keys(seed: int, stream: str, epoch: int, block: int) -> tuple[int, ...]:
    return tuple(random_bits(seed, stream, epoch, torch.tensor([block]), ROUNDS)[0].tolist())


def _feistel(keys: Sequence[int], number: Ints, bits: int) -> Ints:
    """A bijection of the numbers below 2^bits, for any round function."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = number >> right_bits, number & ((1 << right_bits) - 1)
    for key in keys:
        mixed = (right + key) * 0x1E3779B97F4A7C15  # wraps; the upper half of the product depends on all bits
        mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
        left, right = right, left ^ ((mixed >> 33) & ((1 << left_bits) - 1))
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right
