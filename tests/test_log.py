"""What the terminal shows and what log.txt keeps: one live line below the messages, without remains."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeVar

import pytest

from mdlm_scale import log as log_module
from mdlm_scale.log import log

COLUMNS = 40
Screen = Callable[[], list[str]]
Stream = TypeVar("Stream", bound=IO[str])


@pytest.fixture(autouse=True)
def _own_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The logger is one for the process: leave it as it was, and begin as if nothing had been said for long."""
    before = log.handlers[:], log.propagate, log.level
    monkeypatch.setattr(log_module, "_last_message", float("-inf"))
    yield
    log.handlers[:], log.propagate, log.level = before


@pytest.fixture
def file() -> io.StringIO:
    """Standard error that is no terminal."""
    return started(io.StringIO())


@pytest.fixture
def screen() -> Iterator[Screen]:
    """Standard error on a terminal of COLUMNS columns; calling it gives the rows that the user sees."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    stream = started(os.fdopen(theirs, "w"))

    def rows() -> list[str]:
        stream.close()  # so that reading ends
        written = b""
        while part := _read(ours):
            written += part
        return shown(written.decode())

    yield rows
    stream.close()
    os.close(ours)


def started(stream: Stream, rank: int = 0) -> Stream:
    """Start the logger with `stream` as its standard error."""
    with contextlib.redirect_stderr(stream):
        log_module.start(rank)
    return stream


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end was closed
        return b""


def shown(written: str) -> list[str]:
    """The rows of a terminal that knows return, newline, wrapping and `clear this row`."""
    rows, column = [""], 0
    for piece in re.findall(r"\x1b\[2K|[^\x1b]", written):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            rows.append("")
        elif piece == "\x1b[2K":
            rows[-1] = ""
        else:
            if column == COLUMNS:
                rows, column = [*rows, ""], 0
            rows[-1] = rows[-1].ljust(column)[:column] + piece + rows[-1][column + 1 :]
            column += 1
    return [row.rstrip() for row in rows]


def test_without_terminal_live_lines_are_throttled(file: io.StringIO) -> None:
    for step in range(100):
        log_module.live(f"step {step}")
    assert file.getvalue() == "step 0\n"


def test_without_terminal_a_live_line_comes_again_after_a_while(
    file: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_module.live("step 0")
    monkeypatch.setattr(log_module, "_last_message", time.monotonic() - 11)  # one in ten seconds
    log_module.live("step 1")
    assert file.getvalue() == "step 0\nstep 1\n"


def test_without_terminal_the_last_line_stays(file: io.StringIO) -> None:
    log_module.live("step 0")
    log_module.live("step 1", last=True)
    assert file.getvalue() == "step 0\nstep 1\n"


def test_without_terminal_there_are_no_control_characters(file: io.StringIO) -> None:
    log_module.live("step 0")
    log.info("saved")
    assert set(file.getvalue()) <= set("step 0\nsaved")


def test_live_line_is_overwritten(screen: Screen) -> None:
    for line in ("step 1", "step 2, a longer one", "step 3"):
        log_module.live(line)
    assert screen() == ["step 3"]


def test_message_scrolls_past_above_the_live_line(screen: Screen) -> None:
    log_module.live("step 1, longer than the message")
    log.info("saved")
    assert screen() == ["saved", "step 1, longer than the message"]


def test_last_line_stays_above_later_messages(screen: Screen) -> None:
    log_module.live("step 1")
    log_module.live("step 2", last=True)
    log.info("done")
    assert screen() == ["step 2", "done", ""]


def test_live_line_wider_than_the_terminal_leaves_no_remains(screen: Screen) -> None:
    for step in range(3):
        log_module.live(f"step {step}" + " and so on" * COLUMNS)
    assert [row[:6] for row in screen()] == ["step 2"]


def test_live_line_that_does_not_fit_loses_whole_fields(screen: Screen) -> None:
    log_module.live("step 1/5 20% | eta 1m | nelbo 2.3456 | lr 3.0e-04 | more")
    assert screen() == ["step 1/5 20% | eta 1m | nelbo 2.3456"]


def test_log_file_has_a_live_line_now_and_then_and_the_last(screen: Screen, tmp_path: Path) -> None:
    """Beside a terminal too, where nothing of it scrolls past."""
    log_module.also_to(tmp_path / "log.txt")
    for step in range(3):
        log_module.live(f"step {step}")
    log_module.live("step 3", last=True)
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{stamp} step 0\n{stamp} step 3\n", (tmp_path / "log.txt").read_text())
    assert screen() == ["step 3", ""]


def test_log_file_is_appended_to(tmp_path: Path) -> None:
    for attempt in ("first", "second"):
        started(io.StringIO())
        log_module.also_to(tmp_path / "log.txt")
        log.info(attempt)
    assert re.sub(r"(?m)^\S+ \S+ ", "", (tmp_path / "log.txt").read_text()) == "first\nsecond\n"


def test_other_ranks_speak_only_of_warnings() -> None:
    file = started(io.StringIO(), rank=3)
    log.info("ready")
    log.warning("slow")
    log_module.live("step 1", last=True)
    assert file.getvalue() == "rank 3: slow\n"
