"""Shards fetched from elsewhere: complete or absent, in a bounded folder, ahead of need, and never a wait without end.

The far place is a folder behind `file://` where that is enough; mosaicml-streaming fetches from it as from any other.
"""

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_writer import ShardWriter

from mdlm_scale.data import cache as cache_module
from mdlm_scale.data.cache import Cache, Remote, read_remote
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.data.shards import read_folder
from mdlm_scale.errors import DataError, FetchError

NUM_SHARDS = 6
SECONDS = 20.0  # for what takes milliseconds, on a busy machine


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "far", compress=False)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "near", limit_bytes=10**9, patience=1.0)


def write_shards(folder: Path, *, compress: bool) -> Path:
    """Six shards of equal size."""
    folder.mkdir()
    records = np.zeros(17 * NUM_SHARDS, record_type(8, np.dtype("<u2")))
    records[TOKENS], records[NUM_TOKENS] = np.arange(len(records))[:, None], 8
    writer = ShardWriter(folder, records.dtype, shard_bytes=650, compress=compress)
    writer.add(records)
    writer.finish({"tokenizer": {"fingerprint": "some"}})
    return folder


def remotes(folder: Path) -> list[Remote]:
    description = read_folder(folder)
    assert len(description.files) == NUM_SHARDS
    return [Remote(f"file://{folder}/{file.stored_name}", "set", file) for file in description.files]


