"""The attempts at a run, numbered in its directory: only the newest may make anything visible there.

An attempt that was replaced may live on, behind a cut link or in a job that was thought dead. It finds a number above
its own before it shows a checkpoint, and ends. Should it have looked just before, its unfinished files are renamed away
by the new one, before that looks for the newest checkpoint.
"""

import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from mdlm_scale.errors import CheckpointError, ConfigError
from mdlm_scale.parallel.groups import Groups

SHARED_SECONDS = 60.0  # for a network file system to show what another machine wrote


@dataclass(frozen=True)
class Attempt:
    run: Path
    number: int

    @staticmethod
    def begin(run: Path) -> "Attempt":
        """The next attempt at the run in this directory; leftovers of earlier ones go."""
        folder = run / "attempts"
        said = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            number = max(_numbers(folder), default=0) + 1
            while not _claim(folder / f"{number:06d}", json.dumps(said)):  # another attempt begins at this moment
                number += 1
            _clear(run / "checkpoints", number)
        except OSError as error:
            raise ConfigError(f"run.dir={run} cannot be written: {error}.") from error
        return Attempt(run, number)

    def meet(self, groups: Groups) -> None:
        """A ConfigError that names the machines where this attempt is not seen: the run directory must be shared."""
        path = self.run / "attempts" / f"{self.number:06d}"
        told = groups.gather(_text(path) if groups.ranks.rank == 0 else None)[0]
        deadline = time.monotonic() + SHARED_SECONDS
        while not (is_seen := _text(path) == told) and time.monotonic() < deadline:
            time.sleep(0.1)
        ranks = groups.gather([socket.gethostname(), is_seen])
        if blind := sorted({host for host, sees in ranks if not sees}):
            raise ConfigError(
                f"run.dir={self.run} is not shared: what rank 0 wrote there on {ranks[0][0]} is not seen on "
                f"{', '.join(blind)}. Choose a folder that all machines share."
            )

    def check(self) -> None:
        """A CheckpointError if another attempt has begun since: no failure, and no reason to start again."""
        newest = max(_numbers(self.run / "attempts"), default=0)
        if newest > self.number:
            try:
                by = json.loads((self.run / "attempts" / f"{newest:06d}").read_text())
                who = f", process {by['pid']} on {by['host']} since {by['time']}"
            except (OSError, ValueError, KeyError):
                who = ""
            raise CheckpointError(
                f"Attempt {self.number} at the run in {self.run} was replaced by attempt {newest}{who}. It ends here; "
                f"what it did after its last checkpoint does not count."
            )


def _clear(folder: Path, number: int) -> None:
    """Put aside what earlier attempts left unfinished, at once, then delete it."""
    for replaced in folder.glob("step-*.old.tmp"):  # by a save of the same step, which did not come to its end
        final = folder / replaced.name.removesuffix(".old.tmp")
        if not final.exists():
            replaced.rename(final)
    for left_over in folder.glob("step-*.tmp"):
        left_over.rename(folder / f"gone-{number}-{left_over.name}")
    for gone in folder.glob("gone-*"):
        shutil.rmtree(gone, ignore_errors=True)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _numbers(folder: Path) -> list[int]:
    return [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]


def _claim(path: Path, text: str) -> bool:
    try:
        with path.open("x") as file:
            file.write(text + "\n")
    except FileExistsError:
        return False
    return True
