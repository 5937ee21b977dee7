"""Jobs on the cluster: `slurm/train_owt.sh` as it is shipped, with a tiny config."""

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from conftest import ROOT
from lab import Lab, said, wait_for
from runs import last_step, tensors

from mdlm_scale.run import checkpoint

TINY = """
tokenizer: {{name: bytes}}
data: {{train: {corpus}, validation: {corpus}, length: 32}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, cond_size: 32}}
batch: {{global_batch_size: 8, micro_batch_size: 2}}
optimizer: {{lr: 1.0e-3, warmup_steps: 10}}
parallel: {{engine: fsdp, timeout_minutes: 1, start_minutes: 2}}
train: {{num_steps: 120, precision: float64, device: cpu}}
evaluate: {{every: 1000, rows: 32}}
checkpoint: {{every: 30, keep_every: 60}}
logging: {{every: 1}}
"""
START_SECONDS = 120.0  # from submitting to the steps that a test waits for; 10 to 15 are usual
END_SECONDS = 400.0


@dataclass
class Job:
    """A job of `slurm/train_owt.sh` on two nodes of two GPUs each."""

    number: str
    run: Path
    log: Path

    def at_step(self, step: int, seconds: float = START_SECONDS) -> None:
        wait_for(f"step {step} of {self.run}", lambda: last_step(self.run) >= step, seconds)

    def at_start(self, number: int, seconds: float = START_SECONDS) -> None:
        """Running, for the first or another time."""
        wait_for(f"start {number}", lambda: (self.starts(), self.field("JobState")) == (number, "RUNNING"), seconds)

    def field(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\S*)", said("scontrol", "show", "job", self.number))
        assert found is not None
        return found[1]

    def ended(self, state: str, seconds: float = END_SECONDS) -> str:
        """What was said, once the job has come to this end."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        try:
            wait_for("the end of the job", lambda: self.field("JobState") in ends, seconds)
            assert self.field("JobState") == state
        except AssertionError as error:
            raise AssertionError(f"{error}; said so far:\n{self.log.read_text()}") from None
        return self.log.read_text()

    def starts(self) -> int:
        return int(self.field("Restarts")) + 1

    def weights(self) -> dict[str, torch.Tensor]:
        return tensors(checkpoint.newest(self.run))


def submit(script: list[str], options: list[str]) -> str:
    """`sbatch OPTIONS SCRIPT ARGUMENTS` as a user would from the repository; the number of the job."""
    # no variable of the tests may make up for one that a script forgets
    plain = {name: os.environ[name] for name in ("PATH", "HOME", "SLURM_CONF", "ONEDNN_MAX_CPU_ISA")}
    command = ["sbatch", "--parsable", *options, *script]
    asked = subprocess.run(command, cwd=ROOT, env=plain, capture_output=True, text=True, timeout=60)
    assert asked.returncode == 0, asked.stderr
    return asked.stdout.strip()


def rank_pids(cluster: Lab, node: str, program: bytes) -> list[int]:
    """The processes of a program on a node."""
    found = []
    for pid in cluster.pids(node):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if program in words and words[0].endswith(b"python"):
            found.append(pid)
    return found


def kill_rank(cluster: Lab, node: str, program: bytes = b"mdlm_scale.train") -> None:
    os.kill(rank_pids(cluster, node, program)[-1], signal.SIGKILL)
