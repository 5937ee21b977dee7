"""The benchmark of sampling: its two loops draw from one law, and what was not finished is marked."""

import importlib
import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mdlm_scale.config import DiffusionConfig
from mdlm_scale.diffusion import schedule
from mdlm_scale.diffusion.sample import Order, Rule

SMALL = ("--hidden", "16", "--layers", "1", "--heads", "2", "--vocab", "11", "--length", "6", "--batches", "2")
Run = Callable[..., str]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The tool on a tiny model, in this process; what it printed."""

    def called(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["bench_sample.py", *SMALL, *arguments])
        assert importlib.import_module("bench_sample").main() == 0
        return capsys.readouterr().out

    return called


def test_both_loops_draw_from_one_law() -> None:
    """1,000 samples of four tokens of each: the same mean nats of drawn tokens, and the same entropy."""
    bench = importlib.import_module("bench_sample")
    model = bench.random_model(Namespace(hidden=16, layers=1, heads=2, vocab=11, seed=0))
    model.head.weight.data *= 4  # far from equally likely tokens
    shape, rule, z_BL = schedule.from_config(DiffusionConfig()), Rule(10, 11, num_steps=3), torch.full((1000, 4), 10)
    with torch.inference_mode():
        ours = bench.ours(model, shape, Order.ancestral, rule, z_BL)
        theirs = bench.original(model, shape, rule, z_BL, minutes=1.0)
    assert ours.nll < 2.0 < 2.3 < float(torch.tensor(10.0).log()) + 1e-2  # the law is uneven
    assert ours.nll == pytest.approx(
        theirs.nll, abs=0.08
    )  # nats of a token spread by about 1: 1 / sqrt(4000) * 2 * 2.5
    assert ours.entropy == pytest.approx(theirs.entropy, abs=0.05)
    assert (ours.head_rows, theirs.head_rows) == (4000, 3 * 4000)


def test_figures_of_all_samplers(run: Run, tmp_path: Path) -> None:
    told = run("--steps", "20", "--json", str(tmp_path / "sample.json"))
    found = json.loads((tmp_path / "sample.json").read_text())
    assert [each["name"] for each in found] == ["ancestral", "first-hitting", "original"]
    assert all(each["finished"] and each["seconds"] > 0 and each["nll"] > 0 for each in found)
    assert "times less CPU time at the same law\n" in told


def test_an_unfinished_loop_is_told_to_be_an_estimate(run: Run) -> None:
    told = run("--steps", "1000000", "--minutes", "0.005")
    assert "* estimated: " in told
    assert "of 1000000 steps of the original" in told


def test_bad_arguments_are_told(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--steps", "0")
    assert "must be at least 1" in capsys.readouterr().err
