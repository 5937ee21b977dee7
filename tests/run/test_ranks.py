"""Whole runs on several ranks, through the launchers that users have: the same numbers, one folder, one message."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import DEBUG, ROOT, Train
from parity.ranks import free_port
from runs import SECONDS, ByHand, Ended, arguments, assert_close, both, rows, tensors

from mdlm_scale import config
from mdlm_scale.errors import EXIT_RUN_AGAIN
from mdlm_scale.parallel.groups import World
from mdlm_scale.run import checkpoint, main

LAUNCHERS = {
    "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", "PORT", "-m", "mdlm_scale.train"],
    "deepspeed": ["deepspeed", "--num_gpus", "2", "--master_port", "PORT", "mdlm_scale/train.py"],
}


def launch(launcher: str, given: list[str], seconds: float = SECONDS) -> Ended:
    """As a user would from the repository's folder."""
    name, *options = (str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher])
    command = [str(Path(sys.executable).with_name(name)), *options, *given]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its ranks
        try:
            _, err = process.communicate(timeout=40)
        finally:
            process.kill()
        raise AssertionError(f"{launcher} did not end within {seconds:.0f} s: {err}") from None
    return Ended(process.returncode, out, err)


def assert_one_run(run: Path, alone: Path, tolerance: float) -> None:
    """What ranks wrote together is one run, and the numbers are those of one process."""
    assert {path.name for path in run.iterdir()} == {
        "config.yaml", "metrics.jsonl", "log.txt", "attempts", "checkpoints", "done"
    }  # fmt: skip
    assert [row["step"] for row in rows(run, "train")] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(run, "eval")] == [3, 6]
    for key in ("loss", "grad_norm"):
        expected = [row[key] for row in rows(alone, "train")]
        assert [row[key] for row in rows(run, "train")] == pytest.approx(expected, rel=tolerance), key


@pytest.mark.parametrize(
    ("launcher", "overrides"),
    [
        # in float64 a quicker test does the same
        pytest.param("torchrun", ["parallel.engine=fsdp"], marks=pytest.mark.slow, id="torchrun"),
        pytest.param(
            "deepspeed", ["parallel.engine=deepspeed", "parallel.zero_stage=1"], marks=pytest.mark.slow, id="deepspeed"
        ),
    ],
)
def test_launcher(train_run: Train, tmp_path: Path, corpus: Path, launcher: str, overrides: list[str]) -> None:
    run, alone = tmp_path / "ranks", tmp_path / "alone"
    ended = launch(launcher, arguments(run, corpus, "train.precision=float32", *overrides))
    assert ended.code == 0, ended.err
    assert train_run(f"run.dir={alone}", "train.precision=float32") == 0
    # float32 sums in another order: 3e-9 in the loss and 2e-6 in the norm are measured
    assert_one_run(run, alone, 1e-5)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Six steps in float64, sharded over two ranks."""
    run = tmp_path_factory.mktemp("two") / "run"
    ended = launch("torchrun", arguments(run, corpus, "train.precision=float64", "parallel.engine=fsdp"))
    assert ended.code == 0, ended.err
    return run


def test_two_ranks_write_one_run(train_run: Train, tmp_path: Path, two_ranks: Path) -> None:
    assert train_run() == 0
    # float64 sums in another order, grown over six Adam steps
    assert_one_run(two_ranks, tmp_path / "run", 1e-11)


def test_checkpoint_of_two_ranks_is_that_of_one(train_run: Train, tmp_path: Path, two_ranks: Path) -> None:
    assert train_run() == 0
    # float64 sums in another order, grown over six Adam steps: 1e-14 is measured
    assert_close(tensors(checkpoint.newest(two_ranks)), tensors(checkpoint.newest(tmp_path / "run")), 1e-11)


def test_one_process_goes_on_from_two_ranks(train_run: Train, tmp_path: Path, two_ranks: Path) -> None:
    mixed, alone = shutil.copytree(two_ranks, tmp_path / "mixed"), tmp_path / "alone"
    for run in (mixed, alone):
        assert train_run(f"run.dir={run}", "train.num_steps=9") == 0
    # as above, with three steps more
    assert_close(tensors(checkpoint.newest(mixed)), tensors(checkpoint.newest(alone)), 1e-11)
    assert [row["step"] for row in rows(mixed, "train")] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_check_prints_the_plan_once_and_writes_nothing(tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    ended = launch("torchrun", arguments(run, corpus, "parallel.engine=fsdp", "--check"))
    assert ended.code == 0, ended.err
    assert ended.out.count("hidden_size: 32\n") == 1
    assert ended.out.count("# 2 ranks: dp 2, tp 1; engine fsdp\n") == 1
    assert not run.exists()


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(["parallel.engine=fsdp"], id="fsdp"),
        pytest.param(["parallel.engine=deepspeed", "parallel.zero_stage=0"], marks=pytest.mark.slow, id="zero 0"),
        pytest.param(["parallel.engine=deepspeed", "parallel.zero_stage=1"], id="zero 1"),
        pytest.param(["parallel.engine=deepspeed", "parallel.zero_stage=2"], marks=pytest.mark.slow, id="zero 2"),
        pytest.param(["parallel.engine=deepspeed", "parallel.zero_stage=3"], id="zero 3"),
        pytest.param(["parallel.engine=fsdp", "parallel.tp_size=2", "parallel.sequence_parallel=true"], id="fsdp tp"),
        pytest.param(
            ["parallel.engine=deepspeed", "parallel.zero_stage=3", "parallel.tp_size=2"],
            marks=pytest.mark.slow,
            id="zero 3 tp",
        ),
    ],
)
def test_ranks_go_on_bit_equal(by_hand: ByHand, tmp_path: Path, corpus: Path, engine: list[str]) -> None:
    """Masters, moments, averages and counters, stopped at step 3 and loaded by new processes."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = ["train.precision=float32", "evaluate.every=99", *engine]
    both(by_hand, arguments(whole, corpus, *options))
    both(by_hand, arguments(parts, corpus, *options, "train.num_steps=3"))
    both(by_hand, arguments(parts, corpus, *options))
    assert_close(tensors(checkpoint.newest(parts)), tensors(checkpoint.newest(whole)), 0.0)


