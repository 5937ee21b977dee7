"""Plugs pulled from real runs: killed ranks, damaged files, a full disk, a second run; each goes on as if nothing was.

A run that was interrupted and started again with the same command must end with the weights, moments and averages of
one that was not, bit for bit on the same layout.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Train
from parity.ranks import free_port
from runs import SECONDS, ByHand, arguments, both, last_step, rows, tensors

from mdlm_scale.run import checkpoint

FSDP = ["parallel.engine=fsdp", "train.precision=float32", "evaluate.every=999", "checkpoint.every=2"]


def assert_same(run: Path, other: Path) -> None:
    ours, theirs = tensors(checkpoint.newest(run)), tensors(checkpoint.newest(other))
    assert ours.keys() == theirs.keys()
    assert [key for key, value in theirs.items() if not torch.equal(ours[key], value)] == []


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Twelve steps on two ranks, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "said").mkdir()
    both(ByHand(folder / "said"), arguments(folder / "run", corpus, *FSDP, "train.num_steps=12"))
    return folder / "run"


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not happen"
        time.sleep(0.001)


@pytest.mark.parametrize(("rank", "step"), [(0, 3), pytest.param(1, 7, marks=pytest.mark.slow)])
def test_killed_rank(by_hand: ByHand, tmp_path: Path, corpus: Path, whole: Path, rank: int, step: int) -> None:
    run = tmp_path / "run"
    given = arguments(run, corpus, *FSDP, "train.num_steps=12")
    by_hand.begin(2, given)
    wait_for(lambda: last_step(run) >= step)
    os.kill(by_hand.processes[rank].pid, signal.SIGKILL)  # type: ignore[arg-type]
    codes = [ended.code for ended in by_hand.ended(60.0)]
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] not in (0, -signal.SIGKILL)
    both(by_hand, given)
    assert_same(run, whole)


def test_killed_while_saving(by_hand: ByHand, tmp_path: Path, corpus: Path, whole: Path) -> None:
    run = tmp_path / "run"
    given = arguments(run, corpus, *FSDP, "train.num_steps=12")
    by_hand.begin(2, given)
    wait_for(lambda: any((run / "checkpoints").glob("step-*.tmp")))
    for process in by_hand.processes:
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    by_hand.ended(60.0)
    both(by_hand, given)
    assert_same(run, whole)
    assert not list((run / "checkpoints").glob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_during_the_save(
    by_hand: ByHand, tmp_path: Path, corpus: Path, whole: Path, number: signal.Signals
) -> None:
    """To one rank, then again and again to both: saved, exit code 85, and the run goes on."""
    run = tmp_path / "run"
    given = arguments(run, corpus, *FSDP)
    by_hand.begin(2, [*given, "train.num_steps=12"])
    wait_for(lambda: last_step(run) >= 3)
    os.kill(by_hand.processes[1].pid, number)  # type: ignore[arg-type]
    while any(process.is_alive() for process in by_hand.processes):
        for process in by_hand.processes:
            with contextlib.suppress(ProcessLookupError):
                if process.is_alive():
                    os.kill(process.pid, number)  # type: ignore[arg-type]
        time.sleep(0.01)
        if (run / "done").exists() or "saved; the same" in (run / "log.txt").read_text():
            break  # Python's own end restores the default handlers
    assert {ended.code for ended in by_hand.ended(60.0)} <= {0, 85}
    both(by_hand, [*given, "train.num_steps=12"])
    assert_same(run, whole)


@pytest.mark.parametrize("damage", [flip, cut_short, Path.unlink], ids=["flipped", "cut short", "missing"])
@pytest.mark.parametrize("file", ["rank-00001.safetensors", "manifest.json"])
def test_damaged_newest(
    by_hand: ByHand, tmp_path: Path, whole: Path, corpus: Path, file: str, damage: Callable[[Path], None]
) -> None:
    """It is told, and the one before is used."""
    if (file, damage) == ("manifest.json", flip):
        pytest.skip("a flipped bit may leave a manifest that says the same")
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "done").unlink()
    newest = run / "checkpoints" / "step-000012"
    damage(newest / file)
    both(by_hand, arguments(run, corpus, *FSDP, "train.num_steps=12"))
    log = (run / "log.txt").read_text()
    assert f"{newest} is damaged: {file}" in log
    assert f"resumed from {run / 'checkpoints' / 'step-000010'}" in log
    assert_same(run, whole)


def test_everything_damaged_is_no_new_beginning(by_hand: ByHand, tmp_path: Path, whole: Path, corpus: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (run / "done").unlink()
    for path in (run / "checkpoints").iterdir():
        flip(path / "rank-00000.safetensors")
    by_hand.begin(2, arguments(run, corpus, *FSDP, "train.num_steps=12"))
    ended = by_hand.ended(60.0)
    assert {rank.code for rank in ended} == {2}
    told = "".join(rank.err for rank in ended)
    assert "No other checkpoint is there. Bring back a copy, or remove these and the run begins anew." in told
    assert "Traceback" not in told


def test_second_run_in_one_directory(by_hand: ByHand, tmp_path: Path, corpus: Path) -> None:
    """The newer goes on, the older finds itself replaced at its next checkpoint, and shows nothing more."""
    run = tmp_path / "run"
    given = arguments(run, corpus, *FSDP, "train.num_steps=100000", "checkpoint.every=20")
    by_hand.begin(2, given)
    old = by_hand.processes
    wait_for(lambda: checkpoint.newest(run) is not None)
    by_hand.begin(2, given)
    new, by_hand.processes = by_hand.processes, old
    first, second = by_hand.ended(60.0)
    assert {first.code, second.code} == {2}
    assert "Attempt 1 at the run in" in first.err + second.err
    assert "was replaced by attempt 2" in first.err + second.err
    by_hand.processes = new
    assert all(process.is_alive() for process in new)
    newest = checkpoint.newest(run)
    wait_for(lambda: checkpoint.newest(run) != newest)  # they save, undisturbed
    os.kill(new[0].pid, signal.SIGTERM)  # type: ignore[arg-type]
    assert {ended.code for ended in by_hand.ended(60.0)} == {85}


@pytest.mark.slow
def test_rank_that_stops_answering(by_hand: ByHand, tmp_path: Path, corpus: Path) -> None:
    """Not dead, but silent: the other ends within the timeout, and says so."""
    run = tmp_path / "run"
    options = ["train.num_steps=100000", "parallel.timeout_minutes=0.05", "parallel.start_minutes=1"]
    by_hand.begin(2, arguments(run, corpus, *FSDP, *options))
    wait_for(lambda: last_step(run) >= 3)
    os.kill(by_hand.processes[1].pid, signal.SIGSTOP)  # type: ignore[arg-type]
    start = time.monotonic()
    by_hand.processes[0].join(60.0)
    assert by_hand.processes[0].exitcode == 1
    assert time.monotonic() - start < 40.0
    os.kill(by_hand.processes[1].pid, signal.SIGKILL)  # type: ignore[arg-type]
    assert checkpoint.newest(run) is not None


@pytest.mark.parametrize(
    "engine",
    [["parallel.engine=fsdp"], ["parallel.engine=deepspeed", "parallel.zero_stage=3"]],
    ids=["fsdp", "zero 3"],
)
def test_bad_data_on_one_rank(by_hand: ByHand, tmp_path: Path, corpus: Path, engine: list[str]) -> None:
    """Steps 5 and 6 give no number on rank 1, one may be skipped: all ranks return to step 4 and pass by. What comes
    out is what comes out where both are skipped one by one."""
    options = ["train.precision=float32", "evaluate.every=999", "checkpoint.every=2", "batch.micro_batch_size=4"]
    runs = {"rewound": "guard.max_skips=1", "skipped": "guard.max_skips=2"}
    for name, guard in runs.items():
        by_hand.processes, by_hand.port = [], free_port()
        given = arguments(tmp_path / name, corpus, *options, *engine, guard, "train.num_steps=10")
        for rank in range(2):
            by_hand.start(2, given, spoilt=frozenset({5, 6} if rank == 1 else ()))
        assert {ended.code for ended in by_hand.ended(SECONDS)} == {0}
        newest = checkpoint.newest(tmp_path / name)
        assert newest is not None
        state = checkpoint.read_manifest(newest)["state"]
        assert (state["step"], state["updates"], state["skipped_steps"]) == (10, 8, [5, 6])
    assert "back to step-000004; steps 5, 6 are left out" in (tmp_path / "rewound" / "log.txt").read_text()
    assert_same(tmp_path / "rewound", tmp_path / "skipped")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Three megabytes of memory, as a file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here (that needs root)")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_full_disk(train_run: Train, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One clear error, nothing half-written; with room again the same command goes on."""
    run = small_disk / "run"
    options = [f"run.dir={run}", "checkpoint.every=2", "checkpoint.keep=9", "evaluate.every=99"]  # 2 MB each
    assert train_run(*options, "train.num_steps=12") == 2
    message = capsys.readouterr().err
    assert "could not be written: No space left on device. Free some space" in message
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]
    subprocess.run(["mount", "-o", "remount,size=40m", str(small_disk)], check=True)
    assert train_run(*options, "train.num_steps=6") == 0


