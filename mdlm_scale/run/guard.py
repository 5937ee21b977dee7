"""Whether a step may change the weights: its loss and its gradient norm must be finite.

A refused step is skipped and written down; too many in a row end the run before anything is spoilt.
"""

import math
from dataclasses import dataclass

from mdlm_scale.config import GuardConfig
from mdlm_scale.errors import TrainingError
from mdlm_scale.parallel.engine import Update
from mdlm_scale.run.step import Report


@dataclass
class Guard:
    config: GuardConfig
    skips_in_a_row: int = 0

    def judge(self, report: Report) -> bool:
        """The loss, which is a sum over all ranks: every rank judges the same number."""
        return math.isfinite(report.loss)

    def judge_norm(self, loss_is_fine: bool, grad_norm: float) -> bool:
        return loss_is_fine and math.isfinite(grad_norm)

    def settle(self, step: int, report: Report, update: Update, last_checkpoint: str | None) -> None:
        """Count the refusals; a TrainingError once there are more in a row than allowed."""
        if update.applied:
            self.skips_in_a_row = 0
            return
        self.skips_in_a_row += 1
        if self.skips_in_a_row > self.config.max_skips:
            raise TrainingError(
                f"Step {step} has loss {report.loss} and gradient norm {update.grad_norm}; both must be finite. The "
                f"run stops before the update (guard.max_skips={self.config.max_skips}). "
                f"Last good checkpoint: {last_checkpoint or 'none yet'}."
            )


def faults(config: GuardConfig) -> list[str]:
    return [] if config.max_skips >= 0 else [f"guard.max_skips={config.max_skips} must not be negative."]
