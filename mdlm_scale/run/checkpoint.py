"""Checkpoints: a directory `step-000123/` that is complete or absent.

    manifest.json             counters, config, layout, versions, data fingerprint, index of tensors, sha256 of files
    rank-00000.safetensors    a rank's boxes of weights (`model/`), moments (`exp_avg/`, `exp_avg_sq/`) and `ema/`

It is written aside, the manifest last, synced to disk and renamed. Global shapes are those of the whole model. Nothing
here is unpickled.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
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
from mdlm_scale.parallel.engine import Engine, Shard, Update
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
    folder: Path, state: State, engine: Engine, ema: Ema, config: Config, layout: Layout, fingerprints: dict[str, str]
) -> Path:
    """Write one checkpoint below `folder` and return its path."""
    final = folder / f"step-{state.step:06d}"
    aside = final.with_name(final.name + ".tmp")
    try:
        for left_over in folder.glob("step-*.tmp"):
            shutil.rmtree(left_over)
        aside.mkdir(parents=True)
        tensors = _tensors(engine.shards(), ema)
        file = aside / f"rank-{layout.rank:05d}.safetensors"
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
        _sync(file)
        manifest = {
            "format": FORMAT,
            "state": asdict(state),
            "config": config_module.to_tree(config),
            "layout": asdict(layout),
            "versions": _versions(),
            "fingerprints": fingerprints,
            "tensors": {key: _index(tensor, file.name, key) for key, tensor in tensors.items()},
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)}},
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
        _sync(aside / MANIFEST)
        _sync(aside)
        if final.exists():  # the same step saved again by a later attempt
            shutil.rmtree(final)
        aside.rename(final)
        _sync(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"{final} could not be written: {error}. Free some space or choose another run.dir."
        ) from error
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
    """Read weights, moments and EMA into place, and return the counters."""
    manifest = read_manifest(path)
    verify(path, manifest)
    wanted = _tensors(engine.shards(), ema)
    if set(wanted) != set(manifest["tensors"]):
        differing = sorted(set(wanted) ^ set(manifest["tensors"]))
        raise CheckpointError(f"{path} holds other tensors than this model, among them {', '.join(differing[:5])}.")
    for key, tensor in wanted.items():
        tensor.copy_(read_tensor(path, manifest, key))
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


def _tensors(shards: dict[str, Shard], ema: Ema) -> dict[str, Tensor]:
    """Every tensor of this rank, aliasing the engine's and the average's memory."""
    tensors: dict[str, Tensor] = {}
    for name, shard in shards.items():
        flats = (shard.master, shard.exp_avg, shard.exp_avg_sq, ema.flats[name])
        tensors |= {f"{kind}/{name}": flat.view(shard.shape) for kind, flat in zip(KINDS, flats, strict=True)}
    return tensors


def _index(tensor: Tensor, file: str, entry: str) -> dict[str, Any]:
    shape = list(tensor.shape)
    box = {"file": file, "entry": entry, "offset": [0] * len(shape), "size": shape}
    return {"shape": shape, "dtype": str(tensor.dtype).removeprefix("torch."), "boxes": [box]}


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
