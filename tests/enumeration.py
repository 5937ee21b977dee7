"""A model so small that its bound can be summed over all masks, and how often an estimate's error bar covers that.

Five positions, three tokens and the mask: 1024 states of a row, 32 masks. The model is a table of random conditional
probabilities. Rows come from a population of 400, some of them padded, each as likely as the other.
"""

import math
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, record_type
from mdlm_scale.data.source import Source, in_memory
from mdlm_scale.diffusion import objective, schedule
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.evaluate import Estimator, Evaluation, Plan, Scores, estimate, frozen, score

LENGTH, MASK_ID, VOCAB, POPULATION = 5, 3, 4, 400
MASKS = torch.tensor(list(product([False, True], repeat=LENGTH)))
STATES = VOCAB ** torch.arange(LENGTH)


def table() -> Tensor:
    """-log p(token | state, position), (states, L, V - 1); uneven, so that rows and masks differ in what they cost."""
    logits = torch.randn(VOCAB**LENGTH, LENGTH, MASK_ID, generator=torch.Generator().manual_seed(0)).double()
    return -torch.log_softmax(1.5 * logits, dim=-1)


TABLE = table()


def forward(batch: Batch) -> Tensor:
    """Nats of each masked row, as a model gives them."""
    state_B = (batch.z_BL * STATES).sum(1)
    return TABLE[state_B[batch.rows_M // LENGTH], batch.rows_M % LENGTH, batch.target_M]


def population(seed: int = 0) -> Records:
    """Rows of two kinds, one of them mostly of a single token; a fifth is padded."""
    random = np.random.default_rng(seed)
    rows = np.zeros(POPULATION, record_type(LENGTH, np.dtype("<u2")))
    probs = np.where(random.random(POPULATION) < 0.5, 0.34, 0.8)
    for row, p in zip(rows, probs, strict=True):
        row[TOKENS] = random.choice(3, size=LENGTH, p=[p, (1 - p) / 2, (1 - p) / 2])
        row[NUM_TOKENS] = LENGTH if random.random() < 0.8 else random.integers(2, LENGTH)
    return rows


def mask_weights(estimator: Estimator, diffusion: DiffusionConfig) -> list[float]:
    """What a given mask of k positions contributes: its probability times its weight, integrated over t."""
    if estimator is Estimator.by_count:
        return [0.0, *(1 / (k * math.comb(LENGTH, k)) for k in range(1, LENGTH + 1))]
    shape = schedule.from_config(diffusion)
    if diffusion.num_times is None:
        nodes, node_weights = np.polynomial.legendre.leggauss(64)  # for loglinear a polynomial of degree 4: exact
        t = torch.from_numpy(diffusion.t_min + (1 - diffusion.t_min) * (nodes + 1) / 2)
        share = torch.from_numpy(node_weights / 2)
    else:
        t = torch.arange(1, diffusion.num_times + 1, dtype=torch.float64) / diffusion.num_times
        share = torch.full_like(t, 1 / diffusion.num_times)
    p, weight = shape.mask_prob(t), objective.weight(shape, t, num_times=diffusion.num_times)
    return [float((share * weight * p**k * (1 - p) ** (LENGTH - k)).sum()) for k in range(LENGTH + 1)]


def exact_nats(rows: Records, estimator: Estimator, diffusion: DiffusionConfig) -> Tensor:
    """The bound of each row, summed over all masks."""
    x_NL, is_token_NL = Source([in_memory(rows)]).rows(np.arange(len(rows)))
    weights = mask_weights(estimator, diffusion)
    nats_N = torch.zeros(len(rows), dtype=torch.float64)
    for is_masked_L in MASKS:
        state_N = (torch.where(is_masked_L, MASK_ID, x_NL) * STATES).sum(1)
        nats_NL = TABLE[state_N[:, None], torch.arange(LENGTH), x_NL]
        nats_N += weights[int(is_masked_L.sum())] * (nats_NL * (is_masked_L & is_token_NL)).sum(1)
    return nats_N


def exact(rows: Records, estimator: Estimator, diffusion: DiffusionConfig) -> float:
    """Nats a token, over these rows."""
    return float(exact_nats(rows, estimator, diffusion).sum()) / float(rows[NUM_TOKENS].sum())


def scores(
    rows: Records,
    estimator: Estimator,
    seed: int,
    num_draws: int = 1,
    diffusion: DiffusionConfig = DiffusionConfig(),  # noqa: B008
    batch_size: int = 8192,
) -> Scores:
    plan = Plan(frozen(diffusion), seed, len(rows), MASK_ID, VOCAB, estimator)
    return score(forward, Source([in_memory(rows)]), plan, range(num_draws), Layout(), Groups(), batch_size)


@dataclass(frozen=True)
class Coverage:
    share: float  # of the seeds whose estimate +- 2 standard errors holds the truth
    spread: float  # standard deviation of the estimates
    mean_se: float  # what they reported


def coverage(
    estimator: Estimator, num_seeds: int, *, fresh_rows: bool, num_rows: int = 512, first_seed: int = 0
) -> Coverage:
    """Fresh rows for every seed: the whole error against the mean over the population, with one draw of each row. The
    same rows for all: the noise's part, from two draws, against the bound of these rows."""
    everybody, diffusion = population(), DiffusionConfig()
    random = np.random.default_rng([first_seed, num_rows])
    rows = random.choice(everybody, num_rows)
    truth = exact(everybody if fresh_rows else rows, estimator, diffusion)
    nelbos, errors = np.empty(num_seeds), np.empty(num_seeds)
    for i in range(num_seeds):
        if fresh_rows:
            rows = random.choice(everybody, num_rows)
        found: Evaluation = estimate(scores(rows, estimator, first_seed + i, 1 if fresh_rows else 2))
        error = found.nelbo_se if fresh_rows else found.se_mc
        assert error is not None
        nelbos[i], errors[i] = found.nelbo, error
    share = float((np.abs(nelbos - truth) <= 2 * errors).mean())
    return Coverage(share, float(nelbos.std(ddof=1)), float(errors.mean()))
