"""The bound on held-out rows, on frozen noise, with its standard error: one core, in training and afterwards.

Rows are taken in blocks of eight. A block has, for each draw, its own random shift of the lattice of times and its own
masks, functions of the evaluation seed, the block's number and the draw's alone. So every checkpoint meets the same
noise, the result does not depend on batch sizes or on who computes a block, and the blocks are independent.

With s_bd the nats of block b in draw d, s_b their mean over the D draws, c_b its real tokens and C the sum of those,
n blocks:

    nelbo    = sum_b s_b / C
    se^2     = n / (n - 1) * sum_b (s_b - nelbo c_b)^2 / C^2         both parts: other rows and other noise
    se_mc^2  = sum_b sum_d (s_bd - s_b)^2 / (D (D - 1)) / C^2        these rows, other noise; needs D >= 2
    se_data^2 = max(0, se^2 - se_mc^2)                               other rows, all noise
"""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mdlm_scale import log as log_module
from mdlm_scale.config import DiffusionConfig, EvaluateConfig, TimeSampling
from mdlm_scale.data.source import Source
from mdlm_scale.diffusion import noise, objective, schedule
from mdlm_scale.diffusion.corrupt import Batch, masked
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.engine import Engine
from mdlm_scale.parallel.groups import Groups

BLOCK = 8  # rows that share one lattice of times
MAX_DRAWS = 1024
MAX_ROWS = BLOCK << 22  # with a number below 2^32 for each block of each draw
Forward = Callable[[Batch], Tensor]  # nats of each masked row, (M,)
Floats = NDArray[np.float64]


class Estimator(StrEnum):
    """paper    t in [t_min, 1] (or on T steps), each token masked with the schedule's probability and weight
    count    k of the L positions masked, k uniform on 1 .. L, weight L / k: continuous time to its end without t_min,
             whatever the schedule; for networks that are not told t
    """

    paper = "paper"
    by_count = "count"


@dataclass(frozen=True)
class Plan:
    """What is estimated and on which noise: with the same rows, the same figure for everybody."""

    diffusion: DiffusionConfig
    seed: int
    num_rows: int  # the first ones
    mask_id: int
    vocab_size: int
    estimator: Estimator = Estimator.paper


@dataclass(frozen=True)
class Scores:
    """Of every row, on every rank."""

    nats: Floats  # (draws, rows), weighted
    tokens: Floats  # (rows,), real ones

    def __add__(self, more: "Scores") -> "Scores":
        """With further draws of the same rows."""
        return Scores(np.concatenate([self.nats, more.nats]), self.tokens)


@dataclass(frozen=True)
class Evaluation:
    nelbo: float  # nats a token
    nelbo_se: float
    ppl: float
    ppl_se: float
    se_mc: float | None  # the part of nelbo_se that more draws would lower; unknown for one draw
    se_data: float | None  # the part that only more rows would
    num_rows: int
    num_tokens: int
    num_blocks: int
    num_draws: int


def evaluate(
    engine: Engine,
    source: Source,
    config: EvaluateConfig,
    diffusion: DiffusionConfig,
    layout: Layout,
    groups: Groups,
    micro_batch_size: int,
    mask_id: int,
    vocab_size: int,
) -> Evaluation:
    """During training: one draw of the first rows of `source` under the engine's weights."""
    num_rows = min(config.rows or source.num_rows, source.num_rows)
    plan = Plan(frozen(diffusion), config.seed, num_rows, mask_id, vocab_size)
    return estimate(score(engine.forward, source, plan, range(1), layout, groups, micro_batch_size))


def frozen(diffusion: DiffusionConfig) -> DiffusionConfig:
    """Times as every evaluation takes them, however training does."""
    return dataclasses.replace(diffusion, time_sampling=TimeSampling.lattice)


def score(
    forward: Forward, source: Source, plan: Plan, draws: range, layout: Layout, groups: Groups, batch_size: int
) -> Scores:
    """Weighted nats of every row in each of these draws; the ranks take blocks in turn."""
    block_N = np.arange(plan.num_rows) // BLOCK
    own, most = (np.flatnonzero(block_N % layout.dp_size == rank) for rank in (layout.dp_rank, 0))
    nats, tokens = np.zeros((len(draws), plan.num_rows)), np.zeros(plan.num_rows)
    num_own, started = len(draws) * len(own), time.monotonic()
    for first in range(0, len(draws) * len(most), batch_size):
        draw_B, at_B = np.divmod(np.arange(first, min(first + batch_size, num_own)), max(1, len(own)))
        row_B = own[at_B]
        if len(row_B) == 0:  # a sharded model needs all ranks at each pass: who has no rows left computes one again
            forward(noised(source, plan, np.zeros(1, np.int64), np.zeros(1, np.int64)))
            continue
        batch = noised(source, plan, row_B, draw_B + draws.start)
        nats_M = forward(batch).double().cpu() * batch.elbo_weight_M
        row_M = batch.rows_M // batch.x_BL.shape[1]
        nats[draw_B, row_B] = torch.zeros(len(row_B), dtype=torch.float64).index_add_(0, row_M, nats_M).numpy()
        tokens[row_B] = batch.is_token_BL.sum(1).numpy()
        done = (first + len(row_B)) / num_own
        rest = (time.monotonic() - started) * (1 / done - 1)
        log_module.live(f"evaluating {done:4.0%} | eta {log_module.duration(rest)} | {num_own:,} rows here")
    log_module.end_live()
    both = np.array(groups.sum([*nats.ravel().tolist(), *tokens.tolist()]))  # a row is on one rank: zeros are added
    return Scores(both[: nats.size].reshape(nats.shape), both[nats.size :])


