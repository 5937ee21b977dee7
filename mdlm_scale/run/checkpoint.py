"""Checkpoints: a directory `step-000123/` that is complete or absent.

    manifest.json             counters, config, layout, versions, data fingerprint, index of tensors, sha256 of files
    rank-00000.safetensors    a rank's boxes of weights (`model/`), moments (`exp_avg/`, `exp_avg_sq/`) and `ema/`

It is written aside, the manifest last, synced to disk and renamed. Global shapes are those of the whole model. Nothing
here is unpickled.
"""

import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import mdlm_scale
from mdlm_scale import config as config_module
from mdlm_scale.config import Config
from mdlm_scale.errors import CheckpointError
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.cut import Place
from mdlm_scale.parallel.engine import Engine, Shard, Update
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.ema import Ema

FORMAT = 1
MANIFEST = "manifest.json"
KINDS = ("model", "exp_avg", "exp_avg_sq", "ema")


@dataclass(frozen=True)
class State:
    """Where a run is. With weights, moments and EMA this is all that a resume needs."""

    step: int = 0  # the next step; its data, noise and learning rate are functions of this number
    updates: int = 0  # steps that were applied: the n of Adam and EMA
    skipped_steps: list[int] = field(default_factory=list)

    def after(self, update: Update) -> "State":
        if update.applied:
            return State(self.step + 1, self.updates + 1, self.skipped_steps)
        return State(self.step + 1, self.updates, [*self.skipped_steps, self.step])


def save(
    folder: Path,
    state: State,
    engine: Engine,
    ema: Ema,
    config: Config,
    layout: Layout,
    groups: Groups,
    fingerprints: dict[str, str],
) -> Path:
    """Write one checkpoint below `folder` and return its path; every rank writes what no rank before it holds."""
    final = folder / f"step-{state.step:06d}"
    aside = final.with_name(final.name + ".tmp")
    parts = _parts(engine.shards(), ema)
    if layout.rank == 0:
        for left_over in folder.glob("step-*.tmp"):
            shutil.rmtree(left_over, ignore_errors=True)
    ranges = groups.gather({key: part.range() for key, part in parts.items()})
    taken = {(key, *their_range) for theirs in ranges[: layout.rank] for key, their_range in theirs.items()}
    own = {key: part for key, part in parts.items() if (key, *part.range()) not in taken}
    told = groups.gather(_tried(lambda: _write_rank(aside / f"rank-{layout.rank:05d}.safetensors", own)))

    def conclude() -> None:
        manifest = {
            "format": FORMAT,
            "state": asdict(state),
            "config": config_module.to_tree(config),
            "layout": asdict(layout),
            "versions": _versions(),
            "fingerprints": fingerprints,
            "tensors": _joined([each["tensors"] for each in told]),
            "files": {name: facts for each in told for name, facts in each["files"].items()},
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(aside / MANIFEST)
        _sync(aside)
        if final.exists():  # the same step saved again by a later attempt
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)

    failed = [each for each in told if "error" in each]
    if not failed:
        concluded = groups.gather(_tried(conclude) if layout.rank == 0 else None)
        failed = [each for each in concluded[:1] if each]
    if failed:
        if layout.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"{final} could not be written: {failed[0]['error']}. Free some space or choose another run.dir."
        )
    return final


def keep_newest(folder: Path, number: int) -> None:
    """Delete all but the newest checkpoints."""
    for path in _complete(folder)[:-number]:
        shutil.rmtree(path)


def newest(path: Path) -> Path | None:
    """The newest complete checkpoint of a run directory; a checkpoint directory is its own."""
    if (path / MANIFEST).is_file():
        return path
    return next(iter(reversed(_complete(path / "checkpoints"))), None)


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint: {error}.") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {manifest.get('format')}; this version reads format {FORMAT}.")
    return manifest


