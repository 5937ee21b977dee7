"""When to stop early: a signal or the time limit sets a flag that stays set; the loop saves, a later run goes on."""

import signal
import time
from types import FrameType

from mdlm_scale.log import log
from mdlm_scale.parallel.groups import Groups


class Stop:
    def __init__(self, groups: Groups, max_minutes: float | None) -> None:
        self.groups = groups
        self.requested = False
        self.deadline = float("inf") if max_minutes is None else time.monotonic() + 60 * max_minutes
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop: all ranks stop after the same step."""
        return self.groups.any(self.requested or time.monotonic() > self.deadline)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if not self.requested:
            log.info(f"{signal.Signals(number).name}: stopping after this step; the run will be saved and can go on")
        self.requested = True
