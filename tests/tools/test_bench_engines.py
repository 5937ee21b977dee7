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

from mdlm_scale.config import BatchConfig, EngineName
from mdlm_scale.parallel.groups import Groups

TOOLS = Path(__file__).resolve().parents[2] / "tools"
VOCAB = 61
SMALL = Namespace(width=32, layers=2, heads=4, length=16)


@pytest.fixture
def bench() -> ModuleType:
    return importlib.import_module("bench_engines")


def weights_after_rounds(groups: Groups) -> dict[str, dict[str, torch.Tensor]]:
    """On one rank: every loop's weights after some steps."""
    bench = importlib.import_module("bench_engines")
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


LAYOUTS = importlib.import_module("bench_engines").LAYOUTS


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (ranks > 2)) for name, (ranks, _) in LAYOUTS.items()]
)
def test_collectives_of_a_step_are_those_foretold(bench: ModuleType, name: str) -> None:
    """Every one of them, on every rank; only DeepSpeed's buckets have padding."""
    world_size, parallel = LAYOUTS[name]
    batch = BatchConfig(4 * world_size // parallel.tp_size, 2)
    config = replace(bench.config_of(SMALL), parallel=parallel, batch=batch)
    for rows in run_ranks(bench.collective_rows, world_size, config, VOCAB, tp_size=parallel.tp_size):
        assert [row for row in rows if not bench.is_as_foretold(row)] == []
        found = {(row["group"], row["kind"]) for row in rows}
        assert {("tp", "all-gather"), ("tp", "all-reduce")} <= found or parallel.tp_size == 1
        assert {group for group, _ in found} & {"tp", "dp", "replicas"}
        hooks = [row["hooks"] for row in rows if row["hooks"]]
        per_parameter = parallel.sequence_parallel and parallel.engine is EngineName.deepspeed and parallel.zero_stage
        # 4 of the time embedding, 5 a block, 3 at the end; after each of two micro-batches
        assert hooks == ([2 * (4 + 5 * SMALL.layers + 3)] if per_parameter else [])


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