def restore(path: Path, engine: Engine, ema: Ema) -> State:
    """Read this rank's part of weights, moments and EMA into place, and return the counters."""
    manifest = read_manifest(path)
    verify(path, manifest)
    parts = _parts(engine.shards(), ema)
    if strange := sorted(set(parts) - set(manifest["tensors"])):
        raise CheckpointError(f"{path} holds other tensors than this model: not {', '.join(strange[:5])}.")
    for key, part in parts.items():
        here = part.place.part_of(read_tensor(path, manifest, key))
        part.flat.copy_(here.view(-1)[part.start : part.start + part.flat.numel()])
    state = State(**manifest["state"])
    engine.loaded(state.updates)
    return state


def read_tensor(path: Path, manifest: dict[str, Any], key: str) -> Tensor:
    """One whole tensor, put together from its boxes."""
    entry = manifest["tensors"][key]
    whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    for box in entry["boxes"]:
        with safe_open(path / box["file"], framework="pt") as file:
            at = tuple(slice(o, o + n) for o, n in zip(box["offset"], box["size"], strict=True))
            whole[at] = file.get_tensor(box["entry"])
    return whole


def verify(path: Path, manifest: dict[str, Any]) -> None:
    """Compare each file with its sha256; a CheckpointError names those that differ."""
    bad = [
        name
        for name, expected in manifest["files"].items()
        if not (path / name).is_file() or _sha256(path / name) != expected["sha256"]
    ]
    if bad:
        raise CheckpointError(
            f"{path} is damaged: {', '.join(bad)} is missing or does not have the sha256 of the manifest. "
            f"Remove this checkpoint, and the run resumes from the one before."
        )


@dataclass(frozen=True)
class _Part:
    """A range of one tensor, aliasing the engine's or the average's memory."""

    flat: Tensor
    start: int
    place: Place

    def range(self) -> list[int]:
        """What tells it from other ranks' parts of the same tensor."""
        return [*self.place.offset, self.start, self.flat.numel()]


def _parts(shards: dict[str, Shard], ema: Ema) -> dict[str, _Part]:
    """What this rank holds of every tensor."""
    parts = {}
    for name, shard in shards.items():
        flats = (shard.master, shard.exp_avg, shard.exp_avg_sq, ema.flats[name])
        for kind, flat in zip(KINDS, flats, strict=True):
            parts[f"{kind}/{name}"] = _Part(flat, shard.start, shard.place)
    return parts


def _write_rank(file: Path, parts: dict[str, _Part]) -> dict[str, Any]:
    """One rank's file; returns its entries for the manifest."""
    tensors: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for key, part in parts.items():
        boxes = []
        for number, (offset, size, at) in enumerate(part.place.boxes(part.start, part.flat.numel())):
            entry = f"{key}/{number}"
            first = at - part.start
            tensors[entry] = part.flat[first : first + math.prod(size)].view(size).contiguous()
            boxes.append({"file": file.name, "entry": entry, "offset": offset, "size": size})
        dtype = str(part.flat.dtype).removeprefix("torch.")
        index[key] = {"shape": list(part.place.whole), "dtype": dtype, "boxes": boxes}
    if not any(entry["boxes"] for entry in index.values()):
        return {"tensors": index, "files": {}}
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file)
    _sync(file)
    return {"tensors": index, "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}}}


def _joined(indexes: list[dict[str, Any]]) -> dict[str, Any]:
    """All ranks' entries: the boxes of a tensor in one list."""
    joined: dict[str, Any] = {}
    for index in indexes:
        for key, entry in index.items():
            joined.setdefault(key, entry | {"boxes": []})["boxes"].extend(entry["boxes"])
    return joined


def _tried(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """What `work` returns, or its failure in words: every rank must learn of it, and none may raise alone."""
    try:
        return work()
    except (OSError, SafetensorError) as error:
        return {"error": str(error)}


def _complete(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("step-*") if path.suffix != ".tmp" and (path / MANIFEST).is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def _versions() -> dict[str, str | None]:
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


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