def noised(source: Source, plan: Plan, row_B: NDArray[np.int64], draw_B: NDArray[np.int64]) -> Batch:
    """These rows, each corrupted as it is in this draw."""
    x_BL, is_token_BL = source.rows(row_B)
    diffusion, length = plan.diffusion, x_BL.shape[1]
    block_B, slot_B = np.divmod(row_B, BLOCK)
    step_B = block_B + draw_B * (MAX_ROWS // BLOCK)  # the first draw's is the block's number

    def of_rows(of_block: Callable[[int], Tensor]) -> Tensor:
        found = {step: of_block(step) for step in dict.fromkeys(step_B.tolist())}
        return torch.stack([found[step][slot] for step, slot in zip(step_B.tolist(), slot_B.tolist(), strict=True)])

    noise_of = plan.seed, torch.from_numpy(step_B), torch.from_numpy(slot_B)
    if plan.estimator is Estimator.by_count:
        count_B = of_rows(lambda step: noise.mask_counts(plan.seed, step, BLOCK, length))
        is_masked_BL = noise.is_masked_exactly(*noise_of, count_B, length)
        t_B = count_B.double() / length
        sigma_B, weight_B = torch.zeros_like(t_B), length / count_B.double()
    else:
        shape = schedule.from_config(diffusion)
        t_B = of_rows(lambda step: noise.times(diffusion, plan.seed, step, BLOCK))
        is_masked_BL = noise.is_masked(*noise_of, shape.mask_prob(t_B), length)
        sigma_B, weight_B = shape.sigma(t_B), objective.weight(shape, t_B, num_times=diffusion.num_times)
    return masked(
        x_BL, is_token_BL, is_masked_BL, t_B, sigma_B, weight_B=weight_B, elbo_weight_B=weight_B,
        mask_id=plan.mask_id, vocab_size=plan.vocab_size, where=f"Rows {row_B.min()} to {row_B.max()}",
    )  # fmt: skip


def estimate(scores: Scores) -> Evaluation:
    """Sum over sum, and the spread of the blocks: formulas above."""
    (num_draws, num_rows), starts = scores.nats.shape, np.arange(0, scores.tokens.size, BLOCK)
    sums_DB, tokens_B = (np.add.reduceat(each, starts, axis=-1) for each in (scores.nats, scores.tokens))
    num_tokens, num_blocks = int(scores.tokens.sum()), len(starts)
    nelbo = math.fsum(scores.nats.ravel()) / num_draws / num_tokens
    squares = float(((sums_DB.mean(0) - nelbo * tokens_B) ** 2).sum())
    se = math.sqrt(squares * num_blocks / (num_blocks - 1)) / num_tokens if num_blocks > 1 else math.nan
    se_mc = se_data = None
    if num_draws > 1:
        noise_squares = float(((sums_DB - sums_DB.mean(0)) ** 2).sum())
        se_mc = math.sqrt(noise_squares / (num_draws * (num_draws - 1))) / num_tokens
        se_data = math.sqrt(max(0.0, se**2 - se_mc**2))
    ppl = math.exp(min(nelbo, 700.0))
    return Evaluation(nelbo, se, ppl, ppl * se, se_mc, se_data, num_rows, num_tokens, num_blocks, num_draws)


def difference(one: Scores, other: Scores) -> Evaluation:
    """`other` minus `one` on the same rows and noise: the errors are of the differences, block by block."""
    return estimate(Scores(other.nats - one.nats, one.tokens))


def faults(config: EvaluateConfig) -> list[str]:
    found = [f"evaluate.every={config.every} must be at least 1."] if config.every < 1 else []
    if config.rows != 0 and config.rows < 2 * BLOCK:
        found.append(
            f"evaluate.rows={config.rows} must be 0 (all rows) or at least {2 * BLOCK}: an error needs two blocks."
        )
    return found
