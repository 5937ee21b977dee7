"""Samplers: from masks to text, over any network given as a function.

`logits(z_BL, t_B, rows_M) -> logits_MV` scores the given rows of the flattened batch. When a position is unmasked
depends neither on what it becomes nor on the network, so that is decided first, for all positions: a row then passes
through the network only when one of its tokens is drawn, and through its head only there. That is the law of the plain
loop over all steps, with less work and nothing to cache. Each position is drawn once, by numbers that are functions of
(seed, sample number, position): a sample does not depend on the others in its batch. Draws are float64, because in
float32 the tail of a large vocabulary is cut off.
B samples, N positions, L of them in a window, M rows about to be drawn, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from mdlm_scale.diffusion.noise import uniforms
from mdlm_scale.diffusion.schedule import Schedule

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]
CHUNK_ROWS = 512  # whose distribution over V is in memory in float64


class Order(StrEnum):
    """ancestral      T steps of p(z_s | z_t): what is unmasked in one step is drawn independently
    first-hitting  each position at its own moment of continuous time (arXiv 2409.02908): T without end
    confidence     in T steps, those first whose drawn token is most probable: not the model's law
    """

    ancestral = "ancestral"
    first_hitting = "first-hitting"
    confidence = "confidence"


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
        found = ["order by confidence"] if self.order is Order.confidence else []
        found += [f"temperature {self.temperature:g}"] if self.temperature != 1 else []
        return found + ([f"top-p {self.top_p:g}"] if self.top_p != 1 else [])


def generate(
    logits: Logits, schedule: Schedule, rule: Rule, z_BN: Tensor, sample_B: Tensor, *, width: int, stride: int
) -> tuple[Tensor, Tensor]:
    """`z_BN` with its masks filled, and how many tokens of each are wanted; what was no mask stays as it is.

    More than `width` positions are filled by windows, each `stride` further on, with what it shares with the one before
    as its beginning. The wanted part of a sample is the same with and without a `stop_id`: what follows is left masked
    only if nothing before it is masked. A row's first token and a window's last may be the frame of training's rows:
    there a `stop_id` does not count.
    """
    z_BN, num_positions = z_BN.clone(), z_BN.shape[1]
    starts = [*range(0, num_positions - width, stride), max(0, num_positions - width)]
    may_stop_BN = z_BN == rule.mask_id
    may_stop_BN[:, [0, *(start + width - 1 for start in starts[:-1])]] = False
    u_when_BN, u_which_BN = (uniforms(rule.seed, name, 0, sample_B, num_positions) for name in ("unmask", "token"))
    for start in starts:
        here = slice(start, start + width)
        going_A = torch.nonzero(~_has_stopped(z_BN, may_stop_BN, rule)).squeeze(1)
        window = (z_BN[going_A, here], may_stop_BN[going_A, here], u_which_BN[going_A, here])
        if rule.order is Order.confidence:
            z_BN[going_A, here] = _by_confidence(logits, rule, *window)
        else:
            step_BL, time_BL = moments(schedule, rule, u_when_BN[going_A, here])
            z_BN[going_A, here] = _at_moments(logits, rule, *window, step_BL, time_BL)
    is_end_BN = (z_BN == rule.stop_id) & may_stop_BN
    return z_BN, torch.where(is_end_BN.any(1), is_end_BN.int().argmax(1) + 1, num_positions)


def moments(schedule: Schedule, rule: Rule, u_BL: Tensor) -> tuple[Tensor, Tensor]:
    """When each position is unmasked if it is masked at t = 1: a number that falls as time does, and t itself.

    P(masked at t | masked at 1) = mask_prob(t) / mask_prob(1), so a uniform number `u` says it. In steps from t to s it
    is the step in which that moment lies. The last step takes all that is left, also if masks are left at t = 0.
    """
    edges = torch.arange(1, rule.num_steps + 1, dtype=torch.float64, device=u_BL.device) / rule.num_steps
    mask_prob_1 = schedule.mask_prob(torch.ones_like(edges[:1]))
    if rule.order is Order.first_hitting:
        return u_BL, schedule.time(u_BL * mask_prob_1)
    step_BL = torch.searchsorted(schedule.mask_prob(edges[:-1]) / mask_prob_1, u_BL, right=True)
    return step_BL, edges[step_BL]


def draw(logits_MV: Tensor, u_M: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """A token for each row by inverting its distribution function at `u_M`, and what probability the network gave it
    before temperature and top-p. Never the mask, never padding."""
    parts = [_draw(*part, rule) for part in zip(logits_MV.split(CHUNK_ROWS), u_M.split(CHUNK_ROWS), strict=True)]
    return torch.cat([token_M for token_M, _ in parts]), torch.cat([p_M for _, p_M in parts])


def _draw(logits_MV: Tensor, u_M: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    logits_MV = logits_MV[:, : rule.vocab_size].double()
    logits_MV = logits_MV.index_fill(1, torch.tensor(rule.mask_id, device=u_M.device), -torch.inf)
    p_MV = law_MV = torch.softmax(logits_MV, dim=1)
    if rule.temperature not in (0, 1):
        law_MV = torch.softmax(logits_MV / rule.temperature, dim=1)
    if rule.top_p < 1:
        falling_MV, token_MV = law_MV.sort(dim=1, descending=True)
        is_tail_MV = falling_MV.cumsum(1) - falling_MV >= rule.top_p
        law_MV = law_MV.scatter(1, token_MV, falling_MV.masked_fill(is_tail_MV, 0.0))
    cdf_MV = law_MV.cumsum(dim=1)
    total_M = cdf_MV[:, -1]
    # below the total, or the search would run past the last token that has any probability
    point_M = torch.minimum(u_M * total_M, torch.nextafter(total_M, torch.zeros_like(total_M)))
    token_M = torch.searchsorted(cdf_MV, point_M[:, None], right=True).squeeze(1)
    if rule.temperature == 0:
        token_M = logits_MV.argmax(dim=1)
    return token_M, p_MV.gather(1, token_M[:, None]).squeeze(1)


def _at_moments(
    logits: Logits, rule: Rule, z_BL: Tensor, may_stop_BL: Tensor, u_BL: Tensor, step_BL: Tensor, time_BL: Tensor
) -> Tensor:
    """Each row at its own moments: its n-th is computed together with the n-th of the others."""
    is_masked_BL = z_BL == rule.mask_id
    falling_BL, position_BL = step_BL.double().masked_fill(~is_masked_BL, -torch.inf).sort(dim=1, descending=True)
    is_later_BL = falling_BL[:, 1:] != falling_BL[:, :-1]
    rank_BL = torch.zeros_like(z_BL).scatter(1, position_BL[:, 1:], is_later_BL.cumsum(1))
    round_BL = rank_BL.masked_fill(~is_masked_BL, -1)
    for number in range(int(round_BL.max()) + 1 if len(z_BL) else 0):
        is_drawn_BL = (round_BL == number) & ~_has_stopped(z_BL, may_stop_BL, rule)[:, None]
        if is_drawn_BL.any():
            t_B = time_BL.masked_fill(~is_drawn_BL, 0.0).amax(1)
            z_BL[is_drawn_BL] = draw(_ask(logits, z_BL, t_B, is_drawn_BL), u_BL[is_drawn_BL], rule)[0]
    return z_BL


def _by_confidence(logits: Logits, rule: Rule, z_BL: Tensor, may_stop_BL: Tensor, u_BL: Tensor) -> Tensor:
    """All masked tokens are drawn in each step, and equally many of the most probable ones stay."""
    masks_B = (z_BL == rule.mask_id).sum(1)
    for step in range(rule.num_steps):
        count_B = masks_B * (step + 1) // rule.num_steps - masks_B * step // rule.num_steps
        count_B = count_B.masked_fill(_has_stopped(z_BL, may_stop_BL, rule), 0)
        is_asked_BL = (z_BL == rule.mask_id) & (count_B > 0)[:, None]
        if is_asked_BL.any():
            t_B = torch.full(masks_B.shape, 1 - step / rule.num_steps, dtype=torch.float64, device=z_BL.device)
            token_M, p_M = draw(_ask(logits, z_BL, t_B, is_asked_BL), u_BL[is_asked_BL], rule)
            sure_BL = torch.full_like(u_BL, -1.0).masked_scatter(is_asked_BL, p_M)
            order_BL = torch.argsort(sure_BL, dim=1, descending=True, stable=True)
            is_first_BL = torch.arange(z_BL.shape[1], device=z_BL.device) < count_B[:, None]
            is_kept_BL = torch.zeros_like(is_asked_BL).scatter(1, order_BL, is_first_BL)
            z_BL = torch.where(is_kept_BL, z_BL.masked_scatter(is_asked_BL, token_M), z_BL)
    return z_BL


def _ask(logits: Logits, z_BL: Tensor, t_B: Tensor, is_asked_BL: Tensor) -> Tensor:
    """Logits at these positions, row by row; a row without any is not computed."""
    active_A = torch.nonzero(is_asked_BL.any(1)).squeeze(1)
    return logits(z_BL[active_A], t_B[active_A], torch.nonzero(is_asked_BL[active_A].flatten()).squeeze(1))


def _has_stopped(z_BL: Tensor, may_stop_BL: Tensor, rule: Rule) -> Tensor:
    """Whether all of a row that is wanted is there, (B,) bool."""
    is_whole_BL = (z_BL == rule.mask_id).cumsum(1) == 0  # up to here
    return ((z_BL == rule.stop_id) & may_stop_BL & is_whole_BL).any(1)
