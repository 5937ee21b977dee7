"""A user's mistake gets one clear error, exit code 2, and nothing is written."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import DEBUG, ROOT, Train

from mdlm_scale import sample, train
from mdlm_scale.run import checkpoint

MISTAKES = {
    "unknown key": (["model.hiden_size=8"], "model.hiden_size is not a setting. Did you mean model.hidden_size?"),
    "wrong type": (["train.num_steps=many"], "train.num_steps='many' must be a whole number."),
    "batch": (["batch.global_batch_size=10"], "Nearest that work: 8, 12; or batch.micro_batch_size=2 with 10."),
    "heads": (["model.num_heads=5"], "model.num_heads=5 does not divide model.hidden_size=32"),
    "odd head": (["model.hidden_size=36", "model.num_heads=12"], "gives an odd head width, 3"),
    "length": (["data.length=1"], "data.length=1 must be at least 3"),
    "num_times": (["diffusion.num_times=0"], "diffusion.num_times=0 must be at least 1"),
    "t_min": (["diffusion.t_min=1.5"], "diffusion.t_min=1.5 must lie strictly between 0 and 1"),
    "mask id": (["tokenizer.mask_id=260"], "tokenizer.mask_id=260 is outside the vocabulary, 0 .. 259."),
    "vocabulary": (["tokenizer.vocab_size=100"], "tokenizer.vocab_size=100, but 'bytes' has 260 entries"),
    "no corpus": (["data.train=nowhere.txt"], "data.train: 'nowhere.txt' does not exist"),
    "short corpus": (["batch.global_batch_size=4000"], "is too short: "),
    "short validation": (["data.length=9000"], "at least 16 are needed (two blocks, for a standard error)"),
    "no files": (["data.train=a.txt", "data.validation=b.txt"], "data.validation: 'b.txt' does not exist"),
    "GPU": (["train.device=cuda"], "PyTorch sees no GPU"),
    "override": (["nonsense"], "'nonsense' is not an override"),
    "lr": (["optimizer.lr=0"], "optimizer.lr=0.0 must be above 0."),
    "cosine": (["optimizer.schedule=cosine"], "cosine_steps=None must be above warmup_steps=10"),
    "skips": (["guard.max_skips=-1"], "guard.max_skips=-1 must not be negative"),
    "evaluation": (["evaluate.rows=3"], "evaluate.rows=3 must be 0 (all rows) or at least 16"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], mistake: str) -> None:
    overrides, expected = MISTAKES[mistake]
    assert train_run(*overrides) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert "Traceback" not in message
    assert not (tmp_path / "run").exists()


def test_all_faults_at_once(train_run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_run("model.num_heads=5", "diffusion.t_min=2", "optimizer.lr=-1", "batch.micro_batch_size=3") == 2
    message = capsys.readouterr().err
    assert all(key in message for key in ("4 faults", "num_heads", "t_min", "optimizer.lr", "global_batch_size"))


def test_faults_of_layout_and_engine_at_once(train_run: Train, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ["parallel.engine=deepspeed", "parallel.zero_stage=5", "batch.global_batch_size=10"]
    assert train_run(*overrides, "train.precision=float32") == 2
    message = capsys.readouterr().err
    assert all(text in message for text in ("2 faults", "zero_stage=5 must be", "global_batch_size=10 is not"))


@pytest.mark.parametrize(("device", "code"), [("auto", 2), ("cpu", 0)])
def test_gpus_of_a_job_that_pytorch_does_not_see(
    device: str, code: int, train_run: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weeks on the CPU of a GPU node are not what was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert train_run("--check", f"train.device={device}") == code
    assert ("Slurm gave this job 8 GPUs a node, but PyTorch" in capsys.readouterr().err) == (code == 2)


def test_missing_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["--config", "configs/nothing.yaml"]) == 2
    assert "There is no config file 'configs/nothing.yaml'" in capsys.readouterr().err


def test_check_writes_nothing(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_run("--check") == 0
    printed = capsys.readouterr().out
    assert "hidden_size: 32" in printed
    assert "parameters" in printed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    ["run.seed=5", "model.num_layers=3", "batch.global_batch_size=4", "tokenizer.name=text8", "optimizer.lr=1"],
)
def test_resume_with_another_meaning(
    train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    assert train_run("train.num_steps=3") == 0
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    for more in ([], ["--check"]):
        assert train_run(change, *more) == 2
        assert f"Differing: {change.split('=')[0]}:" in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


def test_resume_with_other_data(
    train_run: Train, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "own.txt"
    text.write_text(corpus.read_text())
    assert train_run(f"data.train={text}", "train.num_steps=3") == 0
    text.write_text(corpus.read_text().replace("fox", "cat"))
    assert train_run(f"data.train={text}") == 2
    assert "was trained on other data: data.train changed" in capsys.readouterr().err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "shard.00007.mds' is missing"),
    "truncated": (lambda path: os.truncate(path, 100), "shard.00007.mds' has 100 bytes"),
    "corrupt": (flip, "shard.00007.mds' is corrupt"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_ends_the_run(
    train_run: Train, tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    """At the start, or in the epoch that uses it: never a shorter epoch."""
    copy = shutil.copytree(shards, tmp_path / "shards")
    DAMAGES[damage][0](copy / "shard.00007.mds")
    assert train_run(f"data.train={copy}", "train.num_steps=100", "evaluate.every=1000") == 2
    assert DAMAGES[damage][1] in capsys.readouterr().err


def test_shards_of_another_length_and_tokenizer(
    train_run: Train, tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_run(f"data.train={shards}", "data.length=64", "tokenizer.name=text8") == 2
    message = capsys.readouterr().err
    assert "has rows of 32 tokens, but data.length=64" in message
    assert "was tokenised with 'bytes' (260 entries), but tokenizer.name='text8'" in message
    assert not (tmp_path / "run").exists()


def test_resume_with_other_shards(
    train_run: Train, tmp_path: Path, shards: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same text, but as one shard: another order of samples."""
    assert train_run(f"data.train={shards}", "train.num_steps=3") == 0
    assert train_run(f"data.train={corpus}") == 2
    assert "was trained on other data: data.train changed" in capsys.readouterr().err


