"""Samplers: from masks to text, over any network given as a function.

`logits(z_BL, t_B, rows_M) -> logits_MV` scores the given rows of the flattened batch. When a position is unmasked
depends neither on what it becomes nor on the network, so that is decided first, for all positions: a row then passes
through the network only when one of its tokens is drawn, and through its head only there. That is the law of the loop
over all steps, with nothing to cache. Each position is drawn once, by numbers that are functions of (seed, sample
number, position): a sample does not depend on others. Draws are float64: float32 cuts off a large vocabulary's tail.
B samples, N positions, L of them in a window, M rows about to be drawn, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from mdlm_scale.diffusion.noise import uniforms
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.errors import TrainingError

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK_ROWS = 512  # whose distribution over V is in memory in float64
FINE_STEPS = 1 << 20  # to this the time is rounded that a network is told in first-hitting; float32 knows it no better


class Order(StrEnum):
    ancestral = "ancestral"  # T steps of p(z_s | z_t): what is unmasked in one step is drawn independently
    first_hitting = "first-hitting"  # each at its own moment of continuous time (arXiv 2409.02908): T without end
    confidence = "confidence"  # in T steps, those first whose drawn token is most probable: not the model's law


@dataclass(frozen=True)
class Rule:
    mask_id: int
    vocab_size: int  # columns behind these are padding
    seed: int = 0
    order: Order = Order.ancestral
    num_steps: int = 128  # T
    temperature: float = 1.0  # 0 takes the most probable token
    top_p: float = 1.0  # only the most probable tokens that have this probability together
    stop_id: int = -1  # what follows the first such token is not wanted; -1 is no token

    def departures(self) -> list[str]:
        """What makes the law another one than the model's."""
        order = ["order by confidence"] if self.order is Order.confidence else []
        heat = [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        return order + heat + ([f"top-p {self.top_p:g}"] if self.top_p != 1 else [])


def generate(
    logits: Logits, schedule: Schedule, rule: Rule, z_BN: Tensor, sample_B: Tensor, *, width: int, stride: int
) -> tuple[Tensor, Tensor]:
    """`z_BN` with its masks filled, and how many tokens of each are wanted; what was no mask stays as it is.

    More than `width` positions are filled by windows, each `stride` further on, behind what it shares with the one
    before. What is wanted is the same with and without a `stop_id`: what follows is left masked only if nothing before
    it is. A `stop_id` may be the frame of a row of training: as the first token or a window's last it does not count.
    """
    z_BN, num_positions = z_BN.clone(), z_BN.shape[1]
    starts = [*range(0, num_positions - width, stride), max(0, num_positions - width)]
    may_stop_BN = z_BN == rule.mask_id
    may_stop_BN[:, [0, *(start + width - 1 for start in starts[:-1])]] = False
    u_when_BN, u_which_BN = (uniforms(rule.seed, name, 0, sample_B, num_positions) for name in ("unmask", "token"))
    for start in starts:
        here = slice(start, start + width)
        going_A = torch.nonzero(~_has_stopped(z_BN, may_stop_BN, rule)).squeeze(1)
        step_AL, time_AL = moments(schedule, rule, u_when_BN[going_A, here])
        window = z_BN[going_A, here], may_stop_BN[going_A, here], u_which_BN[going_A, here]
        z_BN[going_A, here] = _filled(logits, rule, *window, step_AL, time_AL)
    is_end_BN = (z_BN == rule.stop_id) & may_stop_BN
    return z_BN, torch.where(is_end_BN.any(1), is_end_BN.int().argmax(1) + 1, num_positions)


def moments(schedule: Schedule, rule: Rule, u_BL: Tensor) -> tuple[Tensor, Tensor]:
    """When each position is unmasked if it is masked at t = 1: a number that grows with t, and t itself.

    P(masked at t | masked at 1) = mask_prob(t) / mask_prob(1), so a uniform number says it; of T steps it is that in
    which the moment lies. The last step takes all that is left, also if masks are left at t = 0.
    """
    num_steps = FINE_STEPS if rule.order is Order.first_hitting else rule.num_steps
    edges = torch.arange(1, num_steps + 1, dtype=torch.float64, device=u_BL.device) / num_steps
    mask_prob = schedule.mask_prob(edges)
    step_BL = torch.searchsorted(mask_prob[:-1] / mask_prob[-1], u_BL, right=True)
    return u_BL if rule.order is Order.first_hitting else step_BL, edges[step_BL]


def draw(logits_MV: Tensor, u_M: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """A token for each row by inverting its distribution function at `u_M`, and what probability the network gave it
    before temperature and top-p. Never the mask, never padding."""
    if len(u_M) > CHUNK_ROWS:
        parts = [draw(*part, rule) for part in zip(logits_MV.split(CHUNK_ROWS), u_M.split(CHUNK_ROWS), strict=True)]
        return torch.cat([token_M for token_M, _ in parts]), torch.cat([p_M for _, p_M in parts])
    logits_MV = logits_MV[:, : rule.vocab_size].double()
    logits_MV = logits_MV.index_fill(1, torch.tensor(rule.mask_id, device=u_M.device), -torch.inf)
    p_MV = law_MV = torch.softmax(logits_MV, dim=1)
    if rule.temperature not in (0, 1):
        # the largest is 0: the others may fall to -inf at a low temperature, but nothing becomes inf - inf
        law_MV = torch.softmax((logits_MV - logits_MV.amax(1, keepdim=True)) / rule.temperature, dim=1)
    if rule.top_p < 1:
        falling_MV, token_MV = law_MV.sort(dim=1, descending=True)
        is_tail_MV = falling_MV.cumsum(1) - falling_MV >= rule.top_p
        law_MV = law_MV.scatter(1, token_MV, falling_MV.masked_fill(is_tail_MV, 0.0))
    cdf_MV = law_MV.cumsum(dim=1)
    total_M = cdf_MV[:, -1]
    if not total_M.isfinite().all():
        raise TrainingError("The network gives no numbers (NaN): weights like these have nothing to say.")
    # below the total, or the search would run past the last token that has any probability
    point_M = torch.minimum(u_M * total_M, torch.nextafter(total_M, torch.zeros_like(total_M)))
    token_M = torch.searchsorted(cdf_MV, point_M[:, None], right=True).squeeze(1)
    if rule.temperature == 0:
        token_M = logits_MV.argmax(dim=1)
    return token_M, p_MV.gather(1, token_M[:, None]).squeeze(1)


def _filled(
    logits: Logits, rule: Rule, z_BL: Tensor, may_stop_BL: Tensor, u_BL: Tensor, step_BL: Tensor, time_BL: Tensor
) -> Tensor:
    """Round by round: the n-th moment of each row together with the n-th of the others; by confidence the n-th share,
    for which all that is masked is drawn and the surest stay."""
    masks_B, by_confidence = (z_BL == rule.mask_id).sum(1), rule.order is Order.confidence
    round_BL = _ranks(step_BL, z_BL == rule.mask_id)
    for number in range(rule.num_steps if by_confidence else int(round_BL.max()) + 1 if len(z_BL) else 0):
        is_asked_BL = (z_BL == rule.mask_id) & ~_has_stopped(z_BL, may_stop_BL, rule)[:, None]
        share_B = masks_B * (number + 1) // rule.num_steps - masks_B * number // rule.num_steps
        is_asked_BL &= (share_B > 0)[:, None] if by_confidence else round_BL == number
        if not is_asked_BL.any():
            continue
        active_A = torch.nonzero(is_asked_BL.any(1)).squeeze(1)  # a row without any such position is not computed
        rows_M = torch.nonzero(is_asked_BL[active_A].flatten()).squeeze(1)
        t_A = time_BL.masked_fill(~is_asked_BL, 0.0).amax(1)[active_A]
        token_M, p_M = draw(logits(z_BL[active_A], t_A, rows_M), u_BL[is_asked_BL], rule)
        drawn_BL = z_BL.masked_scatter(is_asked_BL, token_M)
        if by_confidence:
            sure_BL = torch.full_like(u_BL, -1.0).masked_scatter(is_asked_BL, p_M)
            is_asked_BL &= _ranks(sure_BL, is_asked_BL, ties=False) < share_B[:, None]
        z_BL = torch.where(is_asked_BL, drawn_BL, z_BL)
    return z_BL


def _ranks(key_BL: Tensor, is_ranked_BL: Tensor, ties: bool = True) -> Tensor:
    """Of each position in its row, the largest key first; equal keys have one rank, if there may be ties; others -1."""
    key_BL = key_BL.double().masked_fill(~is_ranked_BL, -torch.inf)
    falling_BL, position_BL = key_BL.sort(dim=1, descending=True, stable=True)
    is_next_BL = falling_BL[:, 1:] != falling_BL[:, :-1] if ties else torch.ones_like(is_ranked_BL[:, 1:])
    rank_BL = torch.zeros_like(position_BL).scatter(1, position_BL[:, 1:], is_next_BL.cumsum(1))
    return rank_BL.masked_fill(~is_ranked_BL, -1)


def _has_stopped(z_BL: Tensor, may_stop_BL: Tensor, rule: Rule) -> Tensor:
    """Whether all of a row that is wanted is there, (B,) bool."""
    is_whole_BL = (z_BL == rule.mask_id).cumsum(1) == 0  # up to here
    return ((z_BL == rule.stop_id) & may_stop_BL & is_whole_BL).any(1)
