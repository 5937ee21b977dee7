"""Checkpoints: a directory `step-000123/` that is complete or absent; what is in it, and how it is read on any layout.

    manifest.json             counters, config, layout, versions, data fingerprint, index of tensors, sha256 of files
    rank-00000.safetensors    a rank's boxes of weights (`model/`), moments (`exp_avg/`, `exp_avg_sq/`) and `ema/`

Global shapes are those of the whole model. A rank reads of each box what is its own, whoever wrote it: other numbers of
ranks, other ways to cut the model, another engine. Nothing here is unpickled. `run/saver.py` writes checkpoints.
"""

import hashlib
import json
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mdlm_scale.errors import CheckpointError
from mdlm_scale.log import log
from mdlm_scale.parallel.cut import Place
from mdlm_scale.parallel.engine import Engine, Shard, Update
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.ema import Ema

FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("model", "exp_avg", "exp_avg_sq", "ema")
KEYS = ("state", "config", "fingerprints", "tensors", "files")  # of a manifest, that readers rely on


@dataclass(frozen=True)
class State:
    """Where a run is. With weights, moments and EMA this is all that a resume needs."""

    step: int = 0  # the next step; its data, noise and learning rate are functions of this number
    updates: int = 0  # steps that were applied: the n of Adam and EMA
    skipped_steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the last applied steps: what the guard compares with

    def after(self, update: Update, losses: list[float]) -> "State":
        if update.applied:
            return State(self.step + 1, self.updates + 1, self.skipped_steps, losses)
        return State(self.step + 1, self.updates, [*self.skipped_steps, self.step], losses)

    def past_skipped(self, num_steps: int) -> "State":
        """At the next step that is not to be skipped, or at the end."""
        step, skipped = self.step, set(self.skipped_steps)
        while step in skipped and step < num_steps:
            step += 1
        return State(step, self.updates, self.skipped_steps, self.losses)


@dataclass(frozen=True)
class Part:
    """A range of one tensor, aliasing the engine's or the average's memory."""

    flat: Tensor
    start: int
    place: Place

    def range(self) -> list[int]:
        """What tells it from other ranks' parts of the same tensor."""
        return [*self.place.offset, self.start, self.flat.numel()]

    def boxes(self) -> list[tuple[list[int], Tensor]]:
        """The same as boxes of the whole tensor, each with its offset there; without padding."""
        found = []
        for offset, size, at in self.place.boxes(self.start, self.flat.numel()):
            first = at - self.start
            found.append((offset, self.flat[first : first + math.prod(size)].view(size)))
        return found


def parts(shards: dict[str, Shard], ema: Ema) -> dict[str, Part]:
    """What this rank holds of every tensor."""
    found = {}
    for name, shard in shards.items():
        flats = (shard.master, shard.exp_avg, shard.exp_avg_sq, ema.flats[name])
        for kind, flat in zip(KINDS, flats, strict=True):
            found[f"{kind}/{name}"] = Part(flat, shard.start, shard.place)
    return found


def newest(path: Path) -> Path | None:
    """The newest complete checkpoint of a run directory; a checkpoint directory is its own."""
    if (path / MANIFEST).is_file():
        return path
    return next((p for p in reversed(listed(path / "checkpoints")) if isinstance(_json(p / MANIFEST), dict)), None)


def newest_sound(folder: Path, groups: Groups) -> Path | None:
    """The newest one in `folder` whose files are what its manifest says; the ranks share the reading.

    Damaged ones are told. If there is nothing else, that is an error: to begin anew would be no resume.
    """
    rank = groups.ranks.rank
    found: list[str] = groups.gather([path.name for path in listed(folder)] if rank == 0 else None)[0]
    damaged = []
    for name in reversed(found):
        if not (faults := damage(folder / name, groups)):
            return folder / name
        damaged.append(f"{folder / name} is damaged: {'; '.join(faults)}.")
        if rank == 0:
            log.warning(damaged[-1])
    if damaged:
        raise CheckpointError(
            *damaged, "No other checkpoint is there. Bring back a copy, or remove these and the run begins anew."
        )
    return None


