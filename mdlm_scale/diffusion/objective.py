"""The bound that is trained: -log p(x) <= NELBO, a weighted cross entropy of the masked tokens.

Continuous time (MDLM, equation 10): E_t [ weight(t) * sum over masked tokens of -log p(x | z_t) ]. Discrete time with
T steps (equation 8): the same with the weight T * (alpha_s - alpha_t) / (1 - alpha_t), s = t - 1/T. Losses are sums of
weighted nats; one division by the number of real tokens gives the mean. Published figures are this term alone: `prior`
and `reconstruction` complete the bound and are reported apart.
"""

import math

import torch
from torch import Tensor

from mdlm_scale.config import LossWeight
from mdlm_scale.diffusion.schedule import Schedule


def weight(schedule: Schedule, t: Tensor, *, num_times: int | None, kind: LossWeight = LossWeight.elbo) -> Tensor:
    """What the cross entropy of a token masked at time t counts; `num_times` is T, None for continuous time."""
    if kind is LossWeight.flat:
        return torch.ones_like(t)
    if num_times is None:
        return schedule.weight(t)
    # differences of mask_prob, not of alpha: at t = 1/T the latter would be a difference of numbers close to 1
    mask_prob_t, mask_prob_s = schedule.mask_prob(t), schedule.mask_prob(previous(t, num_times))
    return num_times * (mask_prob_t - mask_prob_s) / mask_prob_t


def previous(t: Tensor, num_times: int) -> Tensor:
    """s = t - 1/T on the grid of multiples of 1/T, exactly 0 before the first."""
    return (torch.round(t * num_times) - 1) / num_times


def nll(log_probs_BLV: Tensor, x_BL: Tensor, weight_B: Tensor) -> Tensor:
    """The bound per token, (B, L): with SUBS log-probabilities a readable token costs nothing."""
    return -weight_B[:, None] * log_probs_BLV.gather(-1, x_BL[..., None]).squeeze(-1)


def nelbo_sum(log_probs_BLV: Tensor, x_BL: Tensor, is_token_BL: Tensor, weight_B: Tensor) -> Tensor:
    """The bound summed over the real tokens. Training computes the same number in `model/head`, on masked rows only."""
    return nll(log_probs_BLV, x_BL, weight_B)[is_token_BL].sum()


def prior(schedule: Schedule, vocab_size: int) -> float:
    """KL(q(z_1 | x) || p(z_1)) in nats a token, p(z_1) being the mask, or with probability alpha_1 any token."""
    alpha_1 = float(schedule.alpha(torch.ones((), dtype=torch.float64)))
    return alpha_1 * math.log(vocab_size - 1)


def reconstruction_weight(schedule: Schedule) -> float:
    """1 - alpha_0: the share of tokens masked already at t = 0, whose cross entropy there completes the bound."""
    return float(schedule.mask_prob(torch.zeros((), dtype=torch.float64)))
