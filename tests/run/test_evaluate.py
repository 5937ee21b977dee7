"""The validation bound: independent of batch size, frozen, and right where it can be computed by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, EvaluateConfig, LossWeight
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.data.source import Source, in_memory
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.evaluate import BLOCK, evaluate

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