def listed(folder: Path) -> list[Path]:
    """What is, or should be, a checkpoint, the oldest first."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}.") from error
    if not isinstance(manifest, dict) or "shards" in manifest or "format" not in manifest:  # of text, perhaps
        raise CheckpointError(f"{path} is not a checkpoint: its {MANIFEST} is of something else.")
    if manifest["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, of another version of mdlm_scale "
            f"({manifest.get('versions', {}).get('mdlm_scale', 'unknown')}); this one reads format {FORMAT}."
        )
    if missing := [key for key in KEYS if key not in manifest]:
        raise CheckpointError(f"{path} is damaged: its {MANIFEST} has no {', '.join(missing)}.")
    return manifest


def check_shapes(path: Path, manifest: dict[str, Any], wanted: dict[str, list[int]]) -> None:
    """A CheckpointError tells that these tensors are not there, or have other shapes."""
    faults = [
        f"{path} has no {key}" if key not in manifest["tensors"] else f"{path}: {key} has shape {stored}, not {shape}"
        for key, shape in wanted.items()
        if (stored := manifest["tensors"].get(key, {}).get("shape")) != shape
    ]
    if faults:
        raise CheckpointError(*faults[:5], "It is of another model.")


def verify(path: Path, manifest: dict[str, Any]) -> None:
    """A CheckpointError names the files that are not as the manifest says."""
    if bad := damaged_files(path, manifest["files"]):
        raise CheckpointError(f"{path} is damaged: {'; '.join(bad)}.")


def damaged_files(path: Path, files: dict[str, Any]) -> list[str]:
    """Which of these files are not there, or do not have their size and sha256, and why."""
    found = []
    for name, expected in files.items():
        file = path / name
        try:
            if (size := file.stat().st_size) != expected["bytes"]:
                found.append(f"{name} has {size} bytes, not {expected['bytes']}")
            elif sha256(file) != expected["sha256"]:
                found.append(f"{name} does not have the sha256 of the manifest")
        except OSError as error:
            found.append(f"{name} cannot be read ({error.strerror})")
    return found


def restore(path: Path, engine: Engine, ema: Ema | None) -> tuple[State, int]:
    """Read this rank's part of weights, moments and EMA into place; the counters, and the bytes that were read.

    Without `ema` a new run begins: with the averaged weights, from step 0.
    """
    manifest, shards = read_manifest(path), engine.shards()
    begun = {f"ema/{name}": Part(shard.master, shard.start, shard.place) for name, shard in shards.items()}
    own = begun if ema is None else parts(shards, ema)
    check_shapes(path, manifest, {key: list(part.place.whole) for key, part in own.items()})
    num_bytes = 0
    with ExitStack() as files:
        read = _reader(path, files)
        for key, part in own.items():
            for offset, target in part.boxes():
                num_bytes += fill(target, offset, manifest["tensors"][key]["boxes"], read)
    state = State() if ema is None else State(**manifest["state"])
    engine.loaded(state.updates)
    return state, num_bytes


def read_tensor(path: Path, manifest: dict[str, Any], key: str) -> Tensor:
    """One whole tensor, put together from its boxes."""
    entry = manifest["tensors"][key]
    whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    with ExitStack() as files:
        fill(whole, [0] * whole.dim(), entry["boxes"], _reader(path, files))
    return whole


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


Read = Callable[[str, str, tuple[slice, ...]], Tensor]


def _reader(path: Path, files: ExitStack) -> Read:
    """Reads slices of entries; a file is opened once."""
    opened: dict[str, Any] = {}

    def read(name: str, entry: str, at: tuple[slice, ...]) -> Tensor:
        if name not in opened:
            try:
                opened[name] = files.enter_context(safe_open(path / name, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path / name} cannot be read: {error}.") from error
        return opened[name].get_slice(entry)[at]

    return read


def fill(target: Tensor, offset: list[int], boxes: list[dict[str, Any]], read: Read) -> int:
    """Fill `target`, which begins at `offset` of the whole tensor, from stored boxes; the bytes that were read."""
    filled, num_bytes = 0, 0
    for box in boxes:
        low = [max(a, b) for a, b in zip(offset, box["offset"], strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(offset, target.shape, box["offset"], box["size"], strict=True)
        ]  # fmt: skip
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        there = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, box["offset"], strict=True))
        here = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
        values = read(box["file"], box["entry"], there)
        target[here] = values
        filled += values.numel()
        num_bytes += values.nbytes
    assert filled == target.numel(), f"boxes give {filled} of {target.numel()} elements: {boxes}"
    return num_bytes


def damage(path: Path, groups: Groups) -> list[str]:
    """What is wrong with the manifest and the files; the ranks share the reading."""
    manifest, rank, size = _json(path / MANIFEST), groups.ranks.rank, groups.ranks.size
    own = [f"{MANIFEST} is missing or no manifest"]
    if isinstance(manifest, dict) and "files" in manifest:
        files = manifest["files"]
        own = damaged_files(path, {name: files[name] for name in sorted(files)[rank::size]})
    return list(dict.fromkeys(fault for theirs in groups.gather(own) for fault in theirs))


def _json(file: Path) -> Any:
    """What a file holds, None if that is nothing to be read."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None
