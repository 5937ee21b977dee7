"""The benchmark of evaluation, end to end on a model that is trained for it, and its figures."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "bench_eval.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_it_trains_covers_and_compares(tmp_path: Path) -> None:
    file = tmp_path / "eval.json"
    done = run("--seeds", "2", "--steps", "2", "--rows", "24", "--draws", "2", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert {estimator: set(kinds) for estimator, kinds in result["coverage"].items()} == {
        "paper": {"fresh rows", "same rows"}, "count": {"fresh rows", "same rows"}
    }  # fmt: skip
    equal_cost = result["equal_cost"]
    assert equal_cost.keys() == {"iid", "paper", "count"}
    for name, figures in equal_cost.items():
        assert 4 < figures["nelbo"] < 8, name  # nearly untrained: log 259 = 5.56
        assert figures["se_mc_over_iid"] == pytest.approx(figures["se_mc"] / equal_cost["iid"]["se_mc"])


def test_one_draw_is_too_few() -> None:
    done = run("--draws", "1")
    assert done.returncode == 2
    assert "--draws 1 must be at least 2" in done.stderr
