"""Whether a step may change the weights: its loss and its gradient norm must be finite, its loss no spike.

A refused step is skipped and written down. Too many in a row, and the run returns to its last checkpoint, to pass by
these steps; when that has not helped, it ends before anything is spoilt.
"""

import math
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from mdlm_scale.config import GuardConfig, outside
from mdlm_scale.errors import TrainingError
from mdlm_scale.parallel.engine import Update
from mdlm_scale.run.step import Report

WINDOW, LEAST = 128, 16  # losses that a new one is compared with: at most, and at least
NORMAL = 1.4826  # standard deviations of a normal distribution in a median absolute deviation
FLOOR = 0.01  # of the median: a deviation is at least that


@dataclass
class Guard:
    config: GuardConfig
    losses: list[float] = field(default_factory=list)  # of the last applied steps: never a bad one
    refused: list[int] = field(default_factory=list)  # steps in a row
    rewinds: int = 0

    def judge(self, report: Report) -> bool:
        """The loss, which is a sum over all ranks: every rank judges the same number."""
        return math.isfinite(report.loss) and report.loss <= self.highest()

    def judge_norm(self, loss_is_fine: bool, grad_norm: float) -> bool:
        return loss_is_fine and math.isfinite(grad_norm)

    def highest(self) -> float:
        """The highest loss that is no spike."""
        if self.config.spike is None or len(self.losses) < LEAST:
            return math.inf
        median = statistics.median(self.losses)
        deviation = NORMAL * statistics.median(abs(loss - median) for loss in self.losses)
        return median + self.config.spike * max(deviation, FLOOR * abs(median))

    def settle(self, step: int, report: Report, update: Update, last: Path | None) -> bool:
        """Count the refusals; whether it is time to rewind. A TrainingError when that is used up as well."""
        if update.applied:
            self.losses = [*self.losses, report.loss][-WINDOW:]
            self.refused = []
            return False
        highest = self.highest()
        self.refused.append(step)
        if len(self.refused) <= self.config.max_skips:
            return False
        if self.rewinds < self.config.max_rewinds:
            return True
        limit = "both must be finite" if highest == math.inf else f"the loss must be finite and at most {highest:.4f}"
        raise TrainingError(
            f"Step {step} has loss {report.loss} and gradient norm {update.grad_norm}; {limit}. It is one of "
            f"{len(self.refused)} such steps in a row (guard.max_skips={self.config.max_skips}), after "
            f"{self.rewinds} of {self.config.max_rewinds} rewinds (guard.max_rewinds). The run stops before the "
            f"update. Last complete checkpoint: {last or 'none yet'}."
        )

    def rewound(self, losses: list[float]) -> None:
        self.losses, self.refused, self.rewinds = losses, [], self.rewinds + 1


def faults(config: GuardConfig) -> list[str]:
    found = outside("guard", config, ("max_skips", "max_rewinds"), lambda n: n >= 0, "not be negative")
    if config.spike is not None and not config.spike > 0:
        found.append(f"guard.spike={config.spike} must be above 0, or null for no limit.")
    return found
