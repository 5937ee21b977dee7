"""The noise schedule: alpha_t = P(a token is still readable at time t), and everything derived from it.

alpha falls from about 1 at t = 0 to about 0 at t = 1; sigma = -log(alpha) is what a time-conditioned network sees.
The bound needs the weight -alpha'/(1 - alpha) (MDLM, equation 10). Each quantity has its own formula, chosen so that
nothing cancels near t = 0, where 1 - alpha is small, nor near t = 1, where alpha is.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, ScheduleName

_SIGMA_RANGE = {ScheduleName.linear: (1e-3, 7.0), ScheduleName.geometric: (1e-4, 20.0)}


@dataclass(frozen=True)
class Schedule:
    name: ScheduleName = ScheduleName.loglinear
    e: float = 1e-3  # alpha at t = 1, for loglinear and the cosines
    sigma_min: float = 0.0  # sigma at t = 0, for linear and geometric
    sigma_max: float = 0.0  # sigma at t = 1, for linear and geometric

    def alpha(self, t: Tensor) -> Tensor:
        """P(readable)."""
        match self.name:
            case ScheduleName.loglinear:
                return (1 - t) + self.e * t
            case ScheduleName.cosine:
                return self.e + (1 - self.e) * _cos_quarter(t)
            case ScheduleName.cosine_squared:
                return self.e + (1 - self.e) * _cos_quarter(t).square()
            case _:
                return torch.exp(-self.sigma(t))

    def mask_prob(self, t: Tensor) -> Tensor:
        """P(masked) = 1 - alpha."""
        match self.name:
            case ScheduleName.loglinear:
                return (1 - self.e) * t
            case ScheduleName.cosine:
                return 2 * (1 - self.e) * torch.sin(math.pi / 4 * t).square()
            case ScheduleName.cosine_squared:
                return (1 - self.e) * torch.sin(math.pi / 2 * t).square()
            case _:
                return -torch.expm1(-self.sigma(t))

    def dalpha(self, t: Tensor) -> Tensor:
        """The derivative of alpha by t."""
        match self.name:
            case ScheduleName.loglinear:
                return torch.full_like(t, self.e - 1)
            case ScheduleName.cosine:
                return -(1 - self.e) * math.pi / 2 * torch.sin(math.pi / 2 * t)
            case ScheduleName.cosine_squared:
                return -(1 - self.e) * math.pi * torch.sin(math.pi / 2 * t) * _cos_quarter(t)
            case _:
                return -self._dsigma(t) * self.alpha(t)

    def sigma(self, t: Tensor) -> Tensor:
        """-log(alpha)."""
        match self.name:
            case ScheduleName.linear:
                return self.sigma_min + t * (self.sigma_max - self.sigma_min)
            case ScheduleName.geometric:
                return torch.exp((1 - t) * math.log(self.sigma_min) + t * math.log(self.sigma_max))
            case _:
                return torch.where(t < 0.5, -torch.log1p(-self.mask_prob(t)), -torch.log(self.alpha(t)))

    def weight(self, t: Tensor) -> Tensor:
        """-alpha'/(1 - alpha): what a masked token's cross entropy counts in the continuous-time bound."""
        match self.name:
            case ScheduleName.loglinear:
                return 1 / t
            case ScheduleName.cosine:
                return math.pi / 2 / torch.tan(math.pi / 4 * t)
            case ScheduleName.cosine_squared:
                return math.pi * _cos_quarter(t) / torch.sin(math.pi / 2 * t)
            case _:
                return self._dsigma(t) / torch.expm1(self.sigma(t))

    def _dsigma(self, t: Tensor) -> Tensor:
        if self.name is ScheduleName.linear:
            return torch.full_like(t, self.sigma_max - self.sigma_min)
        return math.log(self.sigma_max / self.sigma_min) * self.sigma(t)


def from_config(config: DiffusionConfig) -> Schedule:
    low, high = _sigma_range(config)
    return Schedule(config.schedule, config.e, low, high)


def faults(config: DiffusionConfig, time_conditioning: bool) -> list[str]:
    """What is wrong with the diffusion section."""
    found = []
    if not 0 <= config.e < 1:
        found.append(f"diffusion.e={config.e} must lie in [0, 1).")
    if config.e == 0 and time_conditioning and config.schedule not in _SIGMA_RANGE:
        found.append("diffusion.e=0 makes sigma infinite at t = 1; with model.time_conditioning it must be above 0.")
    if not 0 < config.t_min < 1:
        found.append(f"diffusion.t_min={config.t_min} must lie strictly between 0 and 1.")
    if config.num_times is not None and config.num_times < 1:
        found.append(f"diffusion.num_times={config.num_times} must be at least 1; leave it out for continuous time.")
    low, high = _sigma_range(config)
    if config.schedule in _SIGMA_RANGE and not 0 < low < high:
        found.append(f"diffusion.sigma_min={low} and sigma_max={high} must satisfy 0 < sigma_min < sigma_max.")
    return found


def _sigma_range(config: DiffusionConfig) -> tuple[float, float]:
    """The configured ends of sigma, each with its schedule's default."""
    default_low, default_high = _SIGMA_RANGE.get(config.schedule, (0.0, 0.0))
    low = default_low if config.sigma_min is None else config.sigma_min
    high = default_high if config.sigma_max is None else config.sigma_max
    return low, high


def _cos_quarter(t: Tensor) -> Tensor:
    """cos(pi t / 2), without the cancellation that the rounding of pi t / 2 brings near t = 1."""
    return torch.sin(math.pi / 2 * (1 - t))
