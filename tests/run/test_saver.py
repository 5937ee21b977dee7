"""Saves beside the loop: the same bytes as a library would write, one at a time, dealt to ranks, old ones deleted."""

import hashlib
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Train
from parity.cells import fsdp, plain, zero
from parity.ranks import run_ranks
from parity.trial import CPU, MASK_ID, VOCAB, Trial, config_of, initial
from runs import rows, tensors
from safetensors.torch import load_file

from mdlm_scale.config import CheckpointConfig, Precision
from mdlm_scale.errors import CheckpointError
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import checkpoint
from mdlm_scale.run.attempt import Attempt
from mdlm_scale.run.build import build_engine, build_model, layout_of
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.saver import Saver, prune, write_safetensors


def make_saver(groups: Groups, trial: Trial, folder: Path) -> tuple[Saver, Any, Ema]:
    """The real thing for a small model."""
    config = config_of(trial)
    config = replace(config, run=replace(config.run, dir=str(folder)))
    layout = layout_of(config, groups.ranks)
    engine = build_engine(config, build_model(config, VOCAB, MASK_ID), initial, CPU, layout, groups)
    ema = Ema(engine, 0.9)
    number = groups.gather(Attempt.begin(folder).number if layout.rank == 0 else None)[0]
    parts = checkpoint.parts(engine.shards(), ema)
    return Saver(config, layout, groups, parts, {}, Attempt(folder, number), None), engine, ema


def test_files_are_safetensors_and_the_hash_is_theirs(tmp_path: Path) -> None:
    written = {"a/0": torch.arange(12.0).view(3, 4), "b": torch.tensor([1.5], dtype=torch.float64)}
    digest = write_safetensors(tmp_path / "x.safetensors", written)
    assert digest == hashlib.sha256((tmp_path / "x.safetensors").read_bytes()).hexdigest()
    read = load_file(tmp_path / "x.safetensors")
    assert read.keys() == written.keys()
    assert all(torch.equal(read[name], value) and read[name].dtype == value.dtype for name, value in written.items())


def test_what_is_saved_is_the_moment_of_the_save(tmp_path: Path) -> None:
    """The loop changes the weights while they are written."""
    saver, engine, _ = make_saver(Groups(), plain(), tmp_path)
    saver.save(State(1, 1))
    before = engine.full_parameter("head.weight").clone()
    for shard in engine.shards().values():
        shard.master.fill_(7.0)
    saver.finish()
    path = tmp_path / "checkpoints" / "step-000001"
    stored = checkpoint.read_tensor(path, checkpoint.read_manifest(path), "model/head.weight")
    assert torch.equal(stored, before)


def test_one_save_at_a_time(tmp_path: Path) -> None:
    saver, *_ = make_saver(Groups(), plain(), tmp_path)
    for step in range(1, 6):
        saver.save(State(step, step))
        assert sum(thread.name == "save" for thread in threading.enumerate()) <= 1
    saver.finish()
    assert [path.name for path in checkpoint.listed(tmp_path / "checkpoints")] == ["step-000004", "step-000005"]


def test_a_replaced_attempt_shows_nothing(tmp_path: Path) -> None:
    old, *_ = make_saver(Groups(), plain(), tmp_path)
    old.save(State(1, 1))
    old.finish()
    new, *_ = make_saver(Groups(), plain(), tmp_path)
    old.save(State(2, 2))
    with pytest.raises(CheckpointError, match=r"Attempt 1 .* was replaced by attempt 2, process"):
        old.finish()
    old.close()
    new.save(State(3, 3))
    new.finish()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-000001", "step-000003"}


def test_a_new_attempt_takes_away_what_an_old_one_was_writing(tmp_path: Path) -> None:
    """Should the old one not have looked again, its directory is gone when it wants to rename it."""
    unfinished = tmp_path / "checkpoints" / "step-000009.1.tmp"
    unfinished.mkdir(parents=True)
    (unfinished / "rank-00000.safetensors").write_bytes(b"x")
    replaced = tmp_path / "checkpoints" / "step-000005.old.tmp"  # its successor never came
    replaced.mkdir()
    assert Attempt.begin(tmp_path).number == 1
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]


@pytest.mark.parametrize(
    ("keep", "keep_every", "expected"),
    [(2, None, [50, 60]), (1, 20, [20, 40, 60]), (9, None, [10, 20, 30, 40, 50, 60])],
)
def test_retention(tmp_path: Path, keep: int, keep_every: int | None, expected: list[int]) -> None:
    for step in range(10, 70, 10):
        (tmp_path / f"step-{step:06d}").mkdir()
    prune(tmp_path, CheckpointConfig(keep=keep, keep_every=keep_every), tmp_path / "step-000060")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06d}" for step in expected]


def test_retention_spares_the_last_that_is_known_to_be_sound(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"step-{step:06d}").mkdir()
    prune(tmp_path, CheckpointConfig(keep=1), tmp_path / "step-000010")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000010", "step-000030"]


def saved_bytes(groups: Groups, trial: Trial, folder: Path) -> int:
    saver, *_ = make_saver(groups, trial, folder)
    saver.save(State(1, 1))
    saved = saver.finish()
    assert saved is not None
    return saved.num_bytes


@pytest.mark.parametrize(
    "trial",
    [fsdp(2), zero(0, 2), zero(1, 2), fsdp(4, tp_size=2, replicate_size=2)],
    ids=["FSDP2", "ZeRO 0", "ZeRO 1", "HSDP tp 2"],
)
def test_ranks_share_the_writing(tmp_path: Path, trial: Trial) -> None:
    """Every element once, whoever holds copies; no rank writes more than twice its share."""
    trial = replace(trial, precision=Precision.float32)
    written = run_ranks(saved_bytes, trial.world_size, trial, tmp_path, tp_size=trial.parallel.tp_size)
    manifest = checkpoint.read_manifest(tmp_path / "checkpoints" / "step-000001")
    for entry in manifest["tensors"].values():
        boxes = sum(torch.Size(box["size"]).numel() for box in entry["boxes"])
        assert boxes == torch.Size(entry["shape"]).numel()
    assert max(written) < 2 * sum(written) / len(written)


def test_saves_do_not_change_a_bit(train_run: Train, tmp_path: Path) -> None:
    """P3."""
    for every in (1, 99):
        assert train_run(f"run.dir={tmp_path / str(every)}", f"checkpoint.every={every}", "evaluate.every=99") == 0
    ours, theirs = (tensors(checkpoint.newest(tmp_path / name)) for name in ("1", "99"))
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    saves = [row for row in rows(tmp_path / "1", "event") if row["message"].startswith("saved")]
    assert [row["step"] for row in saves] == [1, 2, 3, 4, 5, 6]
    assert all(0 <= row["stall_seconds"] <= row["seconds"] and row["bytes"] > 0 for row in saves)


def test_a_checkpoint_of_another_model_is_refused(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.num_steps=2") == 0
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    _, engine, ema = make_saver(Groups(), plain(), tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"model/embed.weight has shape \[260, 32\], not \[61, 32\]"):
        checkpoint.restore(path, engine, ema)


def test_the_manifest_is_json_without_surprises(tmp_path: Path) -> None:
    saver, *_ = make_saver(Groups(), plain(), tmp_path)
    saver.save(State(1, 1, [0], [2.5]))
    saver.finish()
    manifest = json.loads((tmp_path / "checkpoints" / "step-000001" / "manifest.json").read_text())
    assert manifest["state"] == {"step": 1, "updates": 1, "skipped_steps": [0], "losses": [2.5]}
    assert manifest["versions"]["torch"] == torch.__version__
