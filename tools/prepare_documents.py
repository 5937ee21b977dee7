"""Documents out of files: text, JSON lines and Parquet, also compressed, cut into blocks for workers to read.

A block is some consecutive records of one file. How files are cut depends on the files alone, so whoever reads the
blocks, in whatever processes, finds the same documents in the same order. A text file is one document a line.
"""

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from mdlm_scale.data.texts import PYTHON, decoded, python_documents
from mdlm_scale.errors import DataError, raise_if_any

BLOCK_BYTES = 1 << 19  # of text, before the rest of the last line
KINDS = {".txt": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
COMPRESSIONS = (".gz", ".zst")
HALF_PAIR = re.compile("[\ud800-\udfff]")
MAX_SHOWN = 5  # faults of one block that are named; one wrong column gives thousands


@dataclass(frozen=True)
class File:
    path: str
    kind: str  # text, jsonl, parquet, whole (a text file that is one document), python

    @property
    def num_bytes(self) -> int:
        return 0 if self.kind == "python" else os.stat(self.path).st_size


@dataclass(frozen=True)
class Block:
    file: File
    first: int  # record of the file it begins with, from 0
    num_records: int
    data: bytes | None  # lines of text; None where the reader takes the records from the file itself
    group: int = 0  # row group of a Parquet file
    skip: int = 0  # records at the start of the data that belong to an earlier block
    num_bytes: int = 0  # of the file, as it lies on disk: what a progress bar counts


@dataclass(frozen=True)
class Texts:
    texts: list[str]
    num_empty: int  # records without text; they are no documents
    num_replaced: int  # characters that were no UTF-8


def find(inputs: list[str], *, whole_files: bool = False) -> list[File]:
    """The files behind paths and folders, in a fixed order; all faults at once."""
    files: list[File] = []
    faults: list[str] = []
    for path in map(Path, inputs):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) is not None)
            if not inside:
                faults.append(f"folder '{path}' holds no {', '.join(KINDS)} file (or one of them with .gz or .zst).")
            files += [File(str(p), _kind(p) or "") for p in inside]
        elif path.is_file():
            files.append(File(str(path), _kind(path) or "text"))
        elif str(path) == PYTHON:
            files.append(File(PYTHON, "python"))
        else:
            faults.append(f"there is no file or folder '{path}'.")
    raise_if_any(faults, DataError)
    return [replace(file, kind="whole") if whole_files and file.kind == "text" else file for file in files]


def blocks(files: list[File]) -> Iterator[Block]:
    """All records of the files, in order."""
    for file in files:
        if file.kind == "python":
            yield Block(file, 0, len(python_documents()), None)
        elif file.kind == "parquet":
            yield from _row_groups(file)
        else:
            yield from _lines(file)


def part(blocks: Iterator[Block], start: int, stop: int | None) -> Iterator[Block]:
    """The records start .. stop-1 of all; a block on the border is cut."""
    position = 0
    for block in blocks:
        low = max(start - position, 0)
        high = block.num_records if stop is None else min(stop - position, block.num_records)
        position += block.num_records
        if low < high:
            yield replace(block, first=block.first + low, skip=low, num_records=high - low)
        if stop is not None and position >= stop:
            return


def read(block: Block, field: str, *, strict: bool) -> Texts:
    """The texts of a block; a DataError that names file and lines if one cannot be read."""
    num_replaced = 0
    if block.file.kind == "python":
        texts = [text for _, text in python_documents()][block.skip : block.skip + block.num_records]
    elif block.file.kind == "parquet":
        texts = _parquet_texts(block, field)
    else:
        assert block.data is not None
        whole = block.file.kind == "whole"
        lines = [block.data] if whole else block.data.split(b"\n")[block.skip : block.skip + block.num_records]
        data, num_replaced = (b"\n".join(lines), 0) if strict else _replaced(b"\n".join(lines))
        text = decoded(block.file.path, data, block.first)
        texts = [text] if whole else [line.removesuffix("\r") for line in text.split("\n")]
    if block.file.kind == "jsonl":
        texts, num_halves = _json_texts(block, texts, field, strict)
        num_replaced += num_halves
    full = [text for text in texts if text.strip()]
    return Texts(full, len(texts) - len(full), num_replaced)


