"""The noise: Philox as published, sound statistics, and any part of it bit-equal to the same part of the whole.

Every number here is a function of fixed seeds, so the statistical tests give the same answer each time; "5 sigma" and
"p > 1e-4" say how unlikely it is that a sound generator would have failed when the seeds were chosen.
"""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, TimeSampling
from mdlm_scale.diffusion import noise
from mdlm_scale.diffusion.schedule import Schedule

RANKS, OWN_SLOTS = 64, 4  # the layout for which the design quotes its figures
every_sampling = pytest.mark.parametrize("sampling", list(TimeSampling))


@lru_cache
def many_times(sampling: TimeSampling, num_slots: int, num_steps: int) -> Tensor:
    """Unit times, (steps, N)."""
    return torch.stack([noise.unit_times(sampling, 0, step, num_slots) for step in range(num_steps)])


def words(*values: int) -> tuple[Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


# --- bits


@pytest.mark.parametrize(
    ("counter", "seed", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0_A4093822,  # the first word of the key is the low half of the seed
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], seed: int, expected: tuple[int, ...]
) -> None:
    assert tuple(lane.item() for lane in noise.philox(seed, words(*counter))) == expected


def test_a_word_is_found_at_its_counter_and_lane() -> None:
    bits = noise.random_bits(7, "mask", 5, torch.tensor([3, 11]), 10)
    assert bits[1, 6] == noise.philox(7, words(6 // 4, 11, 5, noise.stream_id("mask")))[6 % 4]


def test_the_stream_of_a_name_is_the_same_in_every_process() -> None:
    assert noise.stream_id("mask") == 0x4F9BBF48  # `printf mask | sha256sum`, first four bytes, little-endian


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"seed": 2**32}, {"stream": "time"}, {"step": 1}, {"slot": 1}],
    ids=["seed", "seed's high half", "stream", "step", "slot"],
)
def test_other_arguments_give_other_bits(other: dict[str, int | str]) -> None:
    def bits(seed: int = 0, stream: str = "mask", step: int = 0, slot: int = 0) -> Tensor:
        return noise.random_bits(seed, stream, step, torch.tensor([slot]), 256)

    assert not (bits() == bits(**other)).any()  # 256 pairs of words, each equal by chance once in 2^32