def test_disk_that_may_not_be_written(train_run: Train, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    assert train_run(f"run.dir={small_disk / 'run'}") == 2
    message = capsys.readouterr().err
    assert f"run.dir={small_disk / 'run'} cannot be written: [Errno 30] Read-only file system" in message


CLOCK = """
import sys, time
right = time.time
start = right()
time.time = lambda: right() + (3.0e9 if right() - start > 4 else -1.0e9)
from mdlm_scale import train
sys.exit(train.main())
"""


def test_clock_that_jumps(train_run: Train, tmp_path: Path, corpus: Path) -> None:
    """Decades forth and back: time limits and waits go by a clock that does not."""
    run = tmp_path / "clock"
    given = arguments(run, corpus, "train.precision=float64", "batch.micro_batch_size=4", "train.max_minutes=5")
    subprocess.run([sys.executable, "-c", CLOCK, *given], cwd=ROOT, check=True, timeout=SECONDS, capture_output=True)
    assert train_run() == 0
    assert_same(run, tmp_path / "run")


def test_bytes_read_are_the_ranks_share(by_hand: ByHand, tmp_path: Path, whole: Path, corpus: Path) -> None:
    """A rank of two reads a half of what is stored, give or take rows that do not divide; one rank reads all of it."""
    manifest = checkpoint.read_manifest(whole / "checkpoints" / "step-000012")
    stored = sum(4 * torch.Size(t["shape"]).numel() for t in manifest["tensors"].values()) / 1e6
    for ranks, share in ((2, 0.5), (1, 1.0)):
        run = tmp_path / str(ranks)
        shutil.copytree(whole, run)
        by_hand.begin(ranks, arguments(run, corpus, *FSDP, "train.num_steps=13"))
        assert {ended.code for ended in by_hand.ended(SECONDS)} == {0}
        (told,) = [row["message"] for row in rows(run, "event") if row["message"].startswith("resumed from")]
        read = float(told.rpartition(", ")[2].partition(" MB")[0])
        assert read == pytest.approx(share * stored, rel=0.1)
