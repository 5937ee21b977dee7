"""Which rank this is, as each launcher says it; what ranks tell each other, and how they end when one of them fails."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.ranks import free_port, run_ranks

from mdlm_scale.errors import ConfigError, DataError, TrainingError, UserError
from mdlm_scale.parallel import groups as groups_module
from mdlm_scale.parallel.groups import Groups, World, world

CPU = torch.device("cpu")
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, World(rank=5, size=8, local_rank=1)),
        (SLURM, World(rank=3, size=6, local_rank=2)),
        (SLURM | TORCHRUN, World(rank=5, size=8, local_rank=1)),  # torchrun inside a Slurm job
        ({}, World(rank=0, size=1, local_rank=0)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, World()),  # a job's shell, not started by srun
        (TORCHRUN | {"OMPI_COMM_WORLD_SIZE": "8"}, World(rank=5, size=8, local_rank=1)),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, World()),
    ],
    ids=["torchrun", "slurm", "torchrun in slurm", "alone", "shell of a slurm job", "torchrun in MPI", "MPI of one"],
)
def test_rank_comes_from_the_launcher(environment: dict[str, str], expected: World) -> None:
    assert world(environment) == expected


@pytest.mark.parametrize("name", TORCHRUN)
def test_incomplete_launcher_names_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"but not {name}; it must set all three"):
        world({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("rank", ["8", "-1", "first"])
def test_rank_must_be_below_the_number_of_processes(rank: str) -> None:
    with pytest.raises(ConfigError, match="no rank below a number of processes"):
        world(TORCHRUN | {"RANK": rank})


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE"])
def test_launcher_that_sets_no_rank_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"started 4 processes \({name}\) but set no RANK.*Use torchrun"):
        world({name: "4"})


@pytest.mark.parametrize("name", LOCAL_SIZES)
def test_local_size_is_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in LOCAL_SIZES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "4")
    assert World(5, 8, 1).local_size == 4


@pytest.mark.parametrize("said", [None, "", "8(x2)"])
def test_local_size_is_everybody_if_the_launcher_is_silent(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    for name in LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv("SLURM_NTASKS_PER_NODE", said)
    assert World(5, 8, 1).local_size == 8


def test_sum_over_one_rank_is_the_value() -> None:
    assert Groups().sum([1.5, 2.0]) == [1.5, 2.0]


@pytest.mark.parametrize("flag", [True, False])
def test_any_of_one_rank_is_its_flag(flag: bool) -> None:
    assert Groups().any(flag) is flag


def test_gather_of_one_rank_is_its_word() -> None:
    assert Groups().gather({"a": [1, None]}) == [{"a": [1, None]}]


def test_one_rank_agrees_with_itself() -> None:
    Groups().agree("The ranks differ", {"optimizer.lr": 1.0})


def sums(groups: Groups) -> list[float]:
    rank = groups.ranks.rank
    return groups.sum([10.0**rank, 2.0**-60 if rank == 0 else 0.0])


def test_sum_reaches_all_ranks() -> None:
    """In float64, where these sums are exact."""
    assert run_ranks(sums, 3) == [[111.0, 2.0**-60]] * 3


def any_of(groups: Groups) -> list[bool]:
    rank = groups.ranks.rank
    return [groups.any(flag) for flag in (False, rank == 2, rank != 0, True)]


def test_any_is_true_if_one_rank_says_so() -> None:
    assert run_ranks(any_of, 3) == [[False, True, True, True]] * 3


WORDS: list[Any] = [None, {"name": "ä" * 300, "list": [1, 2.5, {"deep": True}]}, "short"]


def gathered(groups: Groups) -> list[Any]:
    return groups.gather(WORDS[groups.ranks.rank])


def test_gather_keeps_values_of_different_sizes_in_order() -> None:
    assert run_ranks(gathered, 3) == [WORDS] * 3


def agreement(groups: Groups, facts: list[dict[str, Any]]) -> str | None:
    try:
        groups.agree("The ranks differ", facts[groups.ranks.rank])
    except ConfigError as error:
        return str(error)
    return None


def test_equal_facts_agree_in_any_order() -> None:
    facts = [{"a": 1, "b": [2]}, {"b": [2], "a": 1}]
    assert run_ranks(agreement, 2, facts) == [None, None]


def test_every_difference_is_named_on_all_ranks() -> None:
    facts = [{"lr": 1e-3, "seed": 0, "dir": "runs"}, {"lr": 1e-3, "seed": 5}, {"lr": 2.0, "seed": 0, "dir": "runs"}]
    message = """4 faults:
  - The ranks differ: dir is 'runs' on rank 0 and None on rank 1.
  - The ranks differ: lr is 0.001 on rank 0 and 2.0 on rank 2.
  - The ranks differ: seed is 0 on rank 0 and 5 on rank 1.
  - All ranks must run the same code with the same settings on the same data."""
    assert run_ranks(agreement, 3, facts) == [message] * 3


@pytest.fixture
def meeting_point(monkeypatch: pytest.MonkeyPatch) -> str:
    """A place to meet where nobody is."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    return f"127.0.0.1:{os.environ['MASTER_PORT']}"


