"""Writes checkpoints beside the loop: it waits for a copy of the state in the host's memory, no longer.

A thread of each rank writes the parts that are its own to write into `step-N.A.tmp`, A being the attempt, and then what
it has written. Rank 0's puts the manifest together when all are there, and renames the directory. The ranks tell each
other of their files by files: the network belongs to the loop. One save at a time; a failure is raised by the loop.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mdlm_scale
from mdlm_scale import config as config_module
from mdlm_scale.config import CheckpointConfig, Config, outside
from mdlm_scale.errors import CheckpointError, UserError
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import checkpoint
from mdlm_scale.run.attempt import Attempt
from mdlm_scale.run.checkpoint import FORMAT, MANIFEST, Part, State

POLL_SECONDS = 0.02
PATIENCE = 6  # times parallel.timeout_minutes, for a file system to take one save
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # in safetensors


@dataclass(frozen=True)
class Saved:
    path: Path
    step: int
    num_bytes: int  # of this rank
    stall_seconds: float  # that the loop waited
    seconds: float  # until it was complete


class Saver:
    def __init__(
        self,
        config: Config,
        layout: Layout,
        groups: Groups,
        parts: dict[str, Part],
        fingerprints: dict[str, str],
        attempt: Attempt,
        last: Path | None,
    ) -> None:
        """`last` is the checkpoint that the run goes on from. Who writes what several ranks hold is settled here."""
        self.config, self.layout, self.groups, self.attempt = config, layout, groups, attempt
        self.fingerprints = fingerprints
        self.folder = Path(config.run.dir) / "checkpoints"
        self.last = last
        self.own = _own(parts, layout.rank, groups)
        self.versions = versions() if layout.rank == 0 else {}
        self.copies: dict[str, Tensor] = {}
        self.thread: threading.Thread | None = None
        self.error: UserError | None = None
        self.saved: Saved | None = None

    def save(self, state: State) -> Saved | None:
        """Copy the state and begin to write it; every rank calls it after the same step.

        Returns the save before, if that was still under way: the loop's stall includes the wait for it.
        """
        start = time.monotonic()
        before = self.wait()
        for key, part in self.own.items():
            if key not in self.copies:
                pinned = part.flat.device.type == "cuda"
                self.copies[key] = torch.empty_like(part.flat, device="cpu", pin_memory=pinned)
            self.copies[key].copy_(part.flat, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begun = time.monotonic()
        self.thread = threading.Thread(target=self._work, args=(state, start, begun - start), name="save", daemon=True)
        self.thread.start()
        return before

    def poll(self) -> Saved | None:
        """What has been completed since the last call; raises what went wrong meanwhile."""
        if self.thread is not None and not self.thread.is_alive():
            return self.wait()
        return None

    def wait(self) -> Saved | None:
        """The same, after the save that is under way."""
        if self.thread is None:
            return None
        minutes = PATIENCE * self.config.parallel.timeout_minutes
        self.thread.join(60 * minutes)
        if self.thread.is_alive():
            raise CheckpointError(f"{self.folder} does not take a checkpoint within {minutes:g} minutes: is it stuck?")
        self.thread = None
        if self.error is not None:
            raise self.error
        assert self.saved is not None
        self.last = self.saved.path
        return self.saved

    def finish(self) -> Saved | None:
        """Wait until the save under way is complete on all ranks; every rank calls it."""
        saved = self.wait()
        self.groups.any(False)  # rank 0 comes when all is in place
        return saved

    def close(self) -> None:
        """On the way out, also after a failure: nothing half-written stays."""
        if self.thread is not None:
            self.thread.join(5.0)
        if self.layout.rank == 0:
            for aside in self.folder.glob(f"step-*.{self.attempt.number}.tmp"):
                shutil.rmtree(aside, ignore_errors=True)

    def _work(self, state: State, start: float, stall_seconds: float) -> None:
        """In the thread."""
        final = self.folder / f"step-{state.step:06d}"
        aside = final.with_name(f"{final.name}.{self.attempt.number}.tmp")
        try:
            aside.mkdir(parents=True, exist_ok=True)
            told = self._write(aside)
            if self.layout.rank == 0:
                self._conclude(aside, final, state)
            seconds = time.monotonic() - start
            num_bytes = sum(facts["bytes"] for facts in told["files"].values())
            self.saved = Saved(final, state.step, num_bytes, stall_seconds, seconds)
        except OSError as error:
            self.error = CheckpointError(
                f"{final} could not be written: {error.strerror or error}. Free some space or choose another run.dir; "
                f"the last complete checkpoint is {self.last or 'none'}."
            )
        except UserError as error:
            self.error = error

    def _write(self, aside: Path) -> dict[str, Any]:
        """This rank's file, then a word on it for rank 0."""
        name = f"rank-{self.layout.rank:05d}"
        entries: dict[str, Tensor] = {}
        index: dict[str, Any] = {}
        for key, part in self.own.items():
            boxes = []
            for number, (offset, box) in enumerate(Part(self.copies[key], part.start, part.place).boxes()):
                entries[f"{key}/{number}"] = box
                where = {"file": f"{name}.safetensors", "entry": f"{key}/{number}"}
                boxes.append({**where, "offset": offset, "size": list(box.shape)})
            dtype = str(part.flat.dtype).removeprefix("torch.")
            index[key] = {"shape": list(part.place.whole), "dtype": dtype, "boxes": boxes}
        files = {}
        if entries:
            file = aside / f"{name}.safetensors"
            digest = write_safetensors(file, entries)
            if checkpoint.sha256(file) != digest:
                raise OSError(None, f"{file.name} reads back other bytes than were written")
            files[file.name] = {"bytes": file.stat().st_size, "sha256": digest}
        told = {"tensors": index, "files": files}
        unready = aside / f"{name}.part"
        unready.write_text(json.dumps(told))
        unready.rename(aside / f"{name}.json")
        return told

    def _conclude(self, aside: Path, final: Path, state: State) -> None:
        """On rank 0: wait for the others, write the manifest, make the checkpoint visible, delete old ones."""
        told = [self._told(aside / f"rank-{rank:05d}.json", final) for rank in range(self.layout.world_size)]
        manifest = {
            "format": FORMAT,
            "state": asdict(state),
            "config": config_module.to_tree(self.config),
            "layout": asdict(self.layout),
            "versions": self.versions,
            "fingerprints": self.fingerprints,
            "tensors": _joined([each["tensors"] for each in told]),
            "files": {name: facts for each in told for name, facts in each["files"].items()},
        }
        for word in aside.glob("rank-*.json"):
            word.unlink()
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(aside / MANIFEST)
        _sync(aside)
        self.attempt.check()
        if final.exists() and not final.is_dir():
            raise FileExistsError(None, f"{final.name} is a file")
        if final.exists():  # the same step, saved by an earlier attempt or before a rewind
            old = final.with_name(f"{final.name}.old.tmp")
            final.rename(old)
            aside.rename(final)
            shutil.rmtree(old)
        else:
            aside.rename(final)
        _sync(self.folder)
        prune(self.folder, self.config.checkpoint, final)

    def _told(self, word: Path, final: Path) -> dict[str, Any]:
        deadline = time.monotonic() + 60 * self.config.parallel.timeout_minutes
        while not word.exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{final} is incomplete: {word.stem} has not written its part within "
                    f"{self.config.parallel.timeout_minutes:g} minutes (parallel.timeout_minutes). Is {final.parent} a "
                    f"folder that all machines share?"
                )
            time.sleep(POLL_SECONDS)
        return json.loads(word.read_text())


