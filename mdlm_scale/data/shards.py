"""Shards of rows on disk: mosaicml-streaming's MDS format, version 2, with columns of fixed size, and a manifest.

A folder holds `shard.00000.mds` and so on (or `.mds.zstd`), `index.json` as mosaicml-streaming reads it, and
`manifest.json`: how the rows were made, their number, and the sha256 of each shard. All shards but the last hold the
same number of rows, so that row r of a shard lies at header + r * record.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstd
from numpy.typing import NDArray

from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, record_type
from mdlm_scale.errors import DataError, raise_if_any

INDEX, MANIFEST = "index.json", "manifest.json"
SHARD_BYTES = 1 << 26
ZSTD_LEVEL = 3
Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class ShardFile:
    """One shard: its file as it is stored, and its bytes as they are read."""

    name: str
    num_rows: int
    num_bytes: int  # uncompressed
    hashes: dict[str, str]  # xxh64 and sha256, uncompressed
    stored_name: str  # differs from `name` if compressed
    stored_bytes: int

    @property
    def compressed(self) -> bool:
        return self.stored_name != self.name


@dataclass(frozen=True)
class Description:
    """What index and manifest say of a folder of shards."""

    where: str
    files: tuple[ShardFile, ...]
    record: np.dtype[Any]
    manifest: dict[str, Any]

    @property
    def fingerprint(self) -> str:
        """Equal for equal rows in equal shards, wherever they lie, compressed or not."""
        return fingerprint(self.manifest["tokenizer"]["fingerprint"], self.record, self.files)

    @property
    def length(self) -> int:
        return int(self.record[TOKENS].shape[0])


class ShardWriter:
    """Collects records into shards of equal size in an empty folder; `finish` writes what makes them a dataset."""

    def __init__(self, folder: Path, record: np.dtype[Any], *, shard_bytes: int = SHARD_BYTES, compress: bool = False):
        self.folder, self.record, self.compress = folder, record, compress
        token = record[TOKENS].base
        self.config: dict[str, Any] = {
            "column_encodings": [f"ndarray:{token.name}:{record[TOKENS].shape[0]}", "uint32"],
            "column_names": [TOKENS, NUM_TOKENS],
            "column_sizes": [record[TOKENS].itemsize, record[NUM_TOKENS].itemsize],
            "compression": None,
            "format": "mds",
            "hashes": ["sha256", "xxh64"],
            "size_limit": shard_bytes,
            "version": 2,
        }
        self.header = json.dumps(self.config, sort_keys=True).encode()  # the same, compressed or not: so is the shard
        # four bytes an offset, one offset more than rows, and four for the number of rows
        self.rows_per_shard = max(1, (shard_bytes - 8 - len(self.header)) // (record.itemsize + 4))
        self.num_rows = self.num_tokens = 0
        self._entries: list[dict[str, Any]] = []
        self._waiting: list[Records] = []
        self._num_waiting = 0

    def add(self, records: Records) -> None:
        self._waiting.append(records)
        self._num_waiting += len(records)
        self.num_rows += len(records)
        self.num_tokens += int(records[NUM_TOKENS].sum())
        while self._num_waiting >= self.rows_per_shard:
            self._write(self._take(self.rows_per_shard))

    def finish(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Write the last shard, the index and the manifest, and see them to disk."""
        if self._num_waiting:
            self._write(self._take(self._num_waiting))
        index = {"shards": self._entries, "version": 2}
        files = tuple(map(_shard_file, self._entries))
        stored = [entry["zip_data"] or entry["raw_data"] for entry in self._entries]
        manifest = manifest | {
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "fingerprint": fingerprint(manifest["tokenizer"]["fingerprint"], self.record, files),
            "shards": [
                {"file": s["basename"], "rows": f.num_rows, "bytes": s["bytes"], "sha256": s["hashes"]["sha256"]}
                for f, s in zip(files, stored, strict=True)
            ],
        }
        _write_file(self.folder / INDEX, json.dumps(index, sort_keys=True).encode())
        _write_file(self.folder / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        return manifest

    def _take(self, num_rows: int) -> Records:
        waiting = np.concatenate(self._waiting)
        self._waiting = [waiting[num_rows:]]
        self._num_waiting -= num_rows
        return waiting[:num_rows]

    def _write(self, records: Records) -> None:
        name = f"shard.{len(self._entries):05d}.mds"
        start = 4 + 4 * (len(records) + 1) + len(self.header)
        offsets = start + np.arange(len(records) + 1, dtype="<u4") * np.uint32(self.record.itemsize)
        data = np.uint32(len(records)).tobytes() + offsets.tobytes() + self.header + records.tobytes()
        entry = self.config | {"raw_data": _file_info(name, data), "zip_data": None, "samples": len(records)}
        if self.compress:
            data = zstd.compress(data, ZSTD_LEVEL, 1)  # one thread: more would make other bytes
            entry |= {"zip_data": _file_info(name + ".zstd", data), "compression": f"zstd:{ZSTD_LEVEL}"}
        _write_file(self.folder / (entry["zip_data"] or entry["raw_data"])["basename"], data)
        self._entries.append(entry)


def describe(where: str, index: bytes, manifest: bytes) -> Description:
    """Read the two files of a folder; a DataError if they are not ours or do not belong together."""
    try:
        told = json.loads(manifest)
        entries = json.loads(index)["shards"]
        files = tuple(map(_shard_file, entries))
        (encodings,) = {tuple(entry["column_encodings"]) for entry in entries}
        _, name, length = encodings[0].split(":")
        record = record_type(int(length), np.dtype(name).newbyteorder("<"))
        description = Description(where, files, record, told)
        same = told["fingerprint"] == description.fingerprint
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DataError(
            f"'{where}': {INDEX} and {MANIFEST} are not those of prepared rows ({type(error).__name__}: {error}). "
            f"Make them with tools/prepare_data.py."
        ) from error
    if not same:
        raise DataError(f"'{where}': {INDEX} does not belong to {MANIFEST}: one of them was changed or replaced.")
    return description


def read_folder(folder: Path) -> Description:
    """Describe a folder, and see that every shard is there in full; all faults at once."""
    description = _read_description(folder)
    raise_if_any(_incomplete(folder, description).values(), DataError)
    return description


def _read_description(folder: Path) -> Description:
    try:
        index, manifest = (folder / INDEX).read_bytes(), (folder / MANIFEST).read_bytes()
    except OSError as error:
        if splits := sorted(path.parent.name for path in folder.glob(f"*/{MANIFEST}")):
            raise DataError(f"'{folder}' holds {' and '.join(splits)}; name one: {folder / splits[0]}.") from error
        raise DataError(
            f"'{folder}' is no folder of prepared rows: {error.strerror}: {error.filename}. Make it with "
            f"tools/prepare_data.py."
        ) from error
    return describe(str(folder), index, manifest)


def _incomplete(folder: Path, description: Description) -> dict[str, str]:
    """Shards that are missing or too short, and what to say of them."""
    faults = {}
    for file in description.files:
        path = folder / file.stored_name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            faults[file.stored_name] = f"shard '{path}' is missing."
        elif size != file.stored_bytes:
            faults[file.stored_name] = f"shard '{path}' has {size:,} bytes, its index says {file.stored_bytes:,}."
    return {name: f"{fault} Restore it, or prepare the data again." for name, fault in faults.items()}


def rows_of(data: Bytes, file: ShardFile, record: np.dtype[Any], where: str, *, verify: bool) -> Bytes:
    """The rows of a shard, (rows, bytes of a record), as a view of its bytes."""
    if len(data) != file.num_bytes:
        raise DataError(f"shard '{where}' has {len(data):,} bytes, its index says {file.num_bytes:,}. Restore it.")
    if verify and (found := xxhash.xxh64(data.data).hexdigest()) != file.hashes["xxh64"]:
        raise DataError(
            f"shard '{where}' is corrupt: its xxh64 is {found}, the index says {file.hashes['xxh64']}. Restore it, "
            f"or prepare the data again."
        )
    num_rows, first = (int(number) for number in data[:8].view("<u4"))
    if num_rows != file.num_rows or first + num_rows * record.itemsize != len(data):
        raise DataError(f"shard '{where}' holds {num_rows:,} rows, its index says {file.num_rows:,}. Restore it.")
    return data[first:].reshape(num_rows, record.itemsize)


def verify(folder: Path) -> Description:
    """Read every shard of a folder and compare its sha256 with the manifest; all faults at once."""
    description = _read_description(folder)
    faults = _incomplete(folder, description)
    for shard in description.manifest["shards"]:
        if shard["file"] in faults:
            continue
        with (folder / shard["file"]).open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != shard["sha256"]:
            faults[shard["file"]] = (
                f"shard '{folder / shard['file']}' is corrupt: sha256 {found}, not {shard['sha256']}."
            )
    raise_if_any(faults.values(), DataError)
    return description


def fingerprint(tokenizer: str, record: np.dtype[Any], files: tuple[ShardFile, ...]) -> str:
    told = [tokenizer, str(record), [[file.num_rows, file.hashes["sha256"]] for file in files]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _shard_file(entry: dict[str, Any]) -> ShardFile:
    if (entry["format"], entry["version"], entry["column_names"]) != ("mds", 2, [TOKENS, NUM_TOKENS]):
        raise ValueError(f"columns {entry['column_names']} in {entry['format']} version {entry['version']}")
    raw, stored = entry["raw_data"], entry["zip_data"] or entry["raw_data"]
    if Path(raw["basename"]).name != raw["basename"] or Path(stored["basename"]).name != stored["basename"]:
        raise ValueError(f"shard '{raw['basename']}' lies elsewhere")
    return ShardFile(
        raw["basename"], entry["samples"], raw["bytes"], raw["hashes"], stored["basename"], stored["bytes"]
    )


def _file_info(name: str, data: bytes) -> dict[str, Any]:
    hashes = {"sha256": hashlib.sha256(data).hexdigest(), "xxh64": xxhash.xxh64(data).hexdigest()}
    return {"basename": name, "bytes": len(data), "hashes": hashes}


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