def test_rank_that_does_not_come_is_named(meeting_point: str) -> None:
    with pytest.raises(TrainingError, match=rf"1 of 2 ranks came to {meeting_point} within 1 s; missing: 1\."):
        Groups(World(0, 2, 0), seconds=1)


def test_nobody_at_the_meeting_point(meeting_point: str) -> None:
    start = time.monotonic()
    with pytest.raises(TrainingError, match=f"Rank 1 could not meet the others at {meeting_point}"):
        Groups(World(1, 2, 1), seconds=1)
    # PyTorch tries twice, with a pause in between; the default would be minutes
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_port_must_be_a_port(meeting_point: str, monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ConfigError, match=f"MASTER_PORT={port} must be a port of MASTER_ADDR"):
        Groups(World(0, 2, 0), seconds=1.0)


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT"])
def test_missing_meeting_point_is_named(monkeypatch: pytest.MonkeyPatch, meeting_point: str, name: str) -> None:
    monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=f"2 processes need {name}: "):
        Groups(World(0, 2, 0), seconds=1)


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, what it wrote to standard error."""

    code: int | None
    said: str


Life = Callable[[Groups], None]
NUM_RANKS = 3


def live(life: Life, folder: Path, seconds: float = 40.0) -> list[Ended]:
    """`life(groups)` on every rank, as an entry point would run it; an error if one has not ended after `seconds`."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    files = [folder / f"rank-{rank}" for rank in range(NUM_RANKS)]
    processes = [
        context.Process(target=_live, args=(World(rank, NUM_RANKS, rank), port, life, file))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + seconds
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    ended = [Ended(code, file.read_text()) for code, file in zip(codes, files, strict=True)]
    assert None not in codes, f"a rank was still there after {seconds:.0f} s: {ended}"
    return ended


def _live(ranks: World, port: int, life: Life, file: Path) -> None:
    """In the process of a rank. The times are shorter than a user's, in the same order."""
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    groups_module.WATCH_SECONDS, groups_module.OWN_END_SECONDS, groups_module.GRACE_SECONDS = 0.2, 1.0, 2.0
    try:
        with Groups(ranks, seconds=30.0) as groups:
            life(groups)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def others_wait(groups: Groups, failing: int, meanwhile: str, error: Exception) -> None:
    """One rank fails while the others meet, wait for it or are busy; without its word they would stay for minutes."""
    if meanwhile != "meeting":
        groups.open(CPU, timeout_minutes=10.0)
    if groups.ranks.rank == failing:
        time.sleep(0.5)  # the others are there by then
        raise error
    if meanwhile == "meeting":
        groups.open(CPU, timeout_minutes=10.0)
    elif meanwhile == "in a collective":
        groups.sum([1.0])
    else:
        time.sleep(600)


@pytest.mark.parametrize("meanwhile", ["meeting", "in a collective", "busy"])
@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_one_rank_ends_all_with_its_message(tmp_path: Path, failing: int, meanwhile: str) -> None:
    error = DataError("shard 7 is gone")
    ended = live(partial(others_wait, failing=failing, meanwhile=meanwhile, error=error), tmp_path)
    assert [rank.code for rank in ended] == [2] * NUM_RANKS, ended
    assert ended.pop(failing).said == "DataError: shard 7 is gone\n"
    for other in ended:
        assert f"ended by the failure of rank {failing}: shard 7 is gone\n" in other.said
        assert "Traceback" not in other.said


def test_bug_on_one_rank_ends_the_others_without_its_traceback(tmp_path: Path) -> None:
    error = ValueError("no such thing")
    ended = live(partial(others_wait, failing=1, meanwhile="in a collective", error=error), tmp_path)
    assert [rank.code for rank in ended] == [1] * NUM_RANKS, ended
    assert "Traceback" in ended.pop(1).said
    for other in ended:
        assert "ended by the failure of rank 1: ValueError: no such thing\n" in other.said
        assert "Traceback" not in other.said


def killed(groups: Groups, rank: int) -> None:
    groups.open(CPU, timeout_minutes=10.0)
    if groups.ranks.rank == rank:
        time.sleep(0.5)  # the others are in the collective by then
        os.kill(os.getpid(), signal.SIGKILL)
    groups.sum([1.0])


def test_killed_rank_ends_the_others(tmp_path: Path) -> None:
    ended = live(partial(killed, rank=1), tmp_path)
    assert [rank.code for rank in ended] == [1, -signal.SIGKILL, 1], ended
    survivors = [rank.said for rank in ended if rank.code == 1]
    assert all("a rank is gone without a word: it was killed" in said for said in survivors), survivors


def test_killed_rank_0_ends_the_others(tmp_path: Path) -> None:
    """It held the store, through which ranks tell of failures."""
    ended = live(partial(killed, rank=0), tmp_path)
    assert [rank.code for rank in ended] == [-signal.SIGKILL, 1, 1], ended
    for other in ended[1:]:
        assert "ended by the failure of rank 0: the connection to it was lost" in other.said


def same_mistake(groups: Groups) -> None:
    time.sleep(0.3 * groups.ranks.rank)
    raise ConfigError("optimizer.lr=0 must be above 0.")


def test_same_mistake_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    ended = live(same_mistake, tmp_path)
    assert [rank.code for rank in ended] == [2] * NUM_RANKS, ended
    assert "".join(rank.said for rank in ended) == "ConfigError: optimizer.lr=0 must be above 0.\n"


def ends(groups: Groups, failing: int | None = None) -> None:
    """One rank is last to come to the end, and may fail just before it."""
    groups.open(CPU, timeout_minutes=10.0)
    groups.sum([1.0])
    if groups.ranks.rank == (1 if failing is None else failing):
        time.sleep(1.0)
    if groups.ranks.rank == failing:
        raise DataError("no space for the last file")


def test_ranks_wait_for_the_last_to_end(tmp_path: Path) -> None:
    ended = live(ends, tmp_path)
    assert ended == [Ended(0, "")] * NUM_RANKS


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_of_the_last_to_end_is_told_to_those_before(tmp_path: Path, failing: int) -> None:
    ended = live(partial(ends, failing=failing), tmp_path)
    assert [rank.code for rank in ended] == [2] * NUM_RANKS, ended
    assert ended.pop(failing).said == "DataError: no space for the last file\n"
    for other in ended:
        assert f"ended by the failure of rank {failing}: no space for the last file\n" in other.said
        assert "Traceback" not in other.said


def reads_late(groups: Groups) -> None:
    """Rank 0 learns of a failure twice, by its watch and by a collective, before rank 2 looks once."""
    groups.open(CPU, timeout_minutes=10.0)
    groups.sum([1.0])
    if groups.ranks.rank == 2:
        groups_module.WATCH_SECONDS = 1.5
        time.sleep(600)
    time.sleep(0.5)
    if groups.ranks.rank == 1:
        raise DataError("shard 7 is gone")
    time.sleep(0.6)
    groups.sum([1.0])


def test_rank_0_stays_until_every_other_has_read_of_the_failure(tmp_path: Path) -> None:
    ended = live(reads_late, tmp_path)
    assert "ended by the failure of rank 1: shard 7 is gone\n" in ended[2].said
