"""The learning rate, a function of the step, and the rules of the optimizer section."""

import math

from mdlm_scale.config import EmaConfig, LrSchedule, OptimizerConfig

COSINE_FLOOR = 0.1  # of the peak, reached at `cosine_steps` and kept


def lr_at(config: OptimizerConfig, step: int) -> float:
    """Learning rate of a step: linear from 0 at step 0, then constant, or a half cosine down to a tenth."""
    if step < config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.schedule is LrSchedule.constant:
        return config.lr
    assert config.cosine_steps is not None, "a cosine without its end passed the checks"
    progress = min(1.0, (step - config.warmup_steps) / (config.cosine_steps - config.warmup_steps))
    return config.lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * (1 + math.cos(math.pi * progress)) / 2)


def faults(config: OptimizerConfig, ema: EmaConfig) -> list[str]:
    """What is wrong with the optimizer and ema sections."""
    found = [
        f"optimizer.{name}={getattr(config, name)} must be above 0."
        for name in ("lr", "eps", "max_grad_norm")
        if not getattr(config, name) > 0
    ]
    found += [
        f"optimizer.{name}={getattr(config, name)} must lie in [0, 1)."
        for name in ("beta1", "beta2")
        if not 0 <= getattr(config, name) < 1
    ]
    found += [
        f"optimizer.{name}={getattr(config, name)} must not be negative."
        for name in ("weight_decay", "warmup_steps")
        if not getattr(config, name) >= 0
    ]
    if config.schedule is LrSchedule.cosine and (config.cosine_steps or 0) <= config.warmup_steps:
        found.append(
            f"optimizer.cosine_steps={config.cosine_steps} must be above warmup_steps={config.warmup_steps} for the "
            f"cosine schedule: it is the step at which the learning rate stops falling."
        )
    if config.schedule is LrSchedule.constant and config.cosine_steps is not None:
        found.append(f"optimizer.cosine_steps={config.cosine_steps} has no meaning with schedule=constant.")
    if not 0 <= ema.decay < 1:
        found.append(f"ema.decay={ema.decay} must lie in [0, 1).")
    return found