def test_other_validation_rows_are_noted(train_run: Train, tmp_path: Path, shards: Path) -> None:
    assert train_run("train.num_steps=3") == 0
    assert train_run(f"data.validation={shards}") == 0
    assert "data.validation changed" in (tmp_path / "run" / "metrics.jsonl").read_text()


def test_folder_of_splits_names_them(
    train_run: Train, tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(shards, tmp_path / "mine" / "train")
    assert train_run(f"data.train={tmp_path / 'mine'}") == 2
    assert f"holds train; name one: {tmp_path / 'mine' / 'train'}." in capsys.readouterr().err


def test_shards_may_move(train_run: Train, tmp_path: Path, shards: Path) -> None:
    assert train_run(f"data.train={shards}", "train.num_steps=3") == 0
    assert train_run(f"data.train={shutil.copytree(shards, tmp_path / 'elsewhere')}") == 0


def test_folder_of_something_else(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    assert train_run() == 2
    assert "holds files but no run" in capsys.readouterr().err


def test_damaged_checkpoint(train_run: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_run("train.num_steps=3") == 0
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert train_run() == 2
    message = capsys.readouterr().err
    assert "step-000003 is damaged: rank-00000.safetensors does not have the sha256 of the manifest." in message
    assert "No other checkpoint is there." in message


def test_sample_of_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sample.main(["--checkpoint", str(tmp_path)]) == 2
    assert "is neither a checkpoint (step-...) nor a run directory" in capsys.readouterr().err


def test_one_message_and_no_traceback_from_the_shell(tmp_path: Path) -> None:
    command = [sys.executable, "mdlm_scale/train.py", "--config", DEBUG, f"run.dir={tmp_path / 'run'}", "model.heads=3"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("ConfigError: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