def _replaced(data: bytes) -> tuple[bytes, int]:
    """With a sign in the place of what is not UTF-8, and how many of these signs."""
    try:
        data.decode()
        return data, 0
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        return text.encode(), text.count("\ufffd") - data.count("\ufffd".encode())


def _kind(path: Path) -> str | None:
    name = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    return KINDS.get(name.suffix)


def _lines(file: File) -> Iterator[Block]:
    """Blocks of whole lines, or the whole file as one."""
    size = -1 if file.kind == "whole" else BLOCK_BYTES
    first = done = 0
    try:
        with open(file.path, "rb") as raw, _decompressed(raw, file.path) as stream:
            while data := stream.read(size):
                data += b"" if file.kind == "whole" or data.endswith(b"\n") else stream.readline()
                num_records = 1 if file.kind == "whole" else data.count(b"\n") + (not data.endswith(b"\n"))
                yield Block(file, first, num_records, data, num_bytes=raw.tell() - done)
                first, done = first + num_records, raw.tell()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file.path}' cannot be read after record {first}: {error}.") from error


def _decompressed(raw: IO[bytes], path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return gzip.open(raw)  # type: ignore[return-value]
    if path.endswith(".zst"):
        import io

        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"))
    return raw


def _row_groups(file: File) -> Iterator[Block]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        metadata = ParquetFile(file.path).metadata
    except (ArrowException, OSError) as error:
        raise DataError(f"'{file.path}' is not a Parquet file: {error}.") from error
    first = 0
    for group in range(metadata.num_row_groups):
        num_records = metadata.row_group(group).num_rows
        yield Block(file, first, num_records, None, group, num_bytes=file.num_bytes // metadata.num_row_groups)
        first += num_records


def _parquet_texts(block: Block, field: str) -> list[str]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    path = block.file.path
    try:
        file = ParquetFile(path)
        columns = file.schema_arrow.names
        if field not in columns:
            raise DataError(f"'{path}' has no column '{field}'; it has {', '.join(columns)}. Choose one with --field.")
        texts = file.read_row_group(block.group, columns=[field]).column(field).to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"'{path}' cannot be read at row {block.first}: {error}.") from error
    texts = texts[block.skip : block.skip + block.num_records]
    rows = enumerate(texts, block.first)
    wrong = [f"'{path}', row {row}: {field} is {type(text).__name__}" for row, text in rows if type(text) is not str]
    raise_if_any((f"{fault}, not text." for fault in wrong[:MAX_SHOWN]), DataError)
    return texts


def _json_texts(block: Block, lines: list[str], field: str, strict: bool) -> tuple[list[str], int]:
    texts: list[str] = []
    num_replaced = 0
    faults: list[str] = []
    for number, line in enumerate(lines, block.first + 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except (ValueError, RecursionError) as error:
            faults.append(f"'{block.file.path}', line {number}: not JSON ({error}).")
            continue
        if isinstance(record, dict) and isinstance(record.get(field), str):
            text, num_halves = HALF_PAIR.subn("\ufffd", record[field])
            if num_halves and strict:
                faults.append(f"'{block.file.path}', line {number}: half a surrogate pair, which UTF-8 cannot hold.")
            texts.append(text)
            num_replaced += num_halves
        elif isinstance(record, dict) and field in record:
            faults.append(f"'{block.file.path}', line {number}: field '{field}' is not text but {record[field]!r:.40}.")
        else:
            there = ", ".join(record) if isinstance(record, dict) else f"no object but {record!r:.40}"
            faults.append(
                f"'{block.file.path}', line {number}: no field '{field}'; it has {there}. Choose one with --field."
            )
    raise_if_any(faults[:MAX_SHOWN], DataError)
    return texts, num_replaced
