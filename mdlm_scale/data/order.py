"""Which sample stands in which slot of which step: a pure function, with O(1) memory and O(1) time to reach any step.

The rows are visited in epochs; each is a keyed permutation of 0 .. n-1 (a Feistel network on the next power of four,
walked until it lands below n). The tail of an epoch runs on into the next, so every row is seen exactly once an epoch
whatever the batch size.
"""

import torch
from torch import Tensor

from mdlm_scale.diffusion.noise import random_bits

ROUNDS = 8


def sample_ids(seed: int, step: int, slots: range, global_batch_size: int, num_rows: int) -> Tensor:
    """The rows that the given slots of a step train on, int64."""
    position = step * global_batch_size + torch.arange(slots.start, slots.stop)
    return shuffled(seed, position // num_rows, position % num_rows, num_rows)


def shuffled(seed: int, epoch: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """A permutation of 0 .. num_rows-1 for each epoch, applied to `index`."""
    half_bits = max(1, -(-(num_rows - 1).bit_length() // 2))
    keys = random_bits(seed, "order", 0, epoch, ROUNDS).unbind(1)
    result = _feistel(keys, index, half_bits)
    while bool((outside := result >= num_rows).any()):  # three in four are outside at worst: a few more turns
        result = torch.where(outside, _feistel(keys, result, half_bits), result)
    return result


def _feistel(keys: tuple[Tensor, ...], index: Tensor, half_bits: int) -> Tensor:
    """A bijection of the numbers below 4^half_bits, for any round function."""
    low = (1 << half_bits) - 1
    left, right = index >> half_bits, index & low
    for key in keys:
        mixed = (right + key) * 0x1E3779B97F4A7C15  # wraps; the upper half of the product depends on all bits
        mixed = (mixed ^ (mixed >> 32)) * 0x2545F4914F6CDD1D
        left, right = right, left ^ ((mixed >> 33) & low)
    return (left << half_bits) | right
