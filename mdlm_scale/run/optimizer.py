"""The learning rate, a function of the step; which parameters decay; the rules of the optimizer section."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mdlm_scale.config import BlockName, EmaConfig, LrSchedule, OptimizerConfig, outside
from mdlm_scale.model.dit import DiT

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


def undecayed(model: DiT) -> set[str]:
    """Parameters without weight decay: in a modern model norms and biases, in the paper's none."""
    is_modern = model.config.block is BlockName.modern
    return {name for name, p in model.named_parameters() if is_modern and p.dim() < 2}


def groups(params: Mapping[str, Tensor], undecayed: set[str]) -> list[dict[str, Any]]:
    """The optimizer's groups. By name: what an engine holds of a matrix may be flat."""
    with_decay = [p for name, p in params.items() if name not in undecayed]
    without = [p for name, p in params.items() if name in undecayed]
    return [{"params": with_decay}, *([{"params": without, "weight_decay": 0.0}] if without else [])]


def faults(config: OptimizerConfig, ema: EmaConfig) -> list[str]:
    """What is wrong with the optimizer and ema sections."""
    found = outside("optimizer", config, ("lr", "eps", "max_grad_norm"), lambda n: n > 0, "be above 0")
    found += outside("optimizer", config, ("beta1", "beta2"), lambda n: 0 <= n < 1, "lie in [0, 1)")
    found += outside("optimizer", config, ("weight_decay", "warmup_steps"), lambda n: n >= 0, "not be negative")
    if config.schedule is LrSchedule.cosine and (config.cosine_steps or 0) <= config.warmup_steps:
        found.append(
            f"optimizer.cosine_steps={config.cosine_steps} must be above warmup_steps={config.warmup_steps} for the "
            f"cosine schedule: it is the step at which the learning rate stops falling."
        )
    if config.schedule is LrSchedule.constant and config.cosine_steps is not None:
        found.append(f"optimizer.cosine_steps={config.cosine_steps} has no meaning with schedule=constant.")
    return found + outside("ema", ema, ("decay",), lambda n: 0 <= n < 1, "lie in [0, 1)")
