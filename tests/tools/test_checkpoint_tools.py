"""Tools that look at checkpoints, time them and torture runs: what they print, write and return."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Train

from mdlm_scale.run import checkpoint


def run(tool: str, *arguments: str, seconds: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / tool), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds)


def test_inspect_tells_what_is_there_and_what_is_wrong(train_run: Train, tmp_path: Path) -> None:
    assert train_run() == 0
    folder, told = tmp_path / "run", tmp_path / "told.json"
    done = run("inspect_ckpt.py", str(folder), "--verify", "--json", str(told))
    assert done.returncode == 0, done.stderr
    found = json.loads(told.read_text())["checkpoints"]
    assert [each["state"]["step"] for each in found] == [3, 6]
    assert all(each["faults"] == [] and each["elements"]["model"] == 66_020 for each in found)
    assert done.stdout.count("sound: every hash is right") == 2
    newest = checkpoint.newest(folder)
    assert newest is not None
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert run("inspect_ckpt.py", str(newest)).returncode == 0  # names and sizes are right
    done = run("inspect_ckpt.py", str(newest), "--verify")
    assert done.returncode == 1
    assert "DAMAGED: rank-00000.safetensors does not have the sha256 of the manifest" in done.stdout
    (newest / "manifest.json").unlink()
    assert run("inspect_ckpt.py", str(newest)).returncode == 1


def test_inspect_of_nothing(tmp_path: Path) -> None:
    done = run("inspect_ckpt.py", str(tmp_path))
    assert done.returncode == 2
    assert "is neither a checkpoint (step-...) nor a run directory" in done.stderr


def test_saves_are_timed(tmp_path: Path) -> None:
    small = ("--mb", "1", "--tokens", "128", "--rounds", "1", "--json", str(tmp_path / "ckpt.json"))
    done = run("bench_ckpt.py", *small)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "ckpt.json").read_text())
    assert result["read_mb"] == pytest.approx(result["state_mb"])
    assert 0 < result["asynchronous"]["wait_seconds"] < result["asynchronous"]["seconds"]


@pytest.mark.slow
def test_tortured_runs_end_equal(tmp_path: Path) -> None:
    """P4."""
    done = run("torture.py", "--runs", "3", "--json", str(tmp_path / "torture.json"), seconds=600.0)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "torture.json").read_text())
    assert (result["runs"], result["equal"], result["lost"], result["repeated"]) == (3, 3, 0, 0)
    assert result["interruptions"] >= 6