@pytest.mark.parametrize("first", [1, 2], ids=["cut, then whole", "whole, then cut"])
def test_a_run_goes_on_with_another_tp_size(by_hand: ByHand, tmp_path: Path, corpus: Path, first: int) -> None:
    """A checkpoint has whole parameters, whoever wrote it."""
    mixed, alone = tmp_path / "mixed", tmp_path / "alone"
    options = ["train.precision=float64", "evaluate.every=99", "parallel.engine=fsdp"]
    sizes = ["parallel.tp_size=1", "parallel.tp_size=2"]
    both(by_hand, arguments(mixed, corpus, *options, sizes[first - 1], "train.num_steps=3"))
    both(by_hand, arguments(mixed, corpus, *options, sizes[2 - first]))
    both(by_hand, arguments(alone, corpus, *options))
    # float64 sums in another order, grown over six Adam steps
    assert_close(tensors(checkpoint.newest(mixed)), tensors(checkpoint.newest(alone)), 1e-11)


def test_ranks_with_other_settings_are_refused(by_hand: ByHand, tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    for lr in (1e-3, 2e-3):
        by_hand.start(2, arguments(run, corpus, "parallel.engine=fsdp", f"optimizer.lr={lr}"))
    first, second = by_hand.ended()
    assert (first.code, second.code) == (2, 2), (first, second)
    told = first.err + second.err
    assert told.count("The ranks differ: optimizer.lr is 0.001 on rank 0 and 0.002 on rank 1.") == 1
    assert "Traceback" not in told
    assert not run.exists()


def test_ranks_with_other_code_are_refused(tmp_path: Path, corpus: Path) -> None:
    """As on a node whose checkout is older: one line of one file is enough."""
    shutil.copytree(
        ROOT / "mdlm_scale", tmp_path / "older" / "mdlm_scale", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (tmp_path / "older" / "mdlm_scale" / "run" / "loop.py").open("a") as file:
        file.write("# a line\n")
    port = str(free_port())
    command = [sys.executable, "-m", "mdlm_scale.train", *arguments(tmp_path / "run", corpus, "parallel.engine=fsdp")]
    ranks = [
        subprocess.Popen(
            command, cwd=cwd, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                              "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
        )
        for rank, cwd in enumerate((ROOT, tmp_path / "older"))
    ]  # fmt: skip
    try:
        told = "".join(rank.communicate(timeout=SECONDS)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], told
    assert "The ranks differ: code of mdlm_scale is '" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [[], ["--check"]], ids=["train", "check"])
def test_text_that_one_rank_does_not_see(by_hand: ByHand, tmp_path: Path, corpus: Path, options: list[str]) -> None:
    """As on a node where a folder is not mounted: found before anything is written."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for cwd in (corpus.parent, elsewhere):
        by_hand.start(2, arguments(run, corpus.name, "parallel.engine=fsdp", *options), cwd)
    first, second = by_hand.ended()
    assert (first.code, second.code) == (2, 2), (first, second)
    assert f"data.train: '{corpus.name}' does not exist" in second.err
    assert "ended by the failure of rank 1: " in first.err
    assert f"data.train: '{corpus.name}' does not exist" in first.err
    assert "Traceback" not in first.err + second.err
    assert not run.exists()


def test_shard_that_is_damaged_on_one_rank(by_hand: ByHand, tmp_path: Path, shards: Path) -> None:
    """Found in the middle of training, while the other rank waits inside the engine for gradients."""
    run, copy = tmp_path / "run", shutil.copytree(shards, tmp_path / "copy" / shards.name)
    for file in sorted(copy.glob("*.mds"))[::8]:
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    long = ["parallel.engine=fsdp", "train.num_steps=100", "evaluate.every=1000"]
    for cwd in (shards.parent, copy.parent):
        by_hand.start(2, arguments(run, shards.name, *long), cwd)
    first, second = by_hand.ended()
    assert (first.code, second.code) == (2, 2), (first, second)
    assert rows(run, "train"), "found before training"
    for ended in (first, second):
        assert ".mds' is corrupt" in ended.err
        assert "Traceback" not in ended.err
    assert not (run / "done").exists()


def test_plain_engine_is_for_one_process(by_hand: ByHand, tmp_path: Path, corpus: Path) -> None:
    for _ in range(2):
        by_hand.start(2, arguments(tmp_path / "run", corpus, "parallel.engine=plain"))
    ended = by_hand.ended()
    assert [rank.code for rank in ended] == [2, 2], ended
    assert "".join(rank.err for rank in ended) == (
        "ConfigError: parallel.engine=plain runs one process, but there are 2 with parallel.tp_size=1. "
        "Choose parallel.engine=fsdp or deepspeed, or start one process.\n"
    )
    assert not (tmp_path / "run").exists()


def test_signal_to_one_rank_stops_all_after_the_same_step(by_hand: ByHand, tmp_path: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    written = run / "metrics.jsonl"
    endless = ["train.num_steps=100000", "evaluate.every=100000", "checkpoint.every=100000"]
    ranks = [by_hand.start(2, arguments(run, corpus, "parallel.engine=fsdp", *endless)) for _ in range(2)]
    deadline = time.monotonic() + 60
    while not (written.exists() and written.read_text().count("\n") > 3):
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.02)
    assert ranks[1].pid is not None
    os.kill(ranks[1].pid, signal.SIGTERM)
    ended = by_hand.ended()
    assert [rank.code for rank in ended] == [EXIT_RUN_AGAIN] * 2, ended
    saved = checkpoint.newest(run)
    assert saved is not None
    assert saved.name == f"step-{rows(run, 'train')[-1]['step']:06d}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["parallel.engine=deepspeed", "parallel.replicate_size=2"],
            "parallel.replicate_size=2 is a setting of parallel.engine=fsdp, not of deepspeed.",
        ),
        (
            ["parallel.engine=fsdp", "parallel.deepspeed.zero_optimization.reduce_bucket_size=1"],
            "parallel.deepspeed={'zero_optimization': {'reduce_bucket_size': 1}} is a setting of "
            "parallel.engine=deepspeed, not of fsdp.",
        ),
        (
            ["parallel.engine=fsdp", "parallel.zero_stage=3"],
            "parallel.zero_stage=3 is a setting of parallel.engine=deepspeed, not of fsdp.",
        ),
    ],
    ids=["replicas", "deepspeed's JSON", "zero stage"],
)
def test_setting_of_another_engine_is_refused(overrides: list[str], expected: str) -> None:
    """It would have no effect, and a user may believe that it had."""
    assert main.faults(config.load(DEBUG, overrides), World(0, 2, 0)) == [expected]


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (
            ["parallel.tp_size=3"],
            3,
            "parallel.tp_size=3 does not divide model.num_heads=4, and a head is not cut. These do: 1, 2, 4.",
        ),
        (
            ["parallel.tp_size=4", "parallel.sequence_parallel=true", "data.length=30"],
            4,
            "data.length=30 is not a multiple of parallel.tp_size=4, so that parallel.sequence_parallel cannot deal "
            "the positions evenly. Nearest that work: 28 or 32; or switch it off.",
        ),
        (
            ["parallel.sequence_parallel=true"],
            2,
            "parallel.sequence_parallel is for parallel.tp_size above 1: the ranks that share matrices do it.",
        ),
        (
            ["parallel.compile=true", "parallel.recompute=selective"],
            2,
            "parallel.recompute=selective is not for compiled blocks (parallel.compile=true), which choose by "
            "themselves what to compute again. Use recompute=none or full, or compile=false.",
        ),
        (
            ["parallel.tp_size=2"],
            3,
            "3 ranks cannot be laid out as tp_size * replicate_size * shards = 2 * 1 * shards: 2 does not divide 3. "
            "Nearest that work: 2 or 4 ranks, or parallel.tp_size=1 and parallel.replicate_size=1 on 3.",
        ),
    ],
    ids=["heads", "length", "no tp", "compiled", "world size"],
)
def test_layout_that_cannot_cut_the_model(overrides: list[str], world_size: int, expected: str) -> None:
    given = config.load(DEBUG, ["parallel.engine=fsdp", *overrides])
    assert main.faults(given, World(0, world_size, 0)) == [expected]


def test_tensor_parallel_ranks_on_several_machines_are_told_the_price(
    by_hand: ByHand, tmp_path: Path, corpus: Path
) -> None:
    """A block sums two outputs and two gradients a micro-batch, 2 rows of 32 x 32 float32 each; beside them the
    embedding, half of the hidden rows, and three numbers for each of these. In a ring of two a rank sends as many
    bytes as a sum has, and half of those that an all-gather makes."""
    by_hand.local_size = 1
    both(by_hand, arguments(tmp_path / "run", corpus, "parallel.engine=fsdp", "parallel.tp_size=2"))
    layers, micro, rows = config.load(DEBUG).model.num_layers, 4, 2 * 32
    sent = micro * (4 * 32 * (rows * (4 * layers + 1) + rows // 2) + 3 * rows // 2 * 4 * 2 // 2)
    told = (tmp_path / "run" / "log.txt").read_text()
    assert "parallel.tp_size=2 reaches over machines, which have 1 ranks each" in told
    assert f"sends {sent / 1e9:,.3g} GB between them, and waits for it. With parallel.tp_size=1" in told


@pytest.mark.parametrize("missing", ["deepspeed", "megatron.core"])
def test_package_that_is_not_installed(tmp_path: Path, corpus: Path, missing: str) -> None:
    engine, needs, name = {
        "deepspeed": (["parallel.engine=deepspeed"], "parallel.engine=deepspeed needs DeepSpeed", "deepspeed=="),
        "megatron.core": (
            ["parallel.engine=fsdp", "parallel.tp_size=2"], "parallel.tp_size=2 needs megatron-core", "megatron-core"
        ),
    }[missing]  # fmt: skip
    given = arguments(tmp_path / "run", corpus, *engine, "--check")
    program = f"import sys; sys.modules['{missing}'] = None; from mdlm_scale import train; sys.exit(train.main())"
    command = [sys.executable, "-c", program, *given]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert f"{needs}, which cannot be imported" in ended.stderr
    assert f"pip install {name}" in ended.stderr
    assert not (tmp_path / "run").exists()
