"""The bound: the weights are those of the KL divergences they stand for, and all schedules give the same integral."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, LossWeight, ScheduleName
from mdlm_scale.diffusion import objective
from mdlm_scale.diffusion.posterior import posterior_probs, subs_log_probs
from mdlm_scale.diffusion.schedule import Schedule, from_config

V, MASK_ID = 4, 1
X_L = torch.tensor([0, 3])  # a sequence of two tokens, small enough to enumerate all of its corruptions
IS_MASKED_KL = torch.tensor(list(itertools.product([False, True], repeat=2)))  # K = 4 of them
Z_KL = torch.where(IS_MASKED_KL, MASK_ID, X_L)
EPS = torch.finfo(torch.float64).eps
ENDS = {ScheduleName.linear: 1e-3, ScheduleName.geometric: 1e-4}  # sigma at t = 0, where it is not 0
every_schedule = pytest.mark.parametrize(
    "schedule", [from_config(DiffusionConfig(schedule=name)) for name in ScheduleName], ids=lambda s: s.name
)
every_network = pytest.mark.parametrize("reads_z", [False, True], ids=["constant", "reads z"])


def network(reads_z: bool) -> Tensor:
    """log p(x | z) for each corruption z, (K, L, V); a fixed function that reads z or does not."""
    seen_KL1 = (Z_KL * torch.tensor([5, 3])).sum(1)[:, None, None] if reads_z else torch.zeros(4, 1, 1)
    logits_KLV = 2 * torch.sin(1 + seen_KL1 + torch.arange(2)[:, None] * 1.7 + torch.arange(V, dtype=torch.float64))
    return subs_log_probs(logits_KLV.expand(4, 2, V), Z_KL, mask_id=MASK_ID)


def probs_of_z(schedule: Schedule, t_T: Tensor) -> Tensor:
    """q(z_t | x) of each corruption at each time, (T, K)."""
    alpha_T11, mask_prob_T11 = schedule.alpha(t_T)[:, None, None], schedule.mask_prob(t_T)[:, None, None]
    return torch.where(IS_MASKED_KL, mask_prob_T11, alpha_T11).prod(2)


def weighted_cross_entropy(schedule: Schedule, t_T: Tensor, weight_T: Tensor, log_probs_KLV: Tensor) -> Tensor:
    """The exact expectation of the bound's integrand over z_t, at each time, (T,)."""
    nll_K = objective.nll(log_probs_KLV, X_L.expand(4, 2), torch.ones(4, dtype=torch.float64)).sum(1)
    return weight_T * (probs_of_z(schedule, t_T) @ nll_K)


def discrete_bound(schedule: Schedule, num_times: int, log_probs_KLV: Tensor) -> float:
    t_T = torch.arange(1, num_times + 1, dtype=torch.float64) / num_times
    weight_T = objective.weight(schedule, t_T, num_times=num_times)
    return weighted_cross_entropy(schedule, t_T, weight_T, log_probs_KLV).mean().item()


def continuous_bound(schedule: Schedule, log_probs_KLV: Tensor) -> float:
    t_T, share_T = gauss_legendre(0.0, 1.0)
    weight_T = objective.weight(schedule, t_T, num_times=None)
    return (weighted_cross_entropy(schedule, t_T, weight_T, log_probs_KLV) @ share_T).item()


