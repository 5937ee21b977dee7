"""Training from S3: moto's server on this machine, mosaicml-streaming's client, real processes, and the plug pulled."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import pytest
from conftest import DEBUG, ROOT
from safetensors.torch import load_file

from mdlm_scale.run import checkpoint

NUM_STEPS = 60  # eight rows each: most of an epoch of 36 shards of 16 rows
SECONDS = 120.0


class Server:
    """An S3 that can be lost and come back at the same address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "S3_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
            "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)
        client = boto3.client(
            "s3", endpoint_url=self.url, region_name="us-east-1", aws_access_key_id="id", aws_secret_access_key="key"
        )
        client.create_bucket(Bucket="corpus")
        for path in self.folder.iterdir():
            client.upload_file(str(path), "corpus", f"rows/{path.name}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/moto-api/", timeout=5).close()
        except OSError:
            return False
        return True


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(shards: Path) -> Iterator[Server]:
    made = Server(shards)
    yield made
    made.stop()


@pytest.fixture(scope="module")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same training from the local folder."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    process = start(run, shards, str(shards), {})
    assert process.wait(SECONDS) == 0
    return run


def start(run: Path, shards: Path, train: str, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """The cache holds two blocks of two shards: shards are fetched all the time."""
    overrides = [
        f"run.dir={run}", f"data.train={train}", f"data.validation={shards}", "data.length=32", "data.block_shards=2",
        f"data.cache_dir={run.parent / 'cache'}", "data.cache_mb=0.0065", "model.hidden_size=32",
        "batch.global_batch_size=8", "batch.micro_batch_size=4", "train.precision=float64",
        f"train.num_steps={NUM_STEPS}", "evaluate.every=1000", "evaluate.rows=32", "checkpoint.every=10",
        "logging.every=1",
    ]  # fmt: skip
    command = [sys.executable, "-m", "mdlm_scale.train", "--config", DEBUG, *overrides]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def steps(run: Path) -> int:
    """How far a run has come."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def weights(run: Path) -> dict[str, bytes]:
    newest = checkpoint.newest(run)
    assert newest is not None
    assert newest.name == f"step-{NUM_STEPS:06d}"
    tensors = [load_file(path) for path in sorted(newest.glob("*.safetensors"))]
    return {name: tensor.numpy().tobytes() for file in tensors for name, tensor in file.items()}


def test_bucket_trains_like_the_folder(undisturbed: Path, shards: Path, server: Server, tmp_path: Path) -> None:
    process = start(tmp_path / "run", shards, "s3://corpus/rows", server.environment)
    _, errors = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, errors
    assert weights(tmp_path / "run") == weights(undisturbed)
    cached = sum(path.stat().st_size for path in (tmp_path / "cache").glob("*/*.mds"))
    assert 0 < cached <= 6500


@pytest.mark.slow
def test_processes_share_a_cache(undisturbed: Path, shards: Path, server: Server, tmp_path: Path) -> None:
    """Two runs at once, each dropping what the other may be about to read."""
    runs = [tmp_path / name for name in ("a", "b")]
    processes = [start(run, shards, "s3://corpus/rows", server.environment) for run in runs]
    errors = [process.communicate(timeout=SECONDS)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert [weights(run) == weights(undisturbed) for run in runs] == [True, True]


@pytest.mark.slow
def test_killed_run_starts_again(undisturbed: Path, shards: Path, server: Server, tmp_path: Path) -> None:
    process = start(tmp_path / "run", shards, "s3://corpus/rows", server.environment)
    wait_until(lambda: steps(tmp_path / "run") >= 25)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = start(tmp_path / "run", shards, "s3://corpus/rows", server.environment)
    _, errors = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, errors
    assert weights(tmp_path / "run") == weights(undisturbed)


@pytest.mark.slow
def test_lost_server_is_an_error_and_its_return_the_rest_of_the_run(
    undisturbed: Path, shards: Path, server: Server, tmp_path: Path
) -> None:
    process = start(tmp_path / "run", shards, "s3://corpus/rows", server.environment)
    wait_until(lambda: steps(tmp_path / "run") >= 15)
    server.stop()
    lost = time.monotonic()
    _, errors = process.communicate(timeout=SECONDS)
    seconds = time.monotonic() - lost
    server.start()
    assert process.returncode == 1, errors
    assert "FetchError: shard 's3://corpus/rows/shard.000" in errors
    assert seconds < 40, "thirty for the error, and some for the steps that still had data"
    assert steps(tmp_path / "run") < NUM_STEPS
    again = start(tmp_path / "run", shards, "s3://corpus/rows", server.environment)
    _, errors = again.communicate(timeout=SECONDS)
    assert again.returncode == 0, errors
    assert weights(tmp_path / "run") == weights(undisturbed)


def test_missing_bucket_is_told_before_anything_is_written(shards: Path, server: Server, tmp_path: Path) -> None:
    process = start(tmp_path / "run", shards, "s3://nothing/here", server.environment)
    _, errors = process.communicate(timeout=SECONDS)
    assert (process.returncode, (tmp_path / "run").exists()) == (2, False), errors
    assert "data.train: 's3://nothing/here' holds no prepared rows that can be reached" in errors
