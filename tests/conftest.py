"""What all tests share: a small run, started as a user would start it but in this process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: a second thread costs more than it brings
# Some virtual machines announce AMX and then fault on it: bf16 products there end the process. Read at first use.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from mdlm_scale import train
from mdlm_scale.log import log

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tools"))  # last: tools/parity.py would hide the package `parity`
DEBUG = str(ROOT / "configs" / "debug.yaml")
TEXT = "the quick brown fox jumps over the lazy dog and runs away from {} hounds before the sun goes down"

Train = Callable[..., int]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file, one document a line: enough for every small run, tokenised in milliseconds."""
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_text("".join(TEXT.format(number) + "\n" for number in range(200)))
    return path


@pytest.fixture(scope="session")
def shards(corpus: Path) -> Path:
    """The same text as rows of 32 bytes in a folder of many small shards."""
    output = corpus.with_name("shards")
    command = ["--input", str(corpus), "--output", str(output), "--tokenizer", "bytes", "--length", "32"]
    tool = [sys.executable, str(ROOT / "tools" / "prepare_data.py"), "--workers", "1", "--shard-mb", "0.00155"]
    subprocess.run([*tool, *command], check=True, timeout=120, capture_output=True)
    assert len(list(output.glob("*.mds"))) > 30
    return output


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """A run in a test speaks to that test's standard error, which is closed behind it: the next one must not."""
    yield
    log.handlers.clear()


@pytest.fixture
def train_run(tmp_path: Path, corpus: Path) -> Iterator[Train]:
    """`train_run("key=value", ...)`: the debug recipe on the small corpus in float64; returns the exit code."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}

    def run(*overrides: str, config: str = DEBUG) -> int:
        small = [
            f"run.dir={tmp_path / 'run'}", f"data.train={corpus}", f"data.validation={corpus}", "data.length=32",
            "model.hidden_size=32", "batch.global_batch_size=8", "batch.micro_batch_size=4", "train.precision=float64",
            "train.num_steps=6", "evaluate.every=3", "evaluate.rows=32", "checkpoint.every=3", "logging.every=1",
        ]  # fmt: skip
        return train.main(["--config", config, *small, *overrides])

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Any]:
    """Ranks that a test starts one by one (`runs.ByHand`); none outlives it."""
    from runs import ByHand

    (tmp_path / "said").mkdir()
    ranks = ByHand(tmp_path / "said")
    yield ranks
    for process in ranks.processes:
        if process.is_alive():
            process.kill()
            process.join()