def eventually(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def cached(cache: Cache) -> list[str]:
    return sorted(path.name for path in cache.folder.glob("set/*.mds"))


def test_copy_is_equal(far: Path, cache: Cache) -> None:
    for remote in remotes(far):
        assert cache.get(remote).read_bytes() == (far / remote.file.name).read_bytes()


def test_compressed_shard_is_unpacked(far: Path, tmp_path: Path, cache: Cache) -> None:
    packed = remotes(write_shards(tmp_path / "packed", compress=True))
    assert cache.get(packed[2]).read_bytes() == (far / "shard.00002.mds").read_bytes()


def test_wanted_shards_come_by_themselves(far: Path, cache: Cache) -> None:
    cache.want(remotes(far)[1:4])
    assert eventually(lambda: cached(cache) == ["shard.00001.mds", "shard.00002.mds", "shard.00003.mds"])


def test_wanted_shards_come_in_order(far: Path, cache: Cache) -> None:
    wanted = [remotes(far)[k] for k in (4, 0, 3)]
    cache.want(wanted)
    assert eventually(lambda: len(cached(cache)) == 3)
    born = [(cache.folder / "set" / remote.file.name).stat().st_mtime_ns for remote in wanted]
    assert born == sorted(born)


def test_cache_stays_within_its_limit(far: Path, cache: Cache) -> None:
    size = remotes(far)[0].file.num_bytes
    cache.limit_bytes = 3 * size
    largest = 0
    for remote in remotes(far) * 2:
        cache.get(remote)
        largest = max(largest, sum(path.stat().st_size for path in cache.folder.glob("set/*.mds")))
    assert largest == 3 * size


def test_wanted_shards_are_not_dropped(far: Path, cache: Cache) -> None:
    cache.limit_bytes = 3 * remotes(far)[0].file.num_bytes
    cache.want(remotes(far)[:2])
    assert eventually(lambda: len(cached(cache)) == 2)
    for remote in remotes(far)[2:]:
        cache.get(remote)
    assert cached(cache) == ["shard.00000.mds", "shard.00001.mds", "shard.00005.mds"]


def test_the_longest_unused_goes_first(far: Path, cache: Cache) -> None:
    cache.limit_bytes = 2 * remotes(far)[0].file.num_bytes
    first, second, third, *_ = remotes(far)
    for remote in (first, second):
        cache.get(remote)
        time.sleep(0.02)  # file times have a grain
    cache.get(first)
    cache.get(third)
    assert cached(cache) == ["shard.00000.mds", "shard.00002.mds"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (Path.unlink, "No such file"),
    "truncated": (lambda path: os.truncate(path, 100), "100 bytes"),
    "corrupt": (flip, "is corrupt"),
}


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "compressed"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_is_named(tmp_path: Path, cache: Cache, damage: str, compress: bool) -> None:
    remote = remotes(write_shards(tmp_path / "far", compress=compress))[1]
    DAMAGES[damage][0](tmp_path / "far" / remote.file.stored_name)
    with pytest.raises(FetchError, match=rf"shard '{remote.url}' could not be fetched"):
        cache.get(remote)


@pytest.mark.parametrize("damage", DAMAGES)
def test_reason_is_told(far: Path, cache: Cache, damage: str) -> None:
    remote = remotes(far)[1]
    DAMAGES[damage][0](far / remote.file.stored_name)
    with pytest.raises(FetchError, match=DAMAGES[damage][1]):
        cache.get(remote)


def test_folders_that_go_while_bytes_are_counted(cache: Cache) -> None:
    """Another process ends its downloads."""
    parts, stop = [cache.folder / "set" / f"{i}.mds.part" for i in range(20)], threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            for part in parts:
                part.mkdir(parents=True, exist_ok=True)
                (part / "shard").write_bytes(b"12")
            for part in parts:
                shutil.rmtree(part)

    other = threading.Thread(target=come_and_go)
    other.start()
    try:
        end, times_seen = time.monotonic() + SECONDS, 0
        while times_seen < 500:
            assert time.monotonic() < end
            times_seen += cache._num_arriving() > 0
    finally:
        stop.set()
        other.join()


def test_damaged_shard_leaves_nothing_behind(far: Path, cache: Cache) -> None:
    flip(far / "shard.00001.mds")
    with pytest.raises(FetchError):
        cache.get(remotes(far)[1])
    assert list(cache.folder.glob("set/*.mds")) == []


def test_shard_that_comes_back_in_time_is_no_error(far: Path, cache: Cache) -> None:
    cache.patience = SECONDS
    remote = remotes(far)[1]
    aside = (far / remote.file.name).rename(far / "aside")
    mend = threading.Timer(1.0, lambda: aside.rename(far / remote.file.name))
    mend.start()
    assert cache.get(remote).exists()
    mend.join()


def test_failure_of_one_does_not_stop_the_next(far: Path, cache: Cache) -> None:
    bad, good = remotes(far)[:2]
    (far / bad.file.name).unlink()
    with pytest.raises(FetchError):
        cache.get(bad)
    assert cache.get(good).exists()


def test_what_a_killed_process_left_does_not_matter(far: Path, cache: Cache) -> None:
    part = cache.folder / "set" / "shard.00001.mds.part"
    part.mkdir(parents=True)
    (part / "shard.00001.mds").write_bytes(b"half of")
    assert cache.get(remotes(far)[1]).read_bytes() == (far / "shard.00001.mds").read_bytes()


def test_shard_that_another_process_fetches_is_left_to_it(far: Path, cache: Cache) -> None:
    """The lock is held here by another open file, as another process would; it lets go without having fetched."""
    cache.patience = SECONDS
    locks = cache.folder / "locks"
    locks.mkdir(parents=True)
    held = [(locks / str(number)).open("w") for number in range(cache_module.NUM_LOCKS)]
    for file in held:
        fcntl.flock(file, fcntl.LOCK_EX)
    cache.want(remotes(far)[:1])
    time.sleep(0.5)
    assert cached(cache) == []
    for file in held:
        file.close()
    assert cache.get(remotes(far)[0]).exists()


@pytest.fixture
def silent() -> Iterator[int]:
    """A port where someone listens and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def s3_environment(port: int) -> dict[str, str]:
    return {
        "S3_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip


HANGING = """
import sys, time
from pathlib import Path
from mdlm_scale.data.cache import Cache, Remote
from mdlm_scale.data.shards import read_folder
from mdlm_scale.errors import FetchError
file = read_folder(Path(sys.argv[1])).files[0]
try:
    Cache(Path(sys.argv[2]), 10**9, patience=2.0).get(Remote("s3://bucket/shard.00000.mds", "set", file))
except FetchError as error:
    sys.exit(str(error))
"""


def test_silent_server_ends_in_an_error_and_the_process_ends_too(far: Path, tmp_path: Path, silent: int) -> None:
    """A thread stuck in a download must not keep the interpreter alive; the client's own timeout is a minute."""
    done = subprocess.run(
        [sys.executable, "-c", HANGING, str(far), str(tmp_path / "near")],
        env=os.environ | s3_environment(silent), capture_output=True, text=True, timeout=45,
    )  # fmt: skip
    assert (done.returncode, "no byte arrived" in done.stderr) == (1, True), done.stderr


def test_silent_server_is_no_dataset(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in s3_environment(silent).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(cache_module, "PATIENCE_SECONDS", 1.0)
    with pytest.raises(DataError, match=r"'s3://bucket/rows' holds no prepared rows .* no answer within 1 s"):
        read_remote("s3://bucket/rows")


@pytest.mark.parametrize("where", ["file:///nowhere/at/all", "ftp://somewhere/else"], ids=["nothing there", "unknown"])
def test_unreachable_dataset_is_named(where: str) -> None:
    with pytest.raises(DataError, match=f"'{where}' holds no prepared rows that can be reached"):
        read_remote(where)


FULL = """
import resource, signal, sys
from pathlib import Path
from mdlm_scale.data.cache import Cache, Remote
from mdlm_scale.data.shards import read_folder
from mdlm_scale.errors import FetchError
folder = Path(sys.argv[1])
file = read_folder(folder).files[0]
cache = Cache(Path(sys.argv[2]), 10**9, patience=1.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
try:
    cache.get(Remote(f"file://{folder}/{file.name}", "set", file))
except FetchError as error:
    sys.exit(str(error))
"""


def test_full_disk_is_told(far: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writing fails with the system's error in the same place."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(far), str(tmp_path / "near")], capture_output=True, text=True, timeout=45
    )
    assert (done.returncode, "shard.00000.mds' could not be fetched" in done.stderr) == (1, True), done.stderr
    assert "File too large" in done.stderr
    assert list((tmp_path / "near").glob("set/*.mds")) == []


def test_file_dropped_by_another_process_is_fetched_again(far: Path, cache: Cache) -> None:
    remote = remotes(far)[0]
    cache.get(remote).unlink()
    assert cache.get(remote).exists()


def test_address_is_described_like_the_folder(far: Path) -> None:
    assert read_remote(f"file://{far}").fingerprint == read_folder(far).fingerprint


def test_folder_that_vanished_is_no_dataset(far: Path) -> None:
    shutil.rmtree(far)
    with pytest.raises(DataError, match="No such file"):
        read_remote(f"file://{far}")