def gauss_legendre(low: float, high: float) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a quadrature over [low, high] that is exact to rounding for the smooth integrands here."""
    nodes, shares = np.polynomial.legendre.leggauss(200)
    return torch.from_numpy(low + (high - low) * (nodes + 1) / 2), torch.from_numpy(shares * (high - low) / 2)


# --- the weights


@every_schedule
@every_network
@pytest.mark.parametrize("num_times", [1, 2, 10])
def test_the_discrete_bound_is_the_sum_of_the_kl_divergences(schedule: Schedule, reads_z: bool, num_times: int) -> None:
    log_probs_KLV = network(reads_z)
    x_KLV = torch.eye(V, dtype=torch.float64)[X_L.expand(4, 2)]
    total = 0.0
    for i in range(1, num_times + 1):
        s_1, t_1 = torch.tensor([[i - 1], [i]], dtype=torch.float64) / num_times
        mask_probs = schedule.mask_prob(s_1).expand(4), schedule.mask_prob(t_1).expand(4)
        q_KLV = posterior_probs(Z_KL, x_KLV, *mask_probs, mask_id=MASK_ID)
        p_KLV = posterior_probs(Z_KL, log_probs_KLV.exp(), *mask_probs, mask_id=MASK_ID)
        kl_K = torch.where(q_KLV > 0, q_KLV * (q_KLV / p_KLV).log(), 0.0).sum((1, 2))
        total += (probs_of_z(schedule, t_1)[0] @ kl_K).item()
    # a sum of at most 80 terms of size 1, each a few roundings
    assert discrete_bound(schedule, num_times, log_probs_KLV) == pytest.approx(total, rel=1e-12, abs=0)


@every_schedule
def test_the_discrete_bound_tends_to_the_continuous_one(schedule: Schedule) -> None:
    log_probs_KLV = network(reads_z=True)
    limit = continuous_bound(schedule, log_probs_KLV)
    errors = [discrete_bound(schedule, num_times, log_probs_KLV) - limit for num_times in (2000, 4000)]
    # an error c/T + d/T^2 halves up to O(1/T); geometric's sigma grows e^12-fold, so its d/c may be some 10
    assert errors[0] / errors[1] == pytest.approx(2, rel=1e-2, abs=0)


@every_schedule
@pytest.mark.parametrize("num_times", [1, 10, 1000])
def test_every_discrete_bound_of_a_constant_network_is_the_continuous_one(schedule: Schedule, num_times: int) -> None:
    log_probs_KLV = network(reads_z=False)
    # the sum telescopes; it has up to 1000 differences of mask_prob, each rounded at 1e-16
    assert discrete_bound(schedule, num_times, log_probs_KLV) == pytest.approx(
        continuous_bound(schedule, log_probs_KLV), rel=1e-12, abs=0
    )


@every_schedule
@pytest.mark.parametrize("num_times", [1, 10, 1000, 10**6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_first_discrete_weight_is_finite(schedule: Schedule, num_times: int, dtype: torch.dtype) -> None:
    assert objective.weight(schedule, torch.tensor(1 / num_times, dtype=dtype), num_times=num_times).isfinite()


@pytest.mark.parametrize("num_times", [1, 2, 10, 1000])
def test_the_discrete_weight_of_loglinear_is_one_over_t(num_times: int) -> None:
    t = torch.arange(1, num_times + 1, dtype=torch.float64) / num_times
    # a difference of 1/T between numbers that are rounded at up to EPS
    torch.testing.assert_close(
        objective.weight(Schedule(), t, num_times=num_times), 1 / t, rtol=2 * num_times * EPS, atol=0
    )


@pytest.mark.parametrize("num_times", [1, 3, 10, 49, 1000])
def test_previous_steps_down_the_grid_to_exactly_0(num_times: int) -> None:
    t = torch.arange(1, num_times + 1, dtype=torch.float64) / num_times
    assert objective.previous(t, num_times).tolist() == [0.0, *t[:-1].tolist()]


@every_schedule
def test_every_schedule_gives_the_same_integral(schedule: Schedule) -> None:
    t_T, share_T = gauss_legendre(_time_of(schedule, 0.9), _time_of(schedule, 0.05))
    mask_prob_T = schedule.mask_prob(t_T)
    cross_entropy_T = mask_prob_T * (0.5 + mask_prob_T.exp())  # smooth, and 0 where nothing is masked
    integral = (objective.weight(schedule, t_T, num_times=None) * cross_entropy_T @ share_T).item()
    # with p = mask_prob the integral is that of 0.5 + exp(p), p from 0.1 to 0.95; 1e-10 is ample for 200 rounded terms
    assert integral == pytest.approx(0.5 * 0.85 + math.exp(0.95) - math.exp(0.1), rel=1e-10, abs=0)


@every_schedule
@pytest.mark.parametrize("num_times", [None, 10])
def test_flat_weights_are_one(schedule: Schedule, num_times: int | None) -> None:
    t_B = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)
    assert objective.weight(schedule, t_B, num_times=num_times, kind=LossWeight.flat).tolist() == [1.0, 1.0, 1.0]


# --- the sums


def test_nelbo_sum_is_the_formula_over_the_masked_real_tokens() -> None:
    logits = [[[0.5, 9.0, -1.0, 2.0], [1.0, 9.0, 0.0, 0.3]], [[-2.0, 9.0, 0.1, 0.2], [0.7, 9.0, 0.6, 0.4]]]
    x_BL, z_BL = torch.tensor([[0, 3], [2, 3]]), torch.tensor([[MASK_ID, 3], [MASK_ID, MASK_ID]])
    is_token_BL = torch.tensor([[True, True], [True, False]])  # the last is masked padding
    log_probs_BLV = subs_log_probs(torch.tensor(logits, dtype=torch.float64), z_BL, mask_id=MASK_ID)
    weight_B = torch.tensor([1.5, 4.0], dtype=torch.float64)
    first = math.log(math.exp(0.5) + math.exp(-1.0) + math.exp(2.0)) - 0.5
    second = math.log(math.exp(-2.0) + math.exp(0.1) + math.exp(0.2)) - 0.1
    # a handful of roundings
    assert objective.nelbo_sum(log_probs_BLV, x_BL, is_token_BL, weight_B).item() == pytest.approx(
        1.5 * first + 4.0 * second, rel=1e-14
    )


def test_readable_tokens_cost_nothing() -> None:
    nll_KL = objective.nll(network(True), X_L.expand(4, 2), torch.full((4,), 3.0, dtype=torch.float64))
    assert (nll_KL[~IS_MASKED_KL] == 0).all()


# --- the ends


@pytest.mark.parametrize("vocab_size", [5, 50258])
@pytest.mark.parametrize("name", list(ScheduleName))
def test_the_prior_is_the_kl_divergence_at_time_one(name: ScheduleName, vocab_size: int) -> None:
    schedule = from_config(DiffusionConfig(schedule=name))
    alpha_1 = schedule.alpha(torch.ones(1, dtype=torch.float64)).item()
    q_V = torch.zeros(vocab_size, dtype=torch.float64)
    p_V = torch.full((vocab_size,), alpha_1 / (vocab_size - 1), dtype=torch.float64)
    q_V[0], q_V[MASK_ID], p_V[MASK_ID] = alpha_1, 1 - alpha_1, 1 - alpha_1
    kl = torch.where(q_V > 0, q_V * (q_V / p_V).log(), 0.0).sum().item()
    assert objective.prior(schedule, vocab_size) == pytest.approx(kl, rel=1e-14, abs=0)  # a handful of roundings


def test_no_prior_where_nothing_stays_readable() -> None:
    assert objective.prior(Schedule(e=0.0), 5) == 0


@pytest.mark.parametrize("name", list(ScheduleName))
def test_only_linear_and_geometric_mask_at_time_zero(name: ScheduleName) -> None:
    expected = 1 - math.exp(-ENDS[name]) if name in ENDS else 0
    # 1 - exp(-1e-4) loses 4 digits; where nothing is masked the answer is exactly 0
    assert objective.reconstruction_weight(from_config(DiffusionConfig(schedule=name))) == pytest.approx(
        expected, rel=1e-11, abs=0
    )


@every_schedule
@pytest.mark.parametrize("num_times", [1, 10, None])
def test_the_three_parts_count_every_token_once(schedule: Schedule, num_times: int | None) -> None:
    t_T, share_T = gauss_legendre(0.0, 1.0)
    if num_times is not None:
        t_T = torch.arange(1, num_times + 1, dtype=torch.float64) / num_times
        share_T = torch.ones_like(t_T) / num_times
    diffusion = (objective.weight(schedule, t_T, num_times=num_times) * schedule.mask_prob(t_T) @ share_T).item()
    prior = objective.prior(schedule, V) / math.log(V - 1)
    # sums of up to 200 rounded terms, and of shares that are rounded themselves
    assert diffusion + objective.reconstruction_weight(schedule) + prior == pytest.approx(1, rel=1e-13, abs=0)


def _time_of(schedule: Schedule, alpha: float) -> float:
    """The time at which `alpha` is what stays readable, by bisection to the last bit."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if schedule.alpha(torch.tensor(middle, dtype=torch.float64)).item() > alpha:
            low = middle
        else:
            high = middle
    return low
