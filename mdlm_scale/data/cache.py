"""Shards that lie elsewhere, or compressed, as files on this machine: fetched ahead, in a folder of bounded size.

mosaicml-streaming downloads and decompresses; this is its only door. One thread fetches, in the order of need, into a
folder that all processes of a machine may share: a lock keeps two from fetching the same shard, and dies with its
process. A file appears under its name only when it is complete and its hash is right. Whoever needs a shard waits for
it as long as bytes arrive, and then some seconds; the failure names the shard.
"""

import fcntl
import glob
import importlib.util
import os
import shutil
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import xxhash
import zstd

from mdlm_scale.data.shards import INDEX, MANIFEST, Description, ShardFile, describe
from mdlm_scale.errors import DataError, FetchError

PATIENCE_SECONDS = 20.0  # without a new byte, before whoever waits gives up
NUM_LOCKS = 64


@dataclass(frozen=True)
class Remote:
    """A shard to fetch: where from, and what it must be."""

    url: str  # of the stored file
    folder: str  # of the dataset within the cache
    file: ShardFile


@dataclass
class Cache:
    folder: Path
    limit_bytes: int
    patience: float = PATIENCE_SECONDS
    _urgent: list[Remote] = field(default_factory=list, repr=False)  # somebody waits for these
    _wanted: list[Remote] = field(default_factory=list, repr=False)  # in the order of need
    _errors: dict[str, Exception] = field(default_factory=dict, repr=False)  # by address
    _changed: threading.Condition = field(default_factory=threading.Condition, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)

    def want(self, remotes: Sequence[Remote]) -> None:
        """Fetch these, in this order, as far as there is room, and keep them; what is not among them may be dropped."""
        total = list(accumulate(remote.file.num_bytes for remote in remotes))
        room = self.limit_bytes - max(total[:1], default=0)  # for one that somebody waits for
        with self._changed:
            self._wanted = [remote for remote, end in zip(remotes, total, strict=True) if end <= room]
            self._start()

    def get(self, remote: Remote) -> Path:
        """The local file of a shard, fetched now if it is not there."""
        path = self._path(remote)
        if not path.exists():
            with self._changed:
                self._urgent.append(remote)
                self._start()
            try:
                self._wait_for(remote)
            finally:
                with self._changed:
                    self._urgent.remove(remote)
        os.utime(path)  # the time of its last use
        return path

    def _wait_for(self, remote: Remote) -> None:
        last_change, seen = time.monotonic(), -1
        while not self._path(remote).exists():
            with self._changed:
                self._changed.wait(0.05)
            if (size := self._num_arriving()) != seen:
                last_change, seen = time.monotonic(), size
            elif time.monotonic() - last_change > self.patience:
                reason = self._errors.get(remote.url) or "no byte arrived"
                raise FetchError(
                    f"shard '{remote.url}' could not be fetched into {self.folder} within {self.patience:.0f} s: "
                    f"{reason}. Start the run again when that is mended."
                )

    def _start(self) -> None:
        if self._thread is None:
            _streaming()  # its import may take longer than anybody's patience
            # a daemon: a download that hangs must not keep the process from ending
            self._thread = threading.Thread(target=self._fetch_forever, name="fetch", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _fetch_forever(self) -> None:
        while True:
            with self._changed:
                missing = [remote for remote in (*self._urgent, *self._wanted) if not self._path(remote).exists()]
                if not missing:
                    self._changed.wait(1.0)
                    continue
            # one that another process is fetching is left to it
            if not any(self._fetch(remote) for remote in missing):
                time.sleep(0.1)

    def _fetch(self, remote: Remote) -> bool:
        """Whether something was done about it."""
        path = self._path(remote)
        try:
            with _locked(self.folder / "locks" / f"{xxhash.xxh32_intdigest(str(path).encode()) % NUM_LOCKS}") as mine:
                if not mine or path.exists():
                    return False
                self._make_room(remote.file.num_bytes)
                self._download(remote, path.with_name(f"{path.name}.part"), path)
        except Exception as error:  # whoever needs this shard hears of it; the thread goes on
            self._errors[remote.url] = error
            time.sleep(0.5)
        with self._changed:
            self._changed.notify_all()
        return True

    def _download(self, remote: Remote, part: Path, path: Path) -> None:
        shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
        part.mkdir(parents=True)
        try:
            download(remote.url, part / remote.file.stored_name)
            _unpack(part, remote)
            os.replace(part / remote.file.name, path)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _make_room(self, num_bytes: int) -> None:
        """Drop the files used longest ago; a process that has one open keeps its bytes until it lets go."""
        kept = {self._path(remote) for remote in (*self._urgent, *self._wanted)}
        files = sorted((*_time_and_size(path), path) for path in self.folder.glob("*/*.mds"))
        excess = sum(size for _, size, _ in files) + num_bytes - self.limit_bytes
        for _, size, path in files:
            if excess > 0 and path not in kept:
                path.unlink(missing_ok=True)
                excess -= size

    def _num_arriving(self) -> int:
        """Bytes that are on their way into the cache, by any process."""
        # not pathlib's glob, which fails if a folder that it has seen is removed
        found = glob.iglob(f"{glob.escape(str(self.folder))}/*/*.part/*")
        return sum(_time_and_size(Path(path))[1] for path in found)

    def _path(self, remote: Remote) -> Path:
        return self.folder / remote.folder / remote.file.name


def read_remote(where: str) -> Description:
    """Describe the shards behind an address."""
    errors: list[Exception] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:

        def fetch() -> None:
            try:
                for name in (INDEX, MANIFEST):
                    download(f"{where.rstrip('/')}/{name}", Path(folder) / name)
            except Exception as error:  # each storage has its own
                errors.append(error)

        _streaming()  # its import does not count
        thread = threading.Thread(target=fetch, name="fetch", daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)
        if thread.is_alive() or errors:
            reason = errors[0] if errors else f"no answer within {PATIENCE_SECONDS:.0f} s"
            raise DataError(f"'{where}' holds no prepared rows that can be reached: {reason}.")
        return describe(where, (Path(folder) / INDEX).read_bytes(), (Path(folder) / MANIFEST).read_bytes())


def download(url: str, path: Path) -> None:
    """Through mosaicml-streaming: s3, gs, oci, azure, hf, sftp, ...; `file://` is a folder."""
    url = url.removeprefix("file://")
    downloader = _streaming().CloudDownloader.get(url)
    try:
        downloader.download(url, str(path), timeout=60.0)
    finally:
        downloader.clean_up()


def _unpack(part: Path, remote: Remote) -> None:
    """Leave the uncompressed shard in `part`, and see that it is the right one."""
    file = remote.file
    data = (part / file.stored_name).read_bytes()
    if file.compressed:
        data = zstd.decompress(data)
        (part / file.name).write_bytes(data)
    if len(data) != file.num_bytes or xxhash.xxh64(data).hexdigest() != file.hashes["xxh64"]:
        raise DataError(
            f"it is corrupt: {len(data):,} bytes with xxh64 {xxhash.xxh64(data).hexdigest()}, the index says "
            f"{file.num_bytes:,} and {file.hashes['xxh64']}"
        )


def _time_and_size(path: Path) -> tuple[float, int]:
    try:
        status = path.stat()
    except FileNotFoundError:  # another process was quicker
        return 0.0, 0
    return status.st_mtime, status.st_size


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Try to take a lock of this machine; it ends with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _streaming() -> Any:
    """mosaicml-streaming's storage. Its package would import torchvision and more at once: a bare one stands in."""
    if "streaming" not in sys.modules:
        spec: Any = importlib.util.find_spec("streaming")
        if spec is None:
            raise DataError("mosaicml-streaming is not installed; tools/install.sh does it")
        package = types.ModuleType("streaming")
        package.__path__ = list(spec.submodule_search_locations)
        package.__spec__ = spec
        sys.modules["streaming"] = package
    import streaming.base.storage

    return streaming.base.storage
