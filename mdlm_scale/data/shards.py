"""Shards of rows on disk: mosaicml-streaming's MDS format, version 2, with columns of fixed size, and a manifest.

A folder holds `shard.00000.mds` and so on (or `.mds.zstd`), `index.json` as mosaicml-streaming reads it, and
`manifest.json`: how the rows were made, their number, and the sha256 of each shard. All shards but the last hold the
same number of rows, so that row r of a shard lies at header + r * record.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.errors import DataError, raise_if_any

INDEX, MANIFEST = "index.json", "manifest.json"
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


def describe(where: str, index: bytes, manifest: bytes) -> Description:
    """Read the two files of a folder; a DataError if they are not ours or do not belong together."""
    try:
        told = json.loads(manifest)
        entries = json.loads(index)["shards"]
        files = tuple(map(shard_file, entries))
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
    description = read_description(folder)
    raise_if_any(incomplete(folder, description).values(), DataError)
    return description


def read_description(folder: Path) -> Description:
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


def incomplete(folder: Path, description: Description) -> dict[str, str]:
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


def fingerprint(tokenizer: str, record: np.dtype[Any], files: tuple[ShardFile, ...]) -> str:
    told = [tokenizer, str(record), [[file.num_rows, file.hashes["sha256"]] for file in files]]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def shard_file(entry: dict[str, Any]) -> ShardFile:
    if (entry["format"], entry["version"], entry["column_names"]) != ("mds", 2, [TOKENS, NUM_TOKENS]):
        raise ValueError(f"columns {entry['column_names']} in {entry['format']} version {entry['version']}")
    raw, stored = entry["raw_data"], entry["zip_data"] or entry["raw_data"]
    if Path(raw["basename"]).name != raw["basename"] or Path(stored["basename"]).name != stored["basename"]:
        raise ValueError(f"shard '{raw['basename']}' lies elsewhere")
    return ShardFile(
        raw["basename"], entry["samples"], raw["bytes"], raw["hashes"], stored["basename"], stored["bytes"]
    )
