"""All randomness of training, as pure functions of (seed, step, slot, position): nothing here has a state.

The generator is Philox4x32-10 (Salmon et al., 2011): a block cipher run on a counter. Any subset of the numbers can be
computed alone, on any rank, in any order, and is bit-equal to what every other rank would compute for it.
N slots in the global batch, B of them here; L positions, D channels.
"""

import hashlib
import math
from functools import lru_cache

import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, TimeSampling
from mdlm_scale.diffusion.schedule import Schedule

_LOW32 = 0xFFFFFFFF


def philox(seed: int, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four int64 tensors of 32-bit words to four tensors of 32 random bits each."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & _LOW32, (seed >> 32) & _LOW32
    for _ in range(10):
        # int64 products wrap, but all 64 bits of the true product are there; the mask undoes the sign of the shift
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        high0, high1 = (product0 >> 32) & _LOW32, (product1 >> 32) & _LOW32
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, product1 & _LOW32, high0 ^ c3 ^ key1, product0 & _LOW32
        key0, key1 = (key0 + 0x9E3779B9) & _LOW32, (key1 + 0xBB67AE85) & _LOW32
    return c0, c1, c2, c3


@lru_cache(maxsize=4096)
def stream_id(name: str) -> int:
    """32 bits for a name, so that numbers drawn for different purposes never meet."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")


def random_bits(seed: int, stream: str, step: int | Tensor, slot_B: Tensor, count: int) -> Tensor:
    """`count` words of 32 bits for each slot, (B, count) int64: counter (i // 4, slot, step, stream), lane i % 4.

    The slots are of one step, or each of its own.
    """
    block = torch.arange(-(-count // 4), device=slot_B.device)
    step_B = torch.as_tensor(step, device=slot_B.device).view(-1, 1)
    counter = (block, slot_B[:, None], step_B, torch.tensor(stream_id(stream), device=slot_B.device))
    lanes = philox(seed, tuple(torch.broadcast_tensors(*counter)))
    return torch.stack(lanes, dim=-1).flatten(1)[:, :count]


def uniforms(seed: int, stream: str, step: int, slot_B: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) for each slot, (B, count) float64, all 53 bits random."""
    bits = random_bits(seed, stream, step, slot_B, 2 * count).unflatten(1, (count, 2))
    return ((bits[..., 0] >> 5) * 2**26 + (bits[..., 1] >> 6)).double() / 2**53


def times(config: DiffusionConfig, seed: int, step: int, num_slots: int) -> Tensor:
    """The time t of every slot of the global batch, (N,) float64; in discrete time a multiple of 1/T."""
    v_N = unit_times(config.time_sampling, seed, step, num_slots)
    if config.num_times is None:
        return config.t_min + (1 - config.t_min) * v_N
    index_N = torch.clamp(torch.floor(v_N * config.num_times), max=config.num_times - 1) + 1
    return index_N / config.num_times


def unit_times(sampling: TimeSampling, seed: int, step: int, num_slots: int) -> Tensor:
    """Points of [0, 1] for the N slots of a step; each alone is uniform, together they cover the interval.

    lattice     slots 2i and 2i+1 get v_i and 1 - v_i, v a shifted golden-ratio lattice: one point in each interval
                of length 1/N, and every pair masks half its tokens (for the loglinear schedule)
    stratified  slot j gets a point of [j/N, (j+1)/N): the paper's choice, over the global batch
    iid         independent
    """
    slot_N, num_pairs = torch.arange(num_slots), num_slots // 2
    if sampling is not TimeSampling.lattice or num_pairs == 0:
        u_N = uniforms(seed, "time", step, slot_N, 1)[:, 0]
        return (slot_N + u_N) / num_slots if sampling is TimeSampling.stratified else u_N
    shift = uniforms(seed, "time shift", step, torch.zeros(1, dtype=torch.long), 1)[0, 0]
    # the integer product is reduced first, so that frac() does not lose digits for large batches
    v_P = ((torch.arange(num_pairs) * _golden_step(num_pairs) % num_pairs).double() / num_pairs + shift) % 1.0
    v_N = torch.stack([v_P, 1 - v_P], dim=1).flatten()
    return v_N if num_slots % 2 == 0 else torch.cat([v_N, uniforms(seed, "time", step, slot_N[-1:], 1)[:, 0]])


def is_masked(seed: int, step: int | Tensor, slot_B: Tensor, mask_prob_B: Tensor, length: int) -> Tensor:
    """Which positions are masked, (B, L) bool: an integer test, so that every machine agrees on every bit."""
    threshold_B = torch.floor(mask_prob_B.double() * 2**32).long()
    return random_bits(seed, "mask", step, slot_B, length) < threshold_B[:, None]


def mask_counts(seed: int, step: int, num_slots: int, length: int) -> Tensor:
    """How many positions each slot masks, (N,) int64, on the lattice of `unit_times`: each slot's count alone is
    uniform on 1 .. L, and slots 2i and 2i+1 mask L + 1 together."""
    v_N = unit_times(TimeSampling.lattice, seed, step, num_slots)
    count_N = torch.clamp(torch.floor(v_N * length).long(), max=length - 1) + 1
    count_N[1::2] = length + 1 - count_N[: num_slots - 1 : 2]  # in whole numbers: no rounding can part a pair
    return count_N


def is_masked_exactly(seed: int, step: int | Tensor, slot_B: Tensor, count_B: Tensor, length: int) -> Tensor:
    """Masks of `count_B` positions, each such set equally likely, (B, L) bool: the first by random words."""
    bits_BL2 = random_bits(seed, "subset", step, slot_B, 2 * length).unflatten(1, (length, 2))
    order_BL = torch.argsort(
        (bits_BL2[..., 0] << 32) | bits_BL2[..., 1], dim=1, stable=True
    )  # any order: also of signs
    is_first_BL = torch.arange(length, device=slot_B.device) < count_B[:, None]
    return torch.zeros_like(is_first_BL).scatter(1, order_BL, is_first_BL)


def worst_over_mean(config: DiffusionConfig, schedule: Schedule, num_slots: int, num_parts: int) -> float:
    """How uneven the masked work of contiguous blocks of slots is: largest over mean, averaged over steps."""
    ratios = []
    for step in range(32):
        work_P = schedule.mask_prob(times(config, 0, step, num_slots)).view(num_parts, -1).sum(1)
        ratios.append(float(work_P.max() / work_P.mean()))
    return sum(ratios) / len(ratios)


def dropout_keys(seed: int, step: int, slot_B: Tensor, num_sites: int) -> Tensor:
    """A 32-bit key for each place in the network that drops, (num_sites, B) int32."""
    return _to_int32(random_bits(seed, "dropout", step, slot_B, num_sites)).t().contiguous()


def is_dropped(key_B: Tensor, position_L: Tensor, num_channels: int, drop_prob: float) -> Tensor:
    """Which activations fall, (B, L, D) bool: a hash of (position, channel) under the sample's key.

    Philox would cost more than the dropout: here positions and channels are mixed well once each, and an element costs
    two xors, two multiplications and a shift on int32, which wraps. (Were the first xor a sum, two channels would
    differ by a constant that the multiplication keeps, and some pairs would fall together.)
    """
    row_BL = _mix32(key_B[:, None] ^ _mix32(position_L.to(torch.int32))[None, :])
    channel_D = _mix32(torch.arange(num_channels, dtype=torch.int32, device=key_B.device) + 0x5BD1E995)
    hash_BLD = (row_BL[:, :, None] ^ channel_D).mul_(0x2C1B3C6D)
    hash_BLD.bitwise_xor_((hash_BLD >> 15).bitwise_and_(0x1FFFF)).mul_(0x297A2D39)
    return hash_BLD < math.floor(drop_prob * 2**32) - 2**31


@lru_cache
def _golden_step(n: int) -> int:
    """The integer coprime to n that is nearest to n times the golden ratio's fraction."""
    golden = n * (math.sqrt(5) - 1) / 2
    return min((a for a in range(1, n + 1) if math.gcd(a, n) == 1), key=lambda a: abs(a - golden))


def _mix32(x: Tensor) -> Tensor:
    """A bijection of int32 that scatters every input bit over the word.

    In int64, masked after each product: compilers may assume that int32 arithmetic on a known range does not wrap.
    """
    x = x.long() & _LOW32
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW32
    return _to_int32(x ^ (x >> 15))


def _to_int32(bits: Tensor) -> Tensor:
    """The same 32 bits as a signed number."""
    return (bits - ((bits >> 31) << 32)).to(torch.int32)
