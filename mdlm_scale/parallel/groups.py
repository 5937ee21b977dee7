"""Which rank this process is, and what ranks tell each other: sums, agreement, and that one of them has failed.

Launchers differ in how they say the rank: torchrun and deepspeed by RANK, WORLD_SIZE and LOCAL_RANK, srun by SLURM_*.
Numbers travel through the host (gloo), also on GPUs, so that the device does not wait for them. A failure on one rank
is written to the store that the ranks met at, where a thread of every other rank finds it: all end with its message.
"""

import contextlib
import hashlib
import json
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from mdlm_scale.errors import EXIT_FAILURE, ConfigError, PeerError, TrainingError, UserError

START_SECONDS = 300.0  # for all ranks to come
WATCH_SECONDS = 1.0  # between looks at the store
OWN_END_SECONDS = 2.0  # for the main thread to end by itself after another rank's failure
GRACE_SECONDS = 5.0  # for a failed rank's word to come, and for rank 0, who holds the store, to outlive the others

# which ranks add up: those that own other slots, those that share this one's matrices, or all
Over = Enum("Over", "dp tp all")

_LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
_FOREIGN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE")  # MPI's launchers say the rank in ways of their own
_FAILURE = "failure"
_LINE_END = "\n"


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def local_size(self) -> int:
        """Processes on this machine, as torchrun, deepspeed or srun tell it; else all of them are."""
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
            if (told := os.environ.get(name, "")).isdecimal():
                return int(told)
        return self.size

    @property
    def gpus_of_slurm(self) -> int:
        """That a job has on this machine; 0 outside of one."""
        told = os.environ.get("SLURM_GPUS_ON_NODE", "")
        return int(told) if told.isdecimal() else 0


def world(environment: Mapping[str, str] = os.environ) -> World:
    """This process among those that a launcher started; one process if none did."""
    for names in _LAUNCHERS:
        given = [name for name in names if name in environment]
        if len(given) == len(names):
            values = [environment[name] for name in names]
            if not all(value.isdecimal() for value in values) or not int(values[0]) < int(values[1]):
                raise ConfigError(f"{', '.join(names)} are {', '.join(values)}: no rank below a number of processes.")
            rank, size, local_rank = map(int, values)
            return World(rank, size, local_rank)
        if given and names[0] == "RANK":  # a shell inside a Slurm job has some of Slurm's, and that is no launcher
            missing = [name for name in names if name not in given]
            raise ConfigError(
                f"The launcher set {', '.join(given)} but not {', '.join(missing)}; it must set all three."
            )
    for name in _FOREIGN:
        if environment.get(name, "1") not in ("0", "1"):
            raise ConfigError(
                f"The launcher started {environment[name]} processes ({name}) but set no RANK, WORLD_SIZE and "
                f"LOCAL_RANK: each would train alone in the same folder. Use torchrun, deepspeed or srun."
            )
    return World()


