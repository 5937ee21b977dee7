"""The benchmarks compare like with like: their variants compute the same numbers, and what does not fit is skipped."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "bench_masked_ce.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("variant", ["original", "gather"])
def test_the_usual_ways_compute_our_loss_and_gradients(variant: str) -> None:
    bench = importlib.import_module("bench_masked_ce")
    generator = torch.Generator().manual_seed(0)
    parameters = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in [(9, 4), (7, 4), (7,)]
    ]
    x_N, rows_M = torch.arange(9) % 6, torch.tensor([0, 3, 4, 8])
    w_M = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)

    def outcome(name: str) -> list[torch.Tensor]:
        loss = bench.VARIANTS[name](*parameters, x_N, rows_M, w_M)
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    torch.testing.assert_close(outcome(variant), outcome("ours"), rtol=0.0, atol=1e-12)


def test_the_originals_blocks_compute_what_ours_do() -> None:
    bench = importlib.import_module("bench_step")
    args = Namespace(size="debug", tokens=32, length=16, vocab=50, dtype="float32", dropout=0.0)
    setting = bench.make_setting(args)
    model = bench.filled(setting)
    ours = model.hidden(setting.batch.z_BL, setting.batch.sigma_B, None)
    theirs = bench.originals_hidden(model, setting.batch)
    torch.testing.assert_close(theirs, ours, rtol=0.0, atol=1e-5)  # float32 values of order one


@pytest.mark.slow
def test_a_step_and_its_parts_are_timed(tmp_path: Path) -> None:
    small = ["--size", "debug", "--tokens", "64", "--length", "16", "--vocab", "50", "--repeat", "1"]
    command = [sys.executable, str(TOOLS / "bench_step.py"), *small, "--json", str(tmp_path / "step.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "step.json").read_text())["forward_backward_seconds"] > 0


def test_data_readers_read_the_same_and_are_timed(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, str(TOOLS / "bench_data.py"), "--rows", "200", "--length", "16", "--batch", "8"]
    settings = ["--repeat", "1", "--text", str(corpus), "--text-mb", "0.01", "--tokenizer", "bytes"]
    done = subprocess.run(
        [*command, *settings, "--json", str(tmp_path / "data.json")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "data.json").read_text())
    assert result["tokens_per_second"].keys() == {"memmap", "ours", "streaming"}
    assert result["first_batch_seconds"].keys() == {"0", "1000", "1000000"}
    assert result["preparing_share"] > 0


def test_one_variant_reports_time_share_and_memory() -> None:
    done = run("--variant", "ours", "--tokens", "64", "--d", "16", "--vocab", "101", "--repeat", "1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() == {"seconds", "share_of_limit", "peak_mb"}
    assert result["seconds"] > 0


@pytest.mark.slow
def test_a_cut_vocabulary_is_timed_beside_the_whole(tmp_path: Path) -> None:
    small = ("--tokens", "64", "--d", "16", "--vocab", "101", "--repeat", "1", "--threads", "2")
    done = run("--tp", "2", *small, "--json", str(tmp_path / "ce.json"))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "ce.json").read_text())
    assert result.keys() == {"whole", "cut"}
    assert all(figure > 0 for each in result.values() for figure in each.values())


def test_what_does_not_fit_is_skipped_and_null(tmp_path: Path) -> None:
    done = run("--tokens", str(10**12), "--json", str(tmp_path / "ce.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: about") == 4
    assert json.loads((tmp_path / "ce.json").read_text()) == dict.fromkeys(("original", "gather", "compiled", "ours"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--masked-fraction", "0"), "--masked-fraction 0.0 must lie in (0, 1]"),
        (("--vocab", "1"), "--vocab 1 must be at least 2"),
    ],
)
def test_bad_arguments_are_told(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
