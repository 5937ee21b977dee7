"""When to stop early: a signal or the time limit sets a flag that stays set; the loop saves, a later run goes on."""

import signal
import time
from types import FrameType

from mdlm_scale.log import log
from mdlm_scale.parallel.groups import Groups


class Stop:
    def __init__(self, groups: Groups, max_minutes: float | None) -> None:
        self.groups = groups
        self.requested: tuple[str, float] | None = None  # the first signal and when it came
        self.deadline = float("inf") if max_minutes is None else time.monotonic() + 60 * max_minutes
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: all ranks stop after the same step."""
        return self.groups.any(self.requested is not None or time.monotonic() > self.deadline)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.requested is None:
            self.requested = signal.Signals(number).name, time.monotonic()
            log.info(f"{self.requested[0]}: stopping after this step; the run will be saved and can go on")

    def since(self) -> str:
        """How long ago a signal came, if one did."""
        return f" {time.monotonic() - self.requested[1]:.1f} s after {self.requested[0]}" if self.requested else ""
