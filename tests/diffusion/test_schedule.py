"""The schedules: their quantities fit together, are exact at both ends of time, and bad settings are refused."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, ScheduleName
from mdlm_scale.diffusion.schedule import Schedule, faults, from_config

DEFAULTS = [from_config(DiffusionConfig(schedule=name)) for name in ScheduleName]
BARE = [Schedule(name, e=0.0) for name in (ScheduleName.loglinear, ScheduleName.cosine, ScheduleName.cosine_squared)]
NEAR_0_AND_1 = [1e-6, 1e-5, 1e-3, 0.1, 0.4999, 0.5, 0.9, 1 - 1e-3, 1 - 1e-5, 1 - 1e-6, 1.0]
every_schedule = pytest.mark.parametrize("schedule", DEFAULTS + BARE, ids=lambda s: f"{s.name}-{s.e:g}")


def grid(*, requires_grad: bool = False) -> Tensor:
    return torch.linspace(1e-3, 1 - 1e-3, 999, dtype=torch.float64, requires_grad=requires_grad)


@every_schedule
def test_a_token_is_readable_or_masked(schedule: Schedule) -> None:
    t = grid()
    # alpha and mask_prob come from formulas of their own: each is off by a few roundings of numbers up to 1
    torch.testing.assert_close(schedule.alpha(t) + schedule.mask_prob(t), torch.ones_like(t), rtol=0, atol=1e-15)


@every_schedule
def test_sigma_is_minus_log_alpha(schedule: Schedule) -> None:
    t = grid()
    # the rounding of alpha near 1 is an absolute error of its logarithm; 20 roundings of sigma = 20 relative to it
    torch.testing.assert_close(schedule.sigma(t), -schedule.alpha(t).log(), rtol=1e-14, atol=1e-15)


@every_schedule
def test_dalpha_is_the_derivative_of_alpha(schedule: Schedule) -> None:
    t = grid(requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    # both are products of a handful of rounded factors, exp(-sigma) with sigma up to 20 among them
    torch.testing.assert_close(schedule.dalpha(t), slope.detach(), rtol=1e-13, atol=0)


@every_schedule
def test_weight_is_minus_dalpha_over_mask_prob(schedule: Schedule) -> None:
    t = grid()
    # as above: a handful of roundings, enlarged up to 20 times by exp(-sigma)
    torch.testing.assert_close(schedule.weight(t), -schedule.dalpha(t) / schedule.mask_prob(t), rtol=1e-13, atol=0)


@every_schedule
@pytest.mark.parametrize("quantity", ["alpha", "mask_prob", "sigma", "weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exact_at_both_ends_of_time(schedule: Schedule, quantity: str, dtype: torch.dtype) -> None:
    t = torch.tensor(NEAR_0_AND_1, dtype=dtype)
    got = getattr(schedule, quantity)(t).double().tolist()
    eps = torch.finfo(dtype).eps
    with mpmath.workdps(50):
        wrong = [
            (time, value, float(exact))
            for time, value in zip(t.tolist(), got, strict=True)
            for exact in [_exact(schedule, quantity, mpmath.mpf(time))]  # the reference at the very t of this dtype
            # 1e-20: what the reference's numerical derivative leaves where the true weight is 0
            if value != exact and not abs(value - exact) <= eps * _roundings(schedule, quantity, time) * exact + 1e-20
        ]
    assert not wrong


def test_the_weight_of_loglinear_is_exactly_one_over_t() -> None:
    t = grid()
    assert torch.equal(Schedule(ScheduleName.loglinear).weight(t), 1 / t)


def test_loglinear_without_e_is_one_minus_t() -> None:
    t = grid()
    assert torch.equal(Schedule(ScheduleName.loglinear, e=0.0).alpha(t), 1 - t)


@pytest.mark.parametrize("name", [ScheduleName.loglinear, ScheduleName.cosine, ScheduleName.cosine_squared])
def test_e_is_what_stays_readable_at_the_end(name: ScheduleName) -> None:
    alpha_1 = from_config(DiffusionConfig(schedule=name, e=0.25)).alpha(torch.ones(1, dtype=torch.float64))
    assert alpha_1.item() == 0.25  # exact: the other term is 0


@pytest.mark.parametrize(
    ("config", "ends"),
    [
        (DiffusionConfig(schedule=ScheduleName.linear), (1e-3, 7.0)),
        (DiffusionConfig(schedule=ScheduleName.geometric), (1e-4, 20.0)),
        (DiffusionConfig(schedule=ScheduleName.linear, sigma_min=0.5, sigma_max=3.0), (0.5, 3.0)),
        (DiffusionConfig(schedule=ScheduleName.geometric, sigma_max=3.0), (1e-4, 3.0)),
    ],
    ids=["linear", "geometric", "linear-given", "geometric-half-given"],
)
def test_sigma_runs_between_its_configured_ends(config: DiffusionConfig, ends: tuple[float, float]) -> None:
    sigma = from_config(config).sigma(torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert sigma.tolist() == pytest.approx(ends, rel=1e-14, abs=0)  # geometric: exp of a rounded logarithm of size 9


@pytest.mark.parametrize("name", list(ScheduleName))
def test_the_default_settings_have_no_fault(name: ScheduleName) -> None:
    assert faults(DiffusionConfig(schedule=name), time_conditioning=True) == []


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (DiffusionConfig(e=-1e-3), "diffusion.e="),
        (DiffusionConfig(e=1.0), "diffusion.e="),
        (DiffusionConfig(e=math.nan), "diffusion.e="),
        (DiffusionConfig(e=0.0), "model.time_conditioning"),
        (DiffusionConfig(schedule=ScheduleName.cosine, e=0.0), "model.time_conditioning"),
        (DiffusionConfig(t_min=0.0), "diffusion.t_min="),
        (DiffusionConfig(t_min=1.0), "diffusion.t_min="),
        (DiffusionConfig(num_times=0), "diffusion.num_times="),
        (DiffusionConfig(schedule=ScheduleName.linear, sigma_min=7.0), "diffusion.sigma_min="),
        (DiffusionConfig(schedule=ScheduleName.geometric, sigma_min=0.0), "diffusion.sigma_min="),
        (DiffusionConfig(schedule=ScheduleName.geometric, sigma_max=1e-5), "diffusion.sigma_min="),
    ],
)
def test_a_bad_setting_is_the_one_fault(config: DiffusionConfig, key: str) -> None:
    found = faults(config, time_conditioning=True)
    assert len(found) == 1
    assert key in found[0]


@pytest.mark.parametrize(
    "config",
    [DiffusionConfig(e=0.0), DiffusionConfig(num_times=1), DiffusionConfig(sigma_min=9.0, sigma_max=1.0)],
    ids=["e is 0 without time conditioning", "one step", "sigma range of a schedule that has none"],
)
def test_an_unusual_but_sound_setting_is_no_fault(config: DiffusionConfig) -> None:
    assert faults(config, time_conditioning=False) == []


def test_e_of_a_schedule_that_does_not_use_it_may_be_0_with_time_conditioning() -> None:
    assert faults(DiffusionConfig(schedule=ScheduleName.linear, e=0.0), time_conditioning=True) == []


def test_all_faults_are_reported_at_once() -> None:
    config = DiffusionConfig(ScheduleName.linear, e=2.0, sigma_min=3.0, sigma_max=2.0, num_times=-1, t_min=5.0)
    assert len(faults(config, time_conditioning=True)) == 4


def _exact(schedule: Schedule, quantity: str, t: mpmath.mpf) -> mpmath.mpf:
    """The quantity to 50 digits, from the table of sigma(t) and the definitions alone."""
    match quantity:
        case "alpha":
            return _exact_alpha(schedule, t)
        case "mask_prob":
            return 1 - _exact_alpha(schedule, t)
        case "sigma":
            alpha_t = _exact_alpha(schedule, t)
            return -mpmath.log(alpha_t) if alpha_t > 1e-40 else mpmath.inf
        case _:
            return -mpmath.diff(lambda t: _exact_alpha(schedule, t), t) / (1 - _exact_alpha(schedule, t))


def _exact_alpha(schedule: Schedule, t: mpmath.mpf) -> mpmath.mpf:
    e, low, high = mpmath.mpf(schedule.e), mpmath.mpf(schedule.sigma_min), mpmath.mpf(schedule.sigma_max)
    match schedule.name:
        case ScheduleName.loglinear:
            return 1 - (1 - e) * t
        case ScheduleName.cosine:
            return e + (1 - e) * mpmath.cos(mpmath.pi * t / 2)
        case ScheduleName.cosine_squared:
            return e + (1 - e) * mpmath.cos(mpmath.pi * t / 2) ** 2
        case ScheduleName.linear:
            return mpmath.exp(-(low + t * (high - low)))
        case _:
            return mpmath.exp(-(low ** (1 - t) * high**t))


def _roundings(schedule: Schedule, quantity: str, t: float) -> float:
    """How many relative errors of one eps may add up.

    A handful anywhere. Geometric's sigma is the exponential of a sum of rounded terms of size 9.2. And exp(-sigma)
    turns a relative error of sigma into one that is sigma times as large.
    """
    in_sigma = 10.0 if schedule.name is ScheduleName.geometric else 1.0
    sigma = schedule.sigma(torch.tensor(t, dtype=torch.float64)).item() if schedule.sigma_max else 0.0
    amplified = sigma if quantity in ("alpha", "weight") else 0.0
    return 4 + in_sigma * (1 + amplified)