class Groups:
    """The ranks of a run, as a context: a failure inside ends all of them. With one rank all is the identity."""

    def __init__(self, ranks: World = World(), seconds: float = START_SECONDS) -> None:
        """Meet the other ranks; a TrainingError names those that did not come within `seconds`."""
        self.ranks = ranks
        self.store: dist.Store | None = None
        self.failure: PeerError | None = None  # another rank's, once this one knows
        self.tp: dist.ProcessGroup | None = None  # the ranks that share matrices with this one, if there are such
        self.dp: dist.ProcessGroup | None = None  # the ranks with this one's part of them; None is all ranks
        self.ended = threading.Event()
        self.watch: threading.Thread | None = None
        if ranks.size > 1:
            self.store, watched = _meet(ranks, seconds)
            self.watch = threading.Thread(target=self._watch, args=(watched,), name="watch", daemon=True)
            self.watch.start()

    def open(self, device: torch.device, timeout_minutes: float, tp_size: int = 1) -> None:
        """Make the process groups; a collective that others do not join ends after `timeout_minutes`."""
        if dist.is_initialized():
            return
        # of names that engines call: new ones for the same
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        store = dist.HashStore() if self.store is None else dist.PrefixStore("groups", self.store)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.ranks.rank,
            world_size=self.ranks.size,
            timeout=timedelta(minutes=timeout_minutes),
            device_id=device if device.type == "cuda" else None,
        )
        if tp_size > 1:
            size = self.ranks.size
            neighbours = [list(range(first, first + tp_size)) for first in range(0, size, tp_size)]
            alike = [list(range(first, size, tp_size)) for first in range(tp_size)]
            self.tp, _ = dist.new_subgroups_by_enumeration(neighbours)
            self.dp, _ = dist.new_subgroups_by_enumeration(alike)

    def set_timeout(self, minutes: float) -> None:
        """How long any collective waits from now on, also those of groups that engines have made for themselves."""
        if dist.is_initialized():
            for group in list(dist.distributed_c10d._world.pg_map):
                dist.distributed_c10d._set_pg_timeout(timedelta(minutes=minutes), group)

    def sum(self, values: Sequence[float], over: Over = Over.dp) -> list[float]:
        """Each value added up over ranks, by default over those that own other slots."""
        if self.ranks.size == 1 or (over is Over.tp and self.tp is None):
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group={Over.dp: self.dp, Over.tp: self.tp, Over.all: None}[over])
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer."""
        return self.sum([float(flag)], over=Over.all)[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """What every rank has to say, in the order of ranks, on all of them; plain values (JSON)."""
        if self.ranks.size == 1:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor([len(own)])
        sizes = [torch.zeros_like(size) for _ in range(self.ranks.size)]
        dist.all_gather(sizes, size)
        most = int(max(sizes))
        parts = [torch.zeros(most, dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, torch.cat([own, own.new_zeros(most - len(own))]))
        return [json.loads(bytes(part[: int(n)].tolist())) for part, n in zip(parts, sizes, strict=True)]

    def agree(self, what: str, facts: Mapping[str, Any]) -> None:
        """A ConfigError on all ranks, naming every key of `facts` in which a rank differs from rank 0."""
        text = json.dumps(facts, sort_keys=True)
        if len(set(self.gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
            return
        first, *others = self.gather(json.loads(text))
        found = []
        for key in sorted(set(first).union(*others)):
            differing = [rank for rank, other in enumerate(others, start=1) if other.get(key) != first.get(key)]
            if differing:
                there = f"{others[differing[0] - 1].get(key)!r} on rank {differing[0]}"
                more = f" ({len(differing)} ranks differ)" if len(differing) > 1 else ""
                found.append(f"{what}: {key} is {first.get(key)!r} on rank 0 and {there}{more}.")
        raise ConfigError(*found, "All ranks must run the same code with the same settings on the same data.")

    def __enter__(self) -> "Groups":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        lost: BaseException | None = None
        if error is None and dist.is_initialized():
            try:
                dist.barrier()  # rank 0 holds the store: it must not go first
            except RuntimeError as broken:  # a rank failed on its way here
                lost = broken
        self.ended.set()
        if self.store is not None and (error or lost) and not isinstance(error, SystemExit):
            self._fail(error or lost)
        if self.watch is not None:
            self.watch.join(GRACE_SECONDS)
        if lost is not None:
            raise lost
        if error is None and dist.is_initialized():
            dist.destroy_process_group()

    def _fail(self, error: BaseException | None) -> None:
        """Tell the others, unless one of them failed before: then this error is only its consequence."""
        assert self.store is not None
        message = str(error)
        if is_lost := _is_lost_connection(error):
            message = "a rank is gone without a word: it was killed, or its machine or network was lost"
        elif not isinstance(error, UserError):
            message = f"{type(error).__name__}: {message.partition(_LINE_END)[0]}"
        own = json.dumps([self.ranks.rank, message, getattr(error, "exit_code", EXIT_FAILURE)])
        try:
            if isinstance(error, RuntimeError):  # perhaps of a collective, because a peer is gone: its word is coming
                _wait_until(lambda: self.failure is not None or self.store.check([_FAILURE]), GRACE_SECONDS)
            first = PeerError(*json.loads(self.store.compare_set(_FAILURE, "", own)))
            self.store.add("ended", 1)
            if self.ranks.rank == 0:
                _wait_until(lambda: self.store.add("ended", 0) >= self.ranks.size, GRACE_SECONDS)
        except RuntimeError:  # the store went with rank 0
            first = self.failure or PeerError(0, f"the connection to it was lost ({message})", EXIT_FAILURE)
        if is_lost and first.message == message:  # nobody knows more
            raise TrainingError(f"Here {message}. The same command goes on from the last checkpoint.") from None
        if first.rank == self.ranks.rank:
            return
        if first.message == message:  # the same mistake, told by one rank
            os._exit(first.exit_code)
        raise first from None

    def _watch(self, store: dist.Store) -> None:
        """In a thread: end this process if another rank has failed and the main thread does not notice."""
        while not self.ended.wait(WATCH_SECONDS):
            try:
                if not store.check([_FAILURE]):
                    continue
                self.failure = PeerError(*json.loads(store.get(_FAILURE)))
            except RuntimeError:
                self.failure = PeerError(0, "the connection to it was lost", EXIT_FAILURE)
            if not self.ended.wait(OWN_END_SECONDS):
                with contextlib.suppress(RuntimeError):
                    store.add("ended", 1)
                print(f"rank {self.ranks.rank}: {self.failure}", file=sys.stderr, flush=True)
                os._exit(self.failure.exit_code)
            return


def _meet(ranks: World, seconds: float) -> tuple[dist.Store, dist.Store]:
    """The store that all ranks have come to, twice: a thread needs a connection of its own, as a wait occupies one."""
    where = {name: os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT")}
    if not all(where.values()):
        missing = " and ".join(name for name, value in where.items() if not value)
        raise ConfigError(f"{ranks.size} processes need {missing}: the host of rank 0 and a free port there.")
    if not where["MASTER_PORT"].isdecimal() or not 0 < int(where["MASTER_PORT"]) < 2**16:
        raise ConfigError(f"MASTER_PORT={where['MASTER_PORT']} must be a port of MASTER_ADDR, 1 .. 65535.")
    host, port = where["MASTER_ADDR"], int(where["MASTER_PORT"])
    # torchrun's agent serves the store itself, and keeps it over restarts
    serves = ranks.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        first, second = (
            dist.PrefixStore(
                f"mdlm_scale/{attempt}",
                dist.TCPStore(
                    host, port, is_master=is_master, timeout=timedelta(seconds=seconds), wait_for_workers=False
                ),
            )
            for is_master in (serves, False)
        )
        first.set(f"rank/{ranks.rank}", socket.gethostname())
        first.add("come", 1)
        if not _wait_until(lambda: first.add("come", 0) >= ranks.size, seconds):
            absent = [str(rank) for rank in range(ranks.size) if not first.check([f"rank/{rank}"])]
            raise TrainingError(
                f"{ranks.size - len(absent)} of {ranks.size} ranks came to {host}:{port} within {seconds:.0f} s; "
                f"missing: {', '.join(absent)}. Look at their output, and that every process was started."
            )
    except RuntimeError as error:
        raise TrainingError(
            f"Rank {ranks.rank} could not meet the others at {host}:{port} (MASTER_ADDR, MASTER_PORT) within "
            f"{seconds:.0f} s: {str(error).partition(_LINE_END)[0]}"
        ) from error
    return first, second


def _is_lost_connection(error: BaseException | None) -> bool:
    """Whether a collective failed because of a peer, in the words of gloo or NCCL."""
    return isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo/transport" in str(error)


def _wait_until(condition: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