def prune(folder: Path, config: CheckpointConfig, verified: Path) -> None:
    """Delete all but the newest, those that are to stay for good, and the one just read back.

    Later ones, left by an attempt before, may be damaged.
    """
    found = checkpoint.listed(folder)
    for path in found[: -config.keep]:
        step = int(path.name.removeprefix("step-"))
        stays = config.keep_every is not None and step % config.keep_every == 0
        if not stays and path != verified:
            gone = path.with_name(f"gone-{path.name}")  # at once, or not at all
            path.rename(gone)
            shutil.rmtree(gone)


def write_safetensors(path: Path, tensors: dict[str, Tensor], contents: Iterable[Any] | None = None) -> str:
    """A synced safetensors file of the tensors, not copied, or of `contents`, buffers taken one by one; its sha256."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]
        }  # fmt: skip
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        contents = (tensor.numpy() for tensor in tensors.values()) if contents is None else contents
        for piece in chain([len(text).to_bytes(8, "little"), text], contents):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def faults(config: CheckpointConfig) -> list[str]:
    return outside("checkpoint", config, ("every", "keep", "keep_every"), lambda n: n is None or n >= 1)


def _own(parts: dict[str, Part], rank: int, groups: Groups) -> dict[str, Part]:
    """What this rank writes: what no other holds, and its turn of what several hold alike."""
    holders: dict[tuple[Any, ...], list[int]] = {}
    for holder, ranges in enumerate(groups.gather({key: part.range() for key, part in parts.items()})):
        for key, their_range in ranges.items():
            holders.setdefault((key, *their_range), []).append(holder)
    turns = {held: ranks[number % len(ranks)] for number, (held, ranks) in enumerate(holders.items())}
    return {key: part for key, part in parts.items() if turns[(key, *part.range())] == rank}


def _joined(indexes: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' entries: the boxes of a tensor in one list."""
    joined: dict[str, Any] = {}
    for index in indexes:
        for key, entry in index.items():
            joined.setdefault(key, entry | {"boxes": []})["boxes"].extend(entry["boxes"])
    return joined


def versions() -> dict[str, str | None]:
    repository = Path(mdlm_scale.__file__).parent
    try:
        asked = ["git", "-C", str(repository), "rev-parse", "HEAD"]
        git = subprocess.run(asked, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        git = ""
    return {
        "mdlm_scale": mdlm_scale.__version__,
        "git": git or None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
