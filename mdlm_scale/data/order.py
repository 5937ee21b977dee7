"""Which sample stands in which slot of which step: a pure function, with O(1) memory and O(1) time to reach any step.

The rows are visited in epochs; each is a keyed permutation of 0 .. n-1 (a Feistel network on the next power of four,
walked until it lands below n). The tail of an epoch runs on into the next, so every row is seen exactly once an epoch
whatever the batch size.
"""

import torch
from torch import Tensor

from mdlm_scale.diffusion.noise import philox, stream_id

ROUNDS = 6


def sample_ids(seed: int, step: int, slots: range, global_batch_size: int, num_rows: int) -> Tensor:
    """The rows that the given slots of a step train on, int64."""
    position = step * global_batch_size + torch.tensor(slots)
    epoch, index = position // num_rows, position % num_rows
    return shuffled(seed, epoch, index, num_rows)


def shuffled(seed: int, epoch: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """A permutation of 0 .. num_rows-1 for each epoch, applied to `index`."""
    half_bits = max(1, -(-(num_rows - 1).bit_length() // 2))
    result = _feistel(seed, epoch, index, half_bits)
    while bool((outside := result >= num_rows).any()):  # at most three in four are outside
        result = torch.where(outside, _feistel(seed, epoch, result, half_bits), result)
    return result


def _feistel(seed: int, epoch: Tensor, index: Tensor, half_bits: int) -> Tensor:
    """A bijection of the numbers below 4^half_bits; its round function is Philox."""
    low = (1 << half_bits) - 1
    left, right = index >> half_bits, index & low
    for number in range(ROUNDS):
        counter = (right, epoch, torch.full_like(right, number), torch.full_like(right, stream_id("order")))
        left, right = right, left ^ (philox(seed, counter)[0] & low)
    return (left << half_bits) | right
