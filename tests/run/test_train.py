"""Whole runs through the entry point: what they write, how they stop and resume, what must not change a bit."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEBUG, ROOT, Train
from torch import Tensor

from mdlm_scale import config
from mdlm_scale.errors import EXIT_RUN_AGAIN
from mdlm_scale.run import checkpoint

PERFORMANCE = {"tokens_per_second", "gemm_share", "data_wait_share", "seconds"}  # may differ between equal runs


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in PERFORMANCE} for row in found if row["kind"] == kind]


def tensors(run: Path) -> dict[str, Tensor]:
    path = checkpoint.newest(run)
    assert path is not None
    manifest = checkpoint.read_manifest(path)
    return {key: checkpoint.read_tensor(path, manifest, key) for key in manifest["tensors"]}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_run_directory(train_run: Train, tmp_path: Path) -> None:
    assert train_run() == 0
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "log.txt", "attempts", "checkpoints", "done"
    }  # fmt: skip
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-000003", "step-000006"}
    assert config.load(run / "config.yaml").train.num_steps == 6
    assert [row["step"] for row in rows(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(run, "eval")] == [3, 6]
    assert all(row["nelbo_se"] > 0 for row in rows(run, "eval"))


def test_resumed_run_is_bit_equal(train_run: Train, tmp_path: Path) -> None:
    """Stopped at a step that is no multiple of any interval, then continued."""
    assert train_run("run.dir=" + str(tmp_path / "whole")) == 0
    for num_steps in (4, 6):
        assert train_run("run.dir=" + str(tmp_path / "parts"), f"train.num_steps={num_steps}") == 0
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "parts"))
    assert rows(tmp_path / "whole", "train") == rows(tmp_path / "parts", "train")


def test_attempt_without_checkpoint_leaves_no_rows(train_run: Train, tmp_path: Path) -> None:
    """Rows of steps that will be done again are dropped, and so is a half-written line."""
    assert train_run("train.num_steps=3") == 0
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "nelbo": 99}\n{"kind": "tra')
    assert train_run() == 0
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 6]
    assert rows(tmp_path / "run", "train")[3]["nelbo"] != 99


def test_finished_run_is_left_alone(train_run: Train, tmp_path: Path) -> None:
    assert train_run() == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert train_run() == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_accumulation_changes_nothing(train_run: Train, tmp_path: Path) -> None:
    for micro in (1, 4, 8):
        assert train_run("run.dir=" + str(tmp_path / str(micro)), f"batch.micro_batch_size={micro}") == 0
    whole = tensors(tmp_path / "8")
    for micro in (1, 4):
        parts = tensors(tmp_path / str(micro))
        for key, tensor in whole.items():
            # float64 rounding of differently ordered sums, grown over six Adam steps
            torch.testing.assert_close(parts[key], tensor, rtol=0, atol=1e-11 * float(tensor.abs().max()) + 1e-13)


@pytest.mark.parametrize(
    "switch", ["parallel.recompute=full", "data.prefetch=5", "evaluate.every=1", "logging.every=4"]
)
def test_switches_do_not_change_a_bit(train_run: Train, tmp_path: Path, switch: str) -> None:
    assert train_run("run.dir=" + str(tmp_path / "plain")) == 0
    assert train_run("run.dir=" + str(tmp_path / "other"), switch) == 0
    assert same(tensors(tmp_path / "plain"), tensors(tmp_path / "other"))


def test_half_precision_keeps_float32_masters(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.precision=bf16", "train.num_steps=2") == 0
    assert {tensor.dtype for tensor in tensors(tmp_path / "run").values()} == {torch.float32}


def test_nelbo_is_the_bound_whatever_is_trained(train_run: Train, tmp_path: Path) -> None:
    """On the first step the weights are the same, so the bound is too; the flat loss is another number."""
    for weight in ("elbo", "flat"):
        assert train_run("run.dir=" + str(tmp_path / weight), f"diffusion.weight={weight}", "train.num_steps=1") == 0
    (elbo,), (flat,) = rows(tmp_path / "elbo", "train"), rows(tmp_path / "flat", "train")
    assert elbo["loss"] == elbo["nelbo"] == flat["nelbo"]
    # a fresh model costs log(V - 1) a masked token, and the flat loss counts each of them once
    assert flat["loss"] == pytest.approx(flat["masked_share"] * math.log(259), rel=1e-12)


def test_other_seed_is_another_run(train_run: Train, tmp_path: Path) -> None:
    for seed in (0, 1):
        assert train_run("run.dir=" + str(tmp_path / str(seed)), f"run.seed={seed}", "train.num_steps=1") == 0
    assert rows(tmp_path / "0", "train")[0]["grad_norm"] != rows(tmp_path / "1", "train")[0]["grad_norm"]


def test_debug_recipe_learns(tmp_path: Path) -> None:
    """The file as it is, as a script: at least five rows, a falling nelbo, a checkpoint."""
    command = [sys.executable, "mdlm_scale/train.py", "--config", DEBUG, f"run.dir={tmp_path / 'run'}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    nelbo = [row["nelbo"] for row in rows(tmp_path / "run", "train")]
    assert len(nelbo) >= 5
    assert max(nelbo[-5:]) < 0.8 * nelbo[0]
    assert checkpoint.newest(tmp_path / "run") is not None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_and_the_run_goes_on(
    train_run: Train, tmp_path: Path, corpus: Path, number: signal.Signals
) -> None:
    """A real process and a real signal; the two attempts together equal one run."""
    run = tmp_path / "run"
    written = run / "metrics.jsonl"
    small = [
        "train.num_steps=4000",
        "evaluate.every=4000",
        "checkpoint.every=4000",
        f"data.train={corpus}",
        f"data.validation={corpus}",
        "data.length=32",
        "model.hidden_size=32",
    ]
    small += ["batch.global_batch_size=8", "batch.micro_batch_size=4", "train.precision=float64", "evaluate.rows=32"]
    command = [sys.executable, "-m", "mdlm_scale.train", "--config", DEBUG, f"run.dir={run}", "logging.every=1"]
    process = subprocess.Popen([*command, *small], cwd=ROOT)
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text().count("\n") > 3):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    os.kill(process.pid, number)
    assert process.wait(60) == EXIT_RUN_AGAIN
    stopped = checkpoint.newest(run)
    assert stopped is not None
    end = int(stopped.name.removeprefix("step-")) + 2
    assert train_run(f"train.num_steps={end}", "evaluate.every=4000", "checkpoint.every=4000") == 0
    whole = f"run.dir={tmp_path / 'whole'}"
    assert train_run(whole, f"train.num_steps={end}", "evaluate.every=4000", "checkpoint.every=4000") == 0
    assert same(tensors(run), tensors(tmp_path / "whole"))


def test_time_limit_asks_to_be_run_again(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.max_minutes=0") == EXIT_RUN_AGAIN
    assert checkpoint.newest(tmp_path / "run") is not None
    assert not (tmp_path / "run" / "done").exists()
    assert train_run() == 0


def test_nan_stops_before_the_update(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that throws the weights out of range: the next loss is not finite."""
    blow_up = ["train.precision=float32", "optimizer.lr=1e30", "optimizer.warmup_steps=4", "checkpoint.every=1"]
    assert train_run(*blow_up, "guard.max_skips=0", "guard.max_rewinds=0") == 1
    message = capsys.readouterr().err
    assert "Step 2 has loss" in message
    assert f"Last complete checkpoint: {tmp_path / 'run' / 'checkpoints' / 'step-000002'}." in message
    assert checkpoint.newest(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-000002"
    assert not (tmp_path / "run" / "done").exists()


def test_skipped_step_changes_nothing_but_the_count(train_run: Train, tmp_path: Path) -> None:
    blow_up = ["train.precision=float32", "optimizer.lr=1e30", "optimizer.warmup_steps=4", "guard.max_skips=9"]
    assert train_run(*blow_up, "train.num_steps=2", "evaluate.every=99") == 0
    before = tensors(tmp_path / "run")
    assert train_run(*blow_up, "train.num_steps=5", "evaluate.every=99") == 0
    assert same(before, tensors(tmp_path / "run"))
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    state = checkpoint.read_manifest(path)["state"]
    assert (state["step"], state["updates"], state["skipped_steps"]) == (5, 2, [2, 3, 4])
    assert len(state["losses"]) == 2  # never a bad one


def test_wandb_offline_keeps_its_id(train_run: Train, tmp_path: Path) -> None:
    assert train_run("logging.wandb=offline", "train.num_steps=2") == 0
    first = (tmp_path / "run" / "wandb_id").read_text()
    assert train_run("logging.wandb=offline", "train.num_steps=3") == 0
    assert (tmp_path / "run" / "wandb_id").read_text() == first
    assert len(list((tmp_path / "run" / "wandb").glob(f"offline-run-*-{first}"))) >= 1
