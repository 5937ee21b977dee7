"""The bound on held-out rows, on frozen noise, with its standard error.

Rows are taken in blocks of eight; a block has its own random shift of lattice times and its own masks, functions of
the evaluation seed and the block's number alone. So every checkpoint meets the same noise, the result does not depend
on batch sizes or on who computes a block, and the blocks are independent: their spread gives the standard error.
"""

import dataclasses
import math
from dataclasses import dataclass

import numpy as np

from mdlm_scale.config import DiffusionConfig, EvaluateConfig, TimeSampling
from mdlm_scale.data.source import Source
from mdlm_scale.diffusion import noise, schedule
from mdlm_scale.diffusion.corrupt import corrupted
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.engine import Engine
from mdlm_scale.parallel.groups import Groups

BLOCK = 8  # rows that share one lattice of times


@dataclass(frozen=True)
class Evaluation:
    nelbo: float  # nats a token
    nelbo_se: float
    ppl: float
    ppl_se: float
    num_rows: int
    num_tokens: int


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
    """NELBO and perplexity of the first rows of `source` under the engine's weights; the ranks take blocks in turn."""
    diffusion = dataclasses.replace(diffusion, time_sampling=TimeSampling.lattice)
    shape = schedule.from_config(diffusion)
    num_rows = min(config.rows or source.num_rows, source.num_rows)
    num_blocks = -(-num_rows // BLOCK)
    sums, counts = [0.0] * num_blocks, [0.0] * num_blocks
    for first in range(0, num_blocks, layout.dp_size):
        block = min(first + layout.dp_rank, num_blocks - 1)
        t_N = noise.times(diffusion, config.seed, block, BLOCK)
        slots = range(min(BLOCK, num_rows - block * BLOCK))
        for start in range(0, BLOCK, micro_batch_size):
            # a sharded model needs all ranks at each pass: who has no rows left computes some again, for nothing
            counts_here = first + layout.dp_rank < num_blocks and start < len(slots)
            part = slots[start : start + micro_batch_size] if counts_here else slots[:micro_batch_size]
            x_BL, is_token_BL = source.rows(np.arange(part.start, part.stop) + block * BLOCK)
            batch = corrupted(
                x_BL, is_token_BL, t_N[part.start : part.stop],
                config=diffusion, schedule=shape, seed=config.seed, step=block, slots=part,
                mask_id=mask_id, vocab_size=vocab_size,
            )  # fmt: skip
            nll_M = engine.forward(batch).double()
            if counts_here:
                sums[block] += float((nll_M * batch.elbo_weight_M.to(nll_M.device)).sum())
                counts[block] += batch.num_tokens
    both = groups.sum(sums + counts)  # each block is on one rank: zeros are added, which changes nothing
    return _ratio(both[:num_blocks], [int(count) for count in both[num_blocks:]], num_rows)


def _ratio(sums: list[float], counts: list[int], num_rows: int) -> Evaluation:
    """Sum over sum, with the standard error of a ratio from independent blocks."""
    num_tokens, num_blocks = sum(counts), len(sums)
    nelbo = math.fsum(sums) / num_tokens
    squares = math.fsum((s - nelbo * c) ** 2 for s, c in zip(sums, counts, strict=True))
    nelbo_se = math.sqrt(squares * num_blocks / (num_blocks - 1)) / num_tokens if num_blocks > 1 else float("nan")
    ppl = math.exp(min(nelbo, 700.0))
    return Evaluation(nelbo, nelbo_se, ppl, ppl * nelbo_se, num_rows, num_tokens)


def faults(config: EvaluateConfig) -> list[str]:
    found = [f"evaluate.every={config.every} must be at least 1."] if config.every < 1 else []
    if config.rows != 0 and config.rows < 2 * BLOCK:
        found.append(
            f"evaluate.rows={config.rows} must be 0 (all rows) or at least {2 * BLOCK}: an error needs two blocks."
        )
    return found
