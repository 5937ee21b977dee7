"""Whole runs for tests: the small run they share, ranks started by hand, and what is read from a run directory."""

import json
import math
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from conftest import DEBUG, ROOT
from parity.ranks import free_port
from torch import Tensor

from mdlm_scale import train
from mdlm_scale.config import Precision
from mdlm_scale.run import build, checkpoint

SECONDS = 120.0  # for all ranks to end
SMALL = [
    "data.length=32", "model.hidden_size=32", "batch.global_batch_size=8", "batch.micro_batch_size=2",
    "train.num_steps=6", "evaluate.every=3", "evaluate.rows=32", "checkpoint.every=3", "logging.every=1",
]  # fmt: skip


def arguments(run: Path, corpus: Path | str, *overrides: str) -> list[str]:
    """The debug recipe on the small corpus."""
    return [
        "--config",
        DEBUG,
        f"run.dir={run}",
        f"data.train={corpus}",
        f"data.validation={corpus}",
        *SMALL,
        *overrides,
    ]


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


def rows(run: Path, kind: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if row["kind"] == kind]


def last_step(run: Path) -> int:
    """The step of the last row of a run that may be writing it."""
    try:
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError):
        return 0


def tensors(path: Path | None) -> dict[str, Tensor]:
    assert path is not None
    manifest = checkpoint.read_manifest(path)
    return {key: checkpoint.read_tensor(path, manifest, key) for key in manifest["tensors"]}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    """Every tensor, relative to its largest element."""
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        difference, largest = float((ours[key] - tensor).abs().max()), float(tensor.abs().max())
        assert difference <= tolerance * largest, f"{key} differs by {difference} of {largest}"


@dataclass
class ByHand:
    """Ranks started one by one, each with its own settings and in its own folder, without a launcher."""

    folder: Path
    local_size: int | None = None  # ranks a machine, as a launcher would say
    port: int = field(default_factory=free_port)
    processes: list[BaseProcess] = field(default_factory=list)

    def start(
        self, world_size: int, given: list[str], cwd: Path = ROOT, spoilt: frozenset[int] = frozenset()
    ) -> BaseProcess:
        """`spoilt`: training passes of this rank whose data gives a loss that is not a number, also when seen again."""
        rank = len(self.processes)
        environment = {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
        }  # fmt: skip
        if self.local_size is not None:
            environment["LOCAL_WORLD_SIZE"] = str(self.local_size)
        process = multiprocessing.get_context("forkserver").Process(
            target=_train, args=(environment, given, cwd, self.folder / f"err-{rank}", spoilt)
        )
        process.start()
        self.processes.append(process)
        return process

    def begin(self, world_size: int, given: list[str]) -> None:
        """All ranks of a new attempt."""
        self.processes, self.port = [], free_port()
        for _ in range(world_size):
            self.start(world_size, given)

    def ended(self, seconds: float = 60.0) -> list[Ended]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        said = [(self.folder / f"err-{rank}").read_text() for rank in range(len(self.processes))]
        codes = [process.exitcode for process in self.processes]
        assert None not in codes, f"exit codes {codes} after {seconds:.0f} s: {said}"
        return [Ended(code, "", err) for code, err in zip(codes, said, strict=True) if code is not None]


def _train(environment: dict[str, str], given: list[str], cwd: Path, err: Path, spoilt: frozenset[int]) -> None:
    """In the process of a rank, which has imported everything already."""
    os.dup2(os.open(err, os.O_WRONLY | os.O_CREAT), sys.stderr.fileno())
    os.environ |= environment
    os.chdir(cwd)
    if {"parallel.engine=deepspeed", "train.precision=float64"} <= set(given):
        _allow_float64()
    if spoilt:
        build.build_model = spoiling(build.build_model, spoilt)
    sys.exit(train.main(given))


def spoiling(build_model: Any, calls: frozenset[int], factor: float = math.nan) -> Any:
    """A `build_model` whose model multiplies the loss for the data of these training passes, whenever it sees it."""
    seen, data_of = [0], set[bytes]()

    def spoil(module: Any, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        data = inputs[0].z_BL.numpy().tobytes()
        if seen[0] in calls:
            data_of.add(data)
        seen[0] += 1
        return (output[0] * factor, output[1] * factor) if data in data_of else output

    def built(*args: Any) -> Any:
        model = build_model(*args)
        model.register_forward_hook(spoil)
        return model

    return built


def _allow_float64() -> None:
    """DeepSpeed in float64, for tests alone: layouts are compared to more digits than its float32 has."""
    from parity.float64 import widen_deepspeed

    from mdlm_scale.parallel import zero_json

    right = zero_json.faults
    zero_json.faults = lambda config, batch, layout, _: right(config, batch, layout, Precision.float32)
    widen_deepspeed()


def both(by_hand: ByHand, given: list[str]) -> None:
    """Two ranks from their start to a good end."""
    by_hand.begin(2, given)
    ended = by_hand.ended(SECONDS)
    assert [rank.code for rank in ended] == [0, 0], ended
