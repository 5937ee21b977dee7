"""One rank-aware logger: rank 0 speaks to the terminal and to log.txt, the other ranks only of warnings and worse.

`live` shows a line that the next one overwrites, where there is a terminal to do that; messages scroll past above it.
"""

import logging
import os
import sys
import time
from pathlib import Path

log = logging.getLogger("mdlm_scale")

_CLEAR = "\r\x1b[2K"
_FILE_SECONDS = 10.0  # without a terminal a live line is an ordinary message, at most this often


class _Terminal(logging.StreamHandler):
    """Standard error, with a live line kept below the messages."""

    live = ""

    def emit(self, record: logging.LogRecord) -> None:
        if self.live:
            self.stream.write(_CLEAR)
        super().emit(record)
        self.show(self.live)

    def show(self, line: str) -> None:
        if line or self.live:
            self.stream.write(_CLEAR + _fitting(line, os.get_terminal_size(self.stream.fileno()).columns - 1))
            self.stream.flush()
        self.live = line


_last_message = 0.0


def start(rank: int = 0) -> None:
    """Send the package's messages to standard error; call once, before anything is said."""
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler = _Terminal(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if rank == 0 else f"rank {rank}: %(message)s"))
    log.addHandler(handler)


def also_to(path: Path) -> None:
    """Copy the messages, with the time of day, to a file that a later attempt appends to."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    log.addHandler(handler)


def live(line: str, last: bool = False) -> None:
    """Show progress: in place on a terminal, as a message now and then elsewhere; the last line stays either way."""
    global _last_message
    if not log.isEnabledFor(logging.INFO):
        return
    terminal = _terminal()
    if terminal is not None:
        terminal.show("" if last else line)
    if last:
        log.info(line)
    elif time.monotonic() - _last_message >= _FILE_SECONDS:
        _last_message = time.monotonic()
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, line, (), None)
        for handler in log.handlers:
            if handler is not terminal:
                handler.handle(record)


def end_live() -> None:
    """Clear the live line, if one is shown."""
    if (terminal := _terminal()) is not None:
        terminal.show("")


def short(number: float) -> str:
    """A large number in four characters or so."""
    return f"{number / 1e6:.2f}M" if number >= 1e6 else f"{number / 1e3:.1f}k" if number >= 1e3 else f"{number:.0f}"


def duration(seconds: float) -> str:
    """As 3m20s or 4h05m."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


def _fitting(line: str, width: int) -> str:
    """As many fields of ` | ` as fit: a line that wraps could not be cleared, and half a number misleads."""
    while len(line) > width and " | " in line:
        line = line.rpartition(" | ")[0]
    return line[:width]


def _terminal() -> _Terminal | None:
    return next((h for h in log.handlers if isinstance(h, _Terminal) and h.stream.isatty()), None)
