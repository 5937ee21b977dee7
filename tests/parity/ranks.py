"""Several ranks on this machine: real processes and real gloo, forked from a server that has imported all there is.

A rank costs a few tenths of a second to start; every wait has an end.
"""

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from mdlm_scale.parallel.groups import Groups, World

TIMEOUT_SECONDS = 240.0
PRELOAD = [
    "mdlm_scale.parallel.deepspeed",
    "mdlm_scale.parallel.fsdp",
    "mdlm_scale.parallel.tensor",
    "mdlm_scale.run.main",
]

Work = Callable[..., Any]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class RankError(Exception):
    """What a rank raised, as text."""


def run_ranks(
    work: Work, world_size: int, *arguments: Any, tp_size: int = 1, seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """`work(groups, *arguments)` on every rank; what each returned, in the order of ranks."""
    port = free_port()
    pipes = [_context.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        _context.Process(target=_rank, args=(World(rank, world_size, rank), tp_size, port, pipe[1], work, arguments))
        for rank, pipe in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, writer in pipes:
        writer.close()
    deadline = time.monotonic() + seconds
    results, errors = [], []
    try:
        for rank, (reader, _) in enumerate(pipes):
            if not reader.poll(max(0.0, deadline - time.monotonic())):
                raise RankError(f"rank {rank} of {world_size} did not end within {seconds:.0f} s")
            try:
                kind, value = torch.load(io.BytesIO(reader.recv_bytes()), weights_only=False)
            except EOFError:
                kind, value = "error", f"ended with exit code {_exit_code(processes[rank])}"
            results.append(value)
            if kind == "error":
                errors.append(f"rank {rank}: {value}")
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
    if errors:
        raise RankError("\n".join(errors))
    return results


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _exit_code(process: Any) -> int | None:
    process.join(5.0)
    return process.exitcode


def _rank(ranks: World, tp_size: int, port: int, pipe: Connection, work: Work, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size), "LOCAL_RANK": str(ranks.local_rank)}
    try:
        with Groups(ranks, seconds=60.0) as groups:
            groups.open(torch.device("cpu"), timeout_minutes=2.0, tp_size=tp_size)
            value = work(groups, *arguments)
        result: tuple[str, Any] = ("value", value)
    except BaseException:
        result = ("error", traceback.format_exc())
    buffer = io.BytesIO()
    torch.save(result, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
