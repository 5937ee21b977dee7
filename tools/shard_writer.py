"""Shards written, and read again in full: what mdlm_scale/data/shards.py describes and a run maps or fetches."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstd

from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records
from mdlm_scale.data.shards import INDEX, MANIFEST, Description, fingerprint, incomplete, read_description, shard_file
from mdlm_scale.errors import DataError, raise_if_any

SHARD_BYTES = 1 << 26
ZSTD_LEVEL = 3


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
        files = tuple(map(shard_file, self._entries))
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


def verify(folder: Path) -> Description:
    """Read every shard of a folder and compare its sha256 with the manifest; all faults at once."""
    description = read_description(folder)
    faults = incomplete(folder, description)
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


def _file_info(name: str, data: bytes) -> dict[str, Any]:
    hashes = {"sha256": hashlib.sha256(data).hexdigest(), "xxh64": xxhash.xxh64(data).hexdigest()}
    return {"basename": name, "bytes": len(data), "hashes": hashes}


def _write_file(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
