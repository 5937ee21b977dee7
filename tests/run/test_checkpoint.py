"""Checkpoints: complete or absent, self-describing, pruned; and what a failed write leaves behind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import Train
from runs import rows
from safetensors import safe_open

from mdlm_scale.errors import CheckpointError
from mdlm_scale.run import checkpoint


def test_manifest_describes_the_files(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.num_steps=2") == 0
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    manifest = json.loads((path / "manifest.json").read_text())
    losses = manifest["state"].pop("losses")
    assert manifest["state"] == {"step": 2, "updates": 2, "skipped_steps": []}
    assert losses == [row["loss"] for row in rows(tmp_path / "run", "train")]
    assert manifest["config"]["model"]["hidden_size"] == 32
    assert manifest["layout"] == {"world_size": 1, "rank": 0, "tp_size": 1, "replicate_size": 1}
    with safe_open(path / "rank-00000.safetensors", framework="pt") as file:
        assert set(file.keys()) == {box["entry"] for t in manifest["tensors"].values() for box in t["boxes"]}
    kinds = {key.split("/")[0] for key in manifest["tensors"]}
    assert kinds == {"model", "exp_avg", "exp_avg_sq", "ema"}
    checkpoint.verify(path, manifest)


def test_only_the_newest_stay(train_run: Train, tmp_path: Path) -> None:
    assert train_run("checkpoint.every=1", "checkpoint.keep=2", "evaluate.every=99") == 0
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000005", "step-000006"]


def test_newest_is_by_number_and_complete(tmp_path: Path) -> None:
    for name in ("step-999999", "step-1000000", "step-1000001.tmp", "step-2000000"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-999999", "step-1000000", "step-1000001.tmp"):
        (tmp_path / "checkpoints" / name / "manifest.json").write_text("{}")
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.name == "step-1000000"


def test_interrupted_save_is_invisible_and_cleared(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.num_steps=3") == 0
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(folder / "step-000003", folder / "step-000004.tmp")
    assert train_run() == 0
    assert sorted(p.name for p in folder.iterdir()) == ["step-000003", "step-000006"]


def test_unwritable_folder_is_one_error(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_run("train.num_steps=3") == 0
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-000006").write_text("a file where the directory should go")
    assert train_run() == 2
    assert "step-000006 could not be written" in capsys.readouterr().err
    assert not list(folder.glob("*.tmp"))


def test_newer_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(CheckpointError, match="has format 99, of another version of mdlm_scale"):
        checkpoint.read_manifest(tmp_path)


def test_manifests_of_something_else(shards: Path, tmp_path: Path) -> None:
    """A folder of text has a manifest too, and the same number of a format."""
    with pytest.raises(CheckpointError, match="is of something else"):
        checkpoint.read_manifest(shards)
    for content, fault in (("[]", "is of something else"), ('{"format": 1, "state": {}}', "has no config, fing")):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(CheckpointError, match=fault):
            checkpoint.read_manifest(tmp_path)


def test_ema_is_the_average_of_the_weights(train_run: Train, tmp_path: Path) -> None:
    """Six updates by hand from the saved weights, with decay (1 + n) / (10 + n)."""
    assert train_run("checkpoint.every=1", "checkpoint.keep=9", "evaluate.every=99") == 0
    paths = sorted((tmp_path / "run" / "checkpoints").iterdir())
    manifests = [checkpoint.read_manifest(path) for path in paths]
    name = "blocks.0.mlp_in.weight"
    average = None
    for n, (path, manifest) in enumerate(zip(paths, manifests, strict=True), start=1):
        weights = checkpoint.read_tensor(path, manifest, f"model/{name}")
        saved = checkpoint.read_tensor(path, manifest, f"ema/{name}")
        if average is None:  # the first learning rate is 0: weights and average are both the initial ones
            average = weights.clone()
        average = average * (1 + n) / (10 + n) + weights * 9 / (10 + n)
        torch.testing.assert_close(saved, average, rtol=1e-14, atol=1e-16)  # one rounding an update
