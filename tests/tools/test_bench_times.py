"""The benchmark of time sampling: its estimates are what they say, and its runs differ in nothing else."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOL = Path(__file__).resolve().parents[2] / "tools" / "bench_times.py"
SMALL = (
    "data.length=32", "model.hidden_size=16", "model.num_layers=1", "batch.global_batch_size=8",
    "batch.micro_batch_size=8", "optimizer.warmup_steps=1", "evaluate.rows=16",
)  # fmt: skip


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("bench_times")


def test_variance_is_split_without_bias(bench: ModuleType) -> None:
    """Over all 3^4 outcomes of two draws of times with two draws of masks: the mean is exact."""
    mean, spread, between = 2.0, (-1.0, 0.0, 1.0), (-3.0, 0.0, 3.0)
    found = []
    for i in range(3):
        for j in range(3):
            for bits in range(3**4):
                b = [spread[bits // 3**n % 3] for n in range(4)]
                times = between[i], between[j]
                vectors_MKP = torch.tensor(
                    [[[mean + times[k] + b[2 * k + m]] for k in range(2)] for m in range(2)], dtype=torch.float64
                )
                found.append(bench.variances(bench.inner_products(vectors_MKP)))
    square, variance, from_times = (math.fsum(column) / len(found) for column in zip(*found, strict=True))
    # values -c, 0, c have the variance 2 c^2 / 3; sums of short decimals, so only rounding is allowed
    assert square == pytest.approx(mean**2, abs=1e-12)
    assert variance == pytest.approx(2 / 3 + 6, abs=1e-12)
    assert from_times == pytest.approx(6, abs=1e-12)


def test_jackknife_of_a_mean_is_its_standard_error(bench: ModuleType) -> None:
    values = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0], dtype=torch.float64)
    products = bench.inner_products(torch.stack([values, values])[..., None].sqrt())
    mean, se = bench.jackknife(lambda products: float(products[0, :, 0].trace()) / products.shape[1], products)
    assert mean == pytest.approx(float(values.mean()))
    assert se == pytest.approx(float(values.std()) / math.sqrt(len(values)))


def test_a_small_comparison(tmp_path: Path, corpus: Path) -> None:
    """Every figure is there, differences are to the first of --times, and the runs differ in their times alone."""
    command = [sys.executable, str(TOOL), "--text", str(corpus), "--times", "iid", "lattice", "--seeds", "0", "1"]
    small = ["--steps", "4", "--draws", "5", "--output", str(tmp_path / "out"), "--json", str(tmp_path / "t.json")]
    done = subprocess.run([*command, *small, *SMALL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "t.json").read_text())
    first, other = result["validation"]["iid"], result["validation"]["lattice"]
    assert (first["difference"], first["difference_se"]) == (0.0, 0.0)
    assert other["difference"] == pytest.approx(sum(other["difference_of_seeds"]) / 2)
    assert other["difference"] == pytest.approx(other["nelbo"] - first["nelbo"])
    assert len(set(other["difference_of_seeds"])) == 2
    assert other["curve"].keys() == {"1", "2", "3", "4"}
    for rows in result["noise"].values():
        assert all(row["noise"] > 0 and row["noise_se"] > 0 for row in rows.values())
    assert result["noise"]["iid"]["gradient"]["ratio"] == 1.0
    assert "gradient, lattice" in done.stdout
    settings = [(tmp_path / "out" / run / "config.yaml").read_text().splitlines() for run in ("iid-0", "lattice-0")]
    differing = [one for one, two in zip(*settings, strict=True) if one != two]
    assert [line.split(":")[0].strip() for line in differing] == ["dir", "time_sampling"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--steps", "3"), "--steps 3 must be at least 4"),
        (("--draws", "2"), "--draws 2 must be at least 3"),
        (("--times", "iid", "iid"), "--times iid iid names one twice"),
        (("--json", "no/where.json"), "--json no/where.json cannot be written"),
        (("--steps", "20"), "optimizer.cosine_steps=20 must be above warmup_steps=50"),
        (("--text", "nowhere", "--steps", "20"), "2 faults"),
    ],
)
def test_bad_arguments_are_told_before_work(given: tuple[str, ...], message: str, tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, str(TOOL), "--text", str(corpus), "--output", str(tmp_path / "out"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