def test_the_bytes_of_the_bits_are_uniform() -> None:
    bits = noise.random_bits(0, "mask", 0, torch.arange(64), 1024)
    counts = torch.stack([bits >> shift & 0xFF for shift in (0, 8, 16, 24)]).flatten().bincount(minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4


@pytest.mark.parametrize("digit", [0, 45], ids=["first 8 bits", "last 8 bits"])
def test_uniforms_are_uniform_to_their_last_bit(digit: int) -> None:
    u = noise.uniforms(0, "time", 0, torch.arange(64), 1024).flatten()
    counts = (u * 2.0 ** (digit + 8) % 256).floor().long().bincount(minlength=256)
    assert 1e-4 < stats.chisquare(counts).pvalue < 1 - 1e-4


def test_a_uniform_is_27_bits_of_one_word_and_26_of_the_next() -> None:
    u = noise.uniforms(0, "time", 0, torch.arange(64), 64)
    bits = noise.random_bits(0, "time", 0, torch.arange(64), 128).unflatten(1, (64, 2))
    parts = torch.stack([(u * 2**27).floor(), u * 2**53 % 2**26], dim=-1)
    assert torch.equal(parts, torch.stack([bits[..., 0] >> 5, bits[..., 1] >> 6], dim=-1).double())


# --- parts of the whole

SOME_SLOTS = [range(3, 7), range(0, 16, 5), range(15, 16)]


@pytest.mark.parametrize("slots", SOME_SLOTS, ids=str)
@pytest.mark.parametrize("count", [1, 6, 13])
def test_part_of_the_bits(slots: range, count: int) -> None:
    whole = noise.random_bits(1, "mask", 2, torch.arange(16), 13)
    assert torch.equal(noise.random_bits(1, "mask", 2, torch.tensor(slots), count), whole[list(slots), :count])


@pytest.mark.parametrize("slots", SOME_SLOTS, ids=str)
@pytest.mark.parametrize("length", [1, 6, 13])
def test_part_of_the_masks(slots: range, length: int) -> None:
    mask_prob = torch.linspace(0.1, 0.9, 16, dtype=torch.float64)
    whole = noise.is_masked(1, 2, torch.arange(16), mask_prob, 13)
    part = noise.is_masked(1, 2, torch.tensor(slots), mask_prob[list(slots)], length)
    assert torch.equal(part, whole[list(slots), :length])


@pytest.mark.parametrize("slots", SOME_SLOTS, ids=str)
def test_part_of_the_dropout_keys(slots: range) -> None:
    whole = noise.dropout_keys(1, 2, torch.arange(16), 6)
    assert torch.equal(noise.dropout_keys(1, 2, torch.tensor(slots), 6), whole[:, list(slots)])


@pytest.mark.parametrize("slots", SOME_SLOTS, ids=str)
@pytest.mark.parametrize("positions", [range(0, 8), range(5, 12), range(11, 12)], ids=str)
@pytest.mark.parametrize("num_channels", [7, 24])
def test_part_of_the_dropout(slots: range, positions: range, num_channels: int) -> None:
    key_B = noise.dropout_keys(1, 2, torch.arange(16), 1)[0]
    whole = noise.is_dropped(key_B, torch.arange(12), 24, 0.5)
    part = noise.is_dropped(key_B[list(slots)], torch.tensor(positions), num_channels, 0.5)
    assert torch.equal(part, whole[list(slots)][:, list(positions), :num_channels])


# --- times


@every_sampling
@pytest.mark.parametrize("num_times", [None, 10])
def test_times_are_float64(sampling: TimeSampling, num_times: int | None) -> None:
    assert noise.times(DiffusionConfig(num_times=num_times, time_sampling=sampling), 0, 0, 8).dtype == torch.float64


@every_sampling
@pytest.mark.parametrize("other", [(1, 0), (0, 1)], ids=["seed", "step"])
def test_another_seed_or_step_has_other_times(sampling: TimeSampling, other: tuple[int, int]) -> None:
    assert not (noise.unit_times(sampling, 0, 0, 16) == noise.unit_times(sampling, *other, 16)).any()


@every_sampling
def test_continuous_time_is_spread_evenly_from_t_min_to_one(sampling: TimeSampling) -> None:
    t_N = noise.times(DiffusionConfig(t_min=0.25, time_sampling=sampling), 0, 0, 512)
    assert torch.equal(t_N, 0.25 + 0.75 * noise.unit_times(sampling, 0, 0, 512))  # exact: 0.75 is


@every_sampling
@pytest.mark.parametrize("num_times", [1, 3, 10, 1000])
def test_discrete_times_are_multiples_of_one_over_T(sampling: TimeSampling, num_times: int) -> None:
    t_N = noise.times(DiffusionConfig(num_times=num_times, time_sampling=sampling), 0, 0, 256)
    assert set(t_N.tolist()) <= {i / num_times for i in range(1, num_times + 1)}


@every_sampling
def test_discrete_times_reach_from_one_over_T_to_one_whatever_t_min(sampling: TimeSampling) -> None:
    t_N = noise.times(DiffusionConfig(num_times=10, t_min=0.5, time_sampling=sampling), 0, 0, 256)
    assert (t_N.min().item(), t_N.max().item()) == (0.1, 1.0)


@pytest.mark.parametrize("sampling", [TimeSampling.lattice, TimeSampling.stratified])
def test_a_spread_batch_has_every_discrete_time_equally_often(sampling: TimeSampling) -> None:
    t_N = noise.times(DiffusionConfig(num_times=8, time_sampling=sampling), 0, 3, 32)
    assert (t_N * 8).long().bincount().tolist() == [0] + 8 * [4]


def test_the_lattice_has_one_point_in_each_stratum() -> None:
    def strata(n: int, step: int) -> list[int]:
        return (noise.unit_times(TimeSampling.lattice, 0, step, n) * n).long().sort().values.tolist()

    assert [(n, step) for n in range(2, 513, 2) for step in range(3) if strata(n, step) != list(range(n))] == []


@pytest.mark.parametrize("num_slots", [2, 7, 12, 256])
def test_the_pairs_of_the_lattice_sum_to_one(num_slots: int) -> None:
    pairs = many_times(TimeSampling.lattice, num_slots, 20)[:, : num_slots // 2 * 2].unflatten(1, (-1, 2))
    assert (pairs.sum(2) == 1).all()  # exact: what 1 - v rounds away is below half an ulp of 1


def test_the_lattice_advances_by_the_coprime_nearest_to_the_golden_ratio() -> None:
    def step_of(m: int) -> int:
        v = noise.unit_times(TimeSampling.lattice, 0, 0, 2 * m)
        return round(((v[2] - v[0]) % 1.0).item() * m)

    def nearest(m: int) -> int:
        return min((a for a in range(1, m) if math.gcd(a, m) == 1), key=lambda a: abs(a - m * (math.sqrt(5) - 1) / 2))

    assert {m: step_of(m) for m in range(2, 257)} == {m: nearest(m) for m in range(2, 257)}


@pytest.mark.parametrize("num_slots", [3, 9, 101])
def test_an_odd_batch_is_the_even_one_and_a_slot_more(num_slots: int) -> None:
    odd = noise.unit_times(TimeSampling.lattice, 0, 0, num_slots)
    assert torch.equal(odd[:-1], noise.unit_times(TimeSampling.lattice, 0, 0, num_slots - 1))


def test_the_last_slot_of_an_odd_batch_is_independent_of_the_others() -> None:
    v = many_times(TimeSampling.lattice, 7, 1500)
    first, last = v[:, 0] - 0.5, v[:, 6] - 0.5
    assert (first * last).mean().abs() * 12 < 5 / math.sqrt(1500)  # 5 sigma; a uniform has variance 1/12


@pytest.mark.parametrize(
    ("sampling", "num_slots", "slot"),
    [(TimeSampling.lattice, n, j) for n, j in [(1, 0), (2, 0), (2, 1), (7, 3), (7, 6), (256, 0), (256, 129)]]
    + [(TimeSampling.iid, 256, 77)],
)
def test_each_slot_alone_is_uniform(sampling: TimeSampling, num_slots: int, slot: int) -> None:
    v = many_times(sampling, num_slots, 1000 if num_slots == 256 else 1500)[:, slot]
    assert stats.kstest(v, "uniform").pvalue > 1e-4


def test_stratified_slots_stay_in_their_strata() -> None:
    v = many_times(TimeSampling.stratified, 48, 50)
    assert ((v * 48).long() == torch.arange(48)).all()


def test_stratified_slots_are_uniform_within_their_strata() -> None:
    v = many_times(TimeSampling.stratified, 48, 50)
    assert stats.kstest((v * 48 % 1).flatten(), "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (TimeSampling.iid, 1.1e-1),  # 6 sqrt(4/45) / sqrt(N)
        (TimeSampling.stratified, 4.9e-4),  # 2 / N^1.5
        (TimeSampling.lattice, 2.8e-5),  # 6 / sqrt(180) / (N/2)^2, from the second Bernoulli polynomial
    ],
)
def test_how_much_the_batch_mean_varies(sampling: TimeSampling, expected: float) -> None:
    mean = (1.2 + 6 * many_times(sampling, RANKS * OWN_SLOTS, 1000) ** 2).mean(1)
    # a standard deviation estimated from 1000 steps is itself off by 2.2 %: 10 % is 4 sigma
    assert mean.std().item() == pytest.approx(expected, rel=0.1, abs=0)


@pytest.mark.parametrize(
    ("sampling", "expected", "tolerance"),
    [
        (TimeSampling.iid, 1.65, 0.05),  # the largest of 64 sums varies by 0.08 a step: 3 sigma of a mean of 32 steps
        (TimeSampling.stratified, 1.98, 0.01),  # the last rank has the last band: 2 - 1/64, give or take 0.002
        (TimeSampling.lattice, 1.00, 1e-12),  # every rank has whole pairs; what is left is rounding
    ],
)
def test_how_uneven_the_ranks_are(sampling: TimeSampling, expected: float, tolerance: float) -> None:
    config, schedule = DiffusionConfig(e=0.0, t_min=1e-6, time_sampling=sampling), Schedule(e=0.0)
    worst = noise.worst_over_mean(config, schedule, RANKS * OWN_SLOTS, RANKS)
    assert worst == pytest.approx(expected, rel=0, abs=tolerance)


# --- masks


@pytest.mark.parametrize("mask_prob", [1e-3, 0.25, 0.5, 0.999])
def test_masks_are_as_frequent_as_they_should(mask_prob: float) -> None:
    mask_prob_B = torch.full((64,), mask_prob, dtype=torch.float64)
    frequency = noise.is_masked(0, 0, torch.arange(64), mask_prob_B, 4096).double().mean().item()
    sigma = math.sqrt(mask_prob * (1 - mask_prob) / (64 * 4096))
    assert abs(frequency - mask_prob) < 5 * sigma


@pytest.mark.parametrize(("mask_prob", "expected"), [(0.0, 0), (1.0, 64 * 4096)])
def test_nothing_or_everything_is_masked_at_the_ends(mask_prob: float, expected: int) -> None:
    mask_prob_B = torch.full((64,), mask_prob, dtype=torch.float64)
    assert noise.is_masked(0, 0, torch.arange(64), mask_prob_B, 4096).sum() == expected


@pytest.mark.parametrize(("above", "expected"), [(0.0, False), (0.999, False), (1.0, True)])
def test_a_word_is_masked_if_below_the_floor_of_its_threshold(above: float, expected: bool) -> None:
    word_B = noise.random_bits(0, "mask", 0, torch.arange(64), 1)[:, 0].double()
    assert (noise.is_masked(0, 0, torch.arange(64), (word_B + above) / 2**32, 1) == expected).all()


# --- dropout

every_drop_prob = pytest.mark.parametrize("drop_prob", [0.1, 0.5])


@lru_cache
def drops(drop_prob: float) -> Tensor:
    """Dropout of 4 sites, 4 samples, 128 positions, 128 channels, as numbers of mean 0 and variance 1."""
    key_SB = noise.dropout_keys(0, 0, torch.arange(4), 4)
    is_dropped_SBLD = noise.is_dropped(key_SB.flatten(), torch.arange(128), 128, drop_prob).unflatten(0, (4, 4))
    return (is_dropped_SBLD.double() - drop_prob) / math.sqrt(drop_prob * (1 - drop_prob))


@every_drop_prob
def test_dropout_is_as_frequent_as_it_should(drop_prob: float) -> None:
    assert drops(drop_prob).mean().abs() < 5 / math.sqrt(drops(drop_prob).numel())  # 5 sigma


@every_drop_prob
@pytest.mark.parametrize("dim", [0, 1, 2, 3], ids=["sites", "samples", "positions", "channels"])
def test_every_line_of_the_network_drops_alike(drop_prob: float, dim: int) -> None:
    lines = drops(drop_prob).movedim(dim, 0).flatten(1)
    z = lines.sum(1) / math.sqrt(lines.shape[1])
    assert stats.chi2.sf(z.square().sum().item(), len(z)) > 1e-4  # squares of independent standard normals


@every_drop_prob
@pytest.mark.parametrize(
    ("dim", "offset"),
    [(0, 1), (0, 2), (1, 1), (1, 2)] + [(dim, 2**i) for dim in (2, 3) for i in range(7)],
    ids=lambda value: str(value),
)
def test_dropout_is_uncorrelated_across(drop_prob: float, dim: int, offset: int) -> None:
    field = drops(drop_prob)
    size = field.shape[dim] - offset
    product = field.narrow(dim, 0, size) * field.narrow(dim, offset, size)
    assert product.sum().abs() < 5 * math.sqrt(product.numel())  # 5 sigma


@every_drop_prob
@pytest.mark.parametrize("dim", [1, 2], ids=["positions", "channels"])
def test_no_two_lines_drop_together(drop_prob: float, dim: int) -> None:
    key_B = noise.dropout_keys(0, 0, torch.arange(128), 1)[0]
    shape = (512, 256) if dim == 1 else (256, 512)
    is_dropped_BLD = noise.is_dropped(key_B, torch.arange(shape[0]), shape[1], drop_prob)
    lines = (is_dropped_BLD.movedim(dim, 0).flatten(1).float() - drop_prob) / math.sqrt(drop_prob * (1 - drop_prob))
    z = (lines @ lines.t() / math.sqrt(lines.shape[1])).triu(1)
    assert z.abs().max().item() < 6  # the largest of 130816 standard normals is beyond 6 once in 4000 cases


def test_neighbouring_keys_do_not_repeat_each_others_positions() -> None:
    first_LD, second_LD = (
        2 * noise.is_dropped(torch.arange(2, dtype=torch.int32), torch.arange(256), 256, 0.5).double() - 1
    )
    z_LL = first_LD @ second_LD.t() / 16  # each position under one key with each under the other
    assert z_LL.abs().max().item() < 6  # the largest of 65536 standard normals is beyond 6 once in 8000 cases


@pytest.mark.parametrize("other", [(1, 0), (0, 1)], ids=["seed", "step"])
def test_another_seed_or_step_has_other_dropout_keys(other: tuple[int, int]) -> None:
    slot_B = torch.arange(16)
    assert not (noise.dropout_keys(0, 0, slot_B, 8) == noise.dropout_keys(*other, slot_B, 8)).any()


def test_no_drop_probability_drops_nothing() -> None:
    assert not noise.is_dropped(noise.dropout_keys(0, 0, torch.arange(4), 1)[0], torch.arange(128), 128, 0.0).any()


def test_each_slot_may_have_a_step_of_its_own() -> None:
    steps, slots = torch.tensor([3, 3, 9, 0]), torch.tensor([5, 0, 5, 1])
    together = noise.random_bits(1, "mask", steps, slots, 10)
    alone = [noise.random_bits(1, "mask", int(k), j[None], 10) for k, j in zip(steps, slots, strict=True)]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("length", [1, 2, 5, 128])
@pytest.mark.parametrize("num_slots", [1, 2, 7, 8])
def test_counts_of_a_pair_are_mirrored_and_in_range(length: int, num_slots: int) -> None:
    for step in range(50):
        count_N = noise.mask_counts(1, step, num_slots, length)
        assert count_N.shape == (num_slots,)
        assert 1 <= int(count_N.min()) <= int(count_N.max()) <= length
        pairs = num_slots // 2
        assert torch.equal(count_N[: 2 * pairs : 2] + count_N[1 : 2 * pairs : 2], torch.full((pairs,), length + 1))


@pytest.mark.parametrize("slot", [0, 1, 6])
def test_the_count_of_a_slot_is_uniform(slot: int) -> None:
    counts = [int(noise.mask_counts(1, step, 8, 10)[slot]) for step in range(1000)]
    observed = torch.bincount(torch.tensor(counts), minlength=11)[1:]
    assert 1e-4 < stats.chisquare(observed).pvalue < 1 - 1e-4


def test_counts_of_a_block_cover_their_range() -> None:
    """Eight slots, eight counts: four points of a lattice and their mirror images hit every second count at least."""
    for step in range(50):
        counts = sorted(noise.mask_counts(1, step, 8, 80).tolist())
        assert all(after - before <= 20 for before, after in itertools.pairwise(counts))


def test_exact_masks_have_their_count() -> None:
    count_B = torch.tensor([1, 5, 17, 9])
    is_masked_BL = noise.is_masked_exactly(1, 4, torch.arange(4), count_B, 17)
    assert torch.equal(is_masked_BL.sum(1), count_B)


def test_every_set_of_positions_is_equally_likely() -> None:
    is_masked_BL = noise.is_masked_exactly(1, 0, torch.arange(6000), torch.full((6000,), 2), 6)
    observed = torch.bincount((is_masked_BL.long() * 2 ** torch.arange(6)).sum(1), minlength=64)
    observed = observed[observed > 0]
    assert len(observed) == 15  # two out of six
    assert 1e-4 < stats.chisquare(observed).pvalue < 1 - 1e-4


def test_equal_words_are_ordered_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.tensor([7, 1, 7, 0, 7, 1, 7, 1])  # of four positions: the second, then the third or fourth
    words = torch.cat([words, torch.tensor([2**32 - 1, 2**32 - 1])])
    monkeypatch.setattr(noise, "random_bits", lambda *_: words[None])
    masks = [noise.is_masked_exactly(1, 0, torch.zeros(1), torch.tensor([k]), 5)[0].tolist() for k in (1, 2, 4)]
    # the largest word is -1 as a signed number, and so the first: any fixed order serves
    assert masks[0] == [False, False, False, False, True]
    assert masks[1] == [False, True, False, False, True]
    assert masks[2] == [True, True, True, False, True]


def test_exact_masks_are_functions_of_their_slot_alone() -> None:
    count_B = torch.tensor([3, 8, 2, 11])
    together = noise.is_masked_exactly(1, 4, torch.arange(4), count_B, 12)
    alone = noise.is_masked_exactly(1, torch.tensor([4]), torch.tensor([2]), count_B[2:3], 12)
    assert torch.equal(together[2:3], alone)


def test_numbers_are_made_where_their_slots_are() -> None:
    """Sampling asks for them on the model's device; the meta device refuses to be mixed, as a GPU would."""
    assert noise.uniforms(0, "token", 0, torch.arange(3, device="meta"), 5).device.type == "meta"
