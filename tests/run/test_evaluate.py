"""The validation bound: independent of batch size, ranks and draws, frozen, right where it can be computed by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from parity.ranks import run_ranks
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, EvaluateConfig, LossWeight
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.data.source import Source, in_memory
from mdlm_scale.diffusion import noise
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.evaluate import BLOCK, Estimator, Plan, Scores, estimate, evaluate, noised, score

LENGTH, NUM_ROWS, VOCAB = 16, 37, 11


class FixedEngine:
    """Scores every row by its target alone: the bound of a model that knows the token frequencies."""

    def forward(self, batch: Batch) -> Tensor:
        return batch.target_M.double() + 1


def source() -> Source:
    """The last row is padded after 9 tokens."""
    rows = np.empty(NUM_ROWS, record_type(LENGTH, np.dtype("<u2")))
    rows[TOKENS] = (np.arange(NUM_ROWS * LENGTH) % (VOCAB - 1)).reshape(NUM_ROWS, LENGTH)
    rows[NUM_TOKENS] = LENGTH
    rows[NUM_TOKENS][-1] = 9
    return Source([in_memory(rows)])


def result(micro_batch_size: int = 4, rows: int = 0, seed: int = 1, diffusion: DiffusionConfig = DiffusionConfig()):  # noqa: B008
    config = EvaluateConfig(rows=rows, seed=seed)
    engine: Any = FixedEngine()
    return evaluate(engine, source(), config, diffusion, Layout(), Groups(), micro_batch_size, VOCAB - 1, VOCAB)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8, 64])
def test_batch_size_does_not_matter(micro_batch_size: int) -> None:
    # sums of the same float64 numbers in another order
    assert result(micro_batch_size).nelbo == pytest.approx(result().nelbo, rel=1e-13)
    assert result(micro_batch_size).nelbo_se == pytest.approx(result().nelbo_se, rel=1e-10)


def test_every_real_token_counts_once() -> None:
    assert result().num_tokens == (NUM_ROWS - 1) * LENGTH + 9
    assert result(rows=20).num_tokens == 20 * LENGTH


def test_training_weight_and_sampling_do_not_enter() -> None:
    assert result(diffusion=DiffusionConfig(weight=LossWeight.flat)) == result()


def test_error_is_the_spread_over_seeds() -> None:
    """The noise part only (the rows are fixed): the reported error, which holds both parts, must not be below it by
    more than chance, nor far above, since the rows are nearly alike."""
    found = [result(seed=seed) for seed in range(60)]
    nelbos = torch.tensor([r.nelbo for r in found], dtype=torch.float64)
    mean_se = sum(r.nelbo_se for r in found) / len(found)
    # a standard deviation from 60 draws is known to 1/sqrt(120) = 9 %; three of those, and a tenth for the rows' part
    assert 0.7 < mean_se / float(nelbos.std()) < 1.5


def test_mean_over_seeds_is_the_bound() -> None:
    """With the loglinear schedule weight * P(masked) is 1 - e at every t: the bound is that times the mean nats."""
    x_BL, is_token_BL = source().rows(np.arange(NUM_ROWS))
    exact = (1 - 1e-3) * float((x_BL[is_token_BL] + 1).double().mean())
    found = [result(seed=seed) for seed in range(60)]
    mean = sum(r.nelbo for r in found) / 60
    assert abs(mean - exact) < 4 * (sum(r.nelbo_se for r in found) / 60) / math.sqrt(60)


def test_perplexity_and_its_error() -> None:
    r = result()
    assert r.ppl == pytest.approx(math.exp(r.nelbo))
    assert r.ppl_se == pytest.approx(r.ppl * r.nelbo_se)
    assert BLOCK == 8  # part of the frozen protocol: another value is another figure


every_estimator = pytest.mark.parametrize("estimator", list(Estimator))


def plan(estimator: Estimator = Estimator.paper, seed: int = 1, num_rows: int = NUM_ROWS) -> Plan:
    return Plan(DiffusionConfig(), seed, num_rows, VOCAB - 1, VOCAB, estimator)


def forward(batch: Batch) -> Tensor:
    return FixedEngine().forward(batch)


def scores(estimator: Estimator, draws: range, batch_size: int = 5) -> Scores:
    return score(forward, source(), plan(estimator), draws, Layout(), Groups(), batch_size)


@every_estimator
def test_a_row_is_scored_alike_in_any_batch(estimator: Estimator) -> None:
    whole = scores(estimator, range(2), 1000)
    for batch_size in (1, 7, 8, 16):
        found = scores(estimator, range(2), batch_size)
        assert np.array_equal(found.nats, whole.nats)
        assert np.array_equal(found.tokens, whole.tokens)


@every_estimator
def test_further_draws_leave_the_earlier_ones_as_they_are(estimator: Estimator) -> None:
    parts = scores(estimator, range(1)) + scores(estimator, range(1, 2)) + scores(estimator, range(2, 4))
    assert np.array_equal(parts.nats, scores(estimator, range(4)).nats)


def test_the_first_draw_is_what_training_sees() -> None:
    assert estimate(scores(Estimator.paper, range(1))) == result()


def test_the_first_draw_is_keyed_by_the_number_of_the_block() -> None:
    """Part of the frozen protocol: other noise is another figure."""
    rows = np.array([11, 20])  # slot 3 of block 1, slot 4 of block 2
    batch = noised(source(), plan(), rows, np.zeros(2, np.int64))
    for i, (block, slot) in enumerate([(1, 3), (2, 4)]):
        t = noise.times(DiffusionConfig(), 1, block, BLOCK)[slot]
        assert batch.t_B[i] == t
        is_masked_1L = noise.is_masked(1, block, torch.tensor([slot]), (1 - 1e-3) * t[None], LENGTH)
        assert torch.equal(batch.z_BL[i] == VOCAB - 1, is_masked_1L[0])


@every_estimator
def test_every_block_and_draw_has_masks_of_its_own(estimator: Estimator) -> None:
    rows = np.tile(np.arange(0, NUM_ROWS, BLOCK), 3)  # the first row of each block, in three draws
    batch = noised(source(), plan(estimator), rows, np.repeat(np.arange(3), len(rows) // 3))
    masks = {tuple(row) for row in (batch.z_BL == VOCAB - 1).tolist()}
    # two of 15 masks of 16 positions may meet by chance, where few positions or nearly all are masked
    assert len(masks) >= len(rows) - 2
    assert len({float(t) for t in batch.t_B}) > len(rows) // 2


def test_masks_by_count_have_neighbours_that_sum_to_one_more_than_all() -> None:
    batch = noised(source(), plan(Estimator.by_count), np.arange(32), np.zeros(32, np.int64))
    count_B = (batch.z_BL == VOCAB - 1).sum(1)
    assert torch.equal(count_B[::2] + count_B[1::2], torch.full((16,), LENGTH + 1))
    assert torch.equal(batch.elbo_weight_M, (LENGTH / count_B.double())[batch.rows_M // LENGTH])


def test_padding_is_corrupted_but_not_scored() -> None:
    batches = [noised(source(), plan(Estimator.by_count), np.array([NUM_ROWS - 1]), np.array([d])) for d in range(20)]
    assert any(bool((batch.z_BL[0, 9:] == VOCAB - 1).any()) for batch in batches)
    assert all(max(batch.rows_M.tolist(), default=0) < 9 for batch in batches)


def test_formulas_of_the_errors() -> None:
    """Three blocks, two draws, against the formulas written out."""
    nats = np.zeros((2, 20))
    nats[:, 0], nats[:, 8], nats[:, 16] = (8.0, 10.0), (20.0, 16.0), (4.0, 7.0)
    found = estimate(Scores(nats, np.ones(20)))
    nelbo = (9 + 18 + 5.5) / 20
    squares = [(9 - 8 * nelbo) ** 2, (18 - 8 * nelbo) ** 2, (5.5 - 4 * nelbo) ** 2]
    noise_squares = [2 * 1.0, 2 * 4.0, 2 * 2.25]
    assert found.nelbo == pytest.approx(nelbo)
    assert found.nelbo_se == pytest.approx(math.sqrt(3 / 2 * sum(squares)) / 20)
    assert found.se_mc == pytest.approx(math.sqrt(sum(noise_squares) / 2) / 20)
    assert found.se_data == pytest.approx(math.sqrt(found.nelbo_se**2 - found.se_mc**2))
    assert (found.num_blocks, found.num_draws, found.num_tokens) == (3, 2, 20)


def test_one_draw_does_not_tell_the_noise_from_the_rows() -> None:
    assert (result().se_mc, result().se_data) == (None, None)


@pytest.mark.parametrize("dp_size", [1, 3, 4, 9])
@pytest.mark.parametrize("num_rows", [17, 37])
def test_all_ranks_call_the_model_equally_often(dp_size: int, num_rows: int) -> None:
    """A sharded model gathers in each call; nine ranks are more than there are blocks."""
    calls = []
    for rank in range(dp_size):
        seen: list[int] = []

        def counting(batch: Batch, seen: list[int] = seen) -> Tensor:
            seen.append(len(batch.t_B))
            return forward(batch)

        score(counting, source(), plan(num_rows=num_rows), range(2), Layout(dp_size, rank), Groups(), 3)
        calls.append(len(seen))
    assert len(set(calls)) == 1, calls


def scores_of_a_rank(groups: Groups, estimator: str, batch_size: int) -> list[Any]:
    layout = Layout(groups.ranks.size, groups.ranks.rank)
    found = score(forward, source(), plan(Estimator(estimator)), range(2), layout, groups, batch_size)
    return [found.nats.tolist(), found.tokens.tolist()]


@every_estimator
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_the_rows_and_find_the_same(estimator: Estimator, num_ranks: int) -> None:
    """Bit for bit: this model scores a row alike in any batch, and a row is on one rank."""
    alone = scores(estimator, range(2))
    for found in run_ranks(scores_of_a_rank, num_ranks, str(estimator), 3):
        assert found == [alone.nats.tolist(), alone.tokens.tolist()]
