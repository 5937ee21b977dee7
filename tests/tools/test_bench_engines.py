"""The benchmark of engines compares like with like, and counts every byte of a rank once."""

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from parity.ranks import run_ranks

from mdlm_scale.config import BatchConfig
from mdlm_scale.parallel.groups import Groups

TOOLS = Path(__file__).resolve().parents[2] / "tools"
VOCAB = 61
SMALL = Namespace(width=32, layers=2, heads=4, length=16)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported(monkeypatch)


def imported(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(TOOLS)])  # last: tools/parity.py would hide the package `parity`
    return importlib.import_module("bench_engines")


def weights_after_rounds(groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
    """On one rank: every loop's weights after some steps."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        bench = imported(monkeypatch)
    config = replace(bench.config_of(SMALL), batch=BatchConfig(2, 2))
    loops = bench.make_loops(config, VOCAB, groups)
    rounds = bench.timed_rounds(loops, bench.make_batch(config, VOCAB, range(2)), num_rounds=1)
    assert [set(seconds) for seconds in rounds] == [{"bare", *bench.ENGINES}]
    names = [name for name, _ in loops["bare"].model.named_parameters()]
    return {key: {name: loop.full_parameter(name).clone() for name in names} for key, loop in loops.items()}


def test_engines_compute_what_the_bare_loop_does(bench: ModuleType) -> None:
    [found] = run_ranks(weights_after_rounds, 1)
    fresh = {name: bench.initial(name, 0, p.numel()).view(p.shape) for name, p in found["bare"].items()}
    assert any((p - fresh[name]).abs().max() > bench.LR for name, p in found["bare"].items())  # it has learned
    for engine in bench.ENGINES:
        # steps are of the size of LR; rounding a small part of that
        torch.testing.assert_close(found[engine], found["bare"], rtol=0.0, atol=1e-2 * bench.LR, msg=engine)


def test_storages_are_counted_once_and_gradients_too(bench: ModuleType) -> None:
    before = bench.live_bytes()
    p = torch.ones(1000, requires_grad=True)
    views = [p.detach()[:10], p.detach().view(10, 100)]
    assert bench.live_bytes() - before == 4000
    p.sum().backward()
    meta = torch.empty(1000, device="meta")
    assert bench.live_bytes() - before == 8000
    del p, views, meta
    assert bench.live_bytes() == before


def test_bytes_of_two_ranks_are_those_foretold(bench: ModuleType) -> None:
    engine = bench.ENGINES["fsdp"]
    config = replace(bench.config_of(SMALL), parallel=engine, batch=BatchConfig(8, 2))
    counts = run_ranks(bench.counted_bytes, 2, config, VOCAB)
    formula = sum(bench.sizes(config.model, VOCAB, SMALL.length).state_bytes(engine, 2, 4).values())
    # rows are dealt whole, the odd one to the first rank; and there is a counter of Adam for each parameter
    assert sum(max(both) for both in counts) / 2 == pytest.approx(formula, rel=0.05)


def test_the_time_of_one_number_of_tokens_is_json() -> None:
    small = ["--width", "16", "--layers", "1", "--heads", "2", "--vocab", "11", "--length", "8", "--tokens", "16"]
    command = [sys.executable, str(TOOLS / "bench_engines.py"), *small, "--rounds", "2", "--time", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens"] == 16
    assert result["bare_seconds"] > 0
    assert result["engines"].keys() == {"plain", "zero0", "zero1", "zero2", "zero3", "fsdp"}
    assert all(each.keys() == {"ratio", "ratio_se", "seconds"} for each in result["engines"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "100", "--length", "64"), "--tokens 100 is not a multiple of --length 64"),
        (("--rounds", "1"), "--rounds 1 must be at least 2"),
    ],
)
def test_bad_arguments_are_told(
    bench: ModuleType,
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_engines.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        bench.arguments()
    assert message in capsys.readouterr().err
