"""Shards: what is written is what is read, and nothing else passes for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstd
from shard_writer import ShardWriter, verify

from mdlm_scale.config import DataConfig, TokenizerConfig
from mdlm_scale.data import cache
from mdlm_scale.data import source as source_module
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, record_type
from mdlm_scale.data.shards import INDEX, MANIFEST, read_folder, rows_of
from mdlm_scale.errors import DataError

BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
LENGTH, NUM_ROWS, LIMIT = 12, 60, 700  # 14 rows a shard: five shards, the last smaller
Change = Callable[[dict[str, Any]], Any]


def records(length: int = LENGTH, token: str = "uint16", seed: int = 0) -> Records:
    """Rows of random tokens over the whole range of their type, and of random lengths."""
    random = np.random.default_rng(seed)
    made = np.empty(NUM_ROWS, record_type(length, np.dtype(token).newbyteorder("<")))
    made[TOKENS] = random.integers(np.iinfo(token).max + 1, size=(NUM_ROWS, length))
    made[NUM_TOKENS] = random.integers(1, length + 1, size=NUM_ROWS)
    return made


def write(folder: Path, rows: Records, *, limit: int = LIMIT, compress: bool = False, tokenizer: str = "") -> Path:
    """A folder of shards, given to the writer in uneven pieces."""
    folder.mkdir()
    writer = ShardWriter(folder, rows.dtype, shard_bytes=limit, compress=compress)
    for piece in np.split(rows, [1, 1, 30, 47]):
        writer.add(piece)
    writer.finish({"tokenizer": {"name": "bytes", "fingerprint": tokenizer or BYTES.fingerprint, "vocab_size": 260}})
    return folder


def read(folder: Path) -> Records:
    found = read_folder(folder)
    parts = []
    for file in found.files:
        stored = (folder / file.stored_name).read_bytes()
        data = np.frombuffer(zstd.decompress(stored) if file.compressed else stored, np.uint8)
        parts.append(rows_of(data, file, found.record, file.name, verify=True).copy().view(found.record)[:, 0])
    return np.concatenate(parts)


def corrupt(path: Path) -> None:
    """Another last byte, in a file of the same size."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "rows", records())


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "compressed"])
@pytest.mark.parametrize("token", ["uint16", "uint32"])
@pytest.mark.parametrize("length", [3, 7, 12])
def test_rows_are_read_as_they_were_written(tmp_path: Path, length: int, token: str, compress: bool) -> None:
    written = records(length, token)
    assert np.array_equal(read(write(tmp_path / "rows", written, compress=compress)), written)


@pytest.mark.parametrize("limit", [600, 1000, 1 << 20])
def test_no_shard_is_larger_than_the_limit(tmp_path: Path, limit: int) -> None:
    folder = write(tmp_path / "rows", records(), limit=limit)
    assert max(path.stat().st_size for path in folder.glob("*.mds")) <= limit


@pytest.mark.parametrize("limit", [600, 1000])
def test_all_shards_but_the_last_are_equally_large(tmp_path: Path, limit: int) -> None:
    *sizes, _ = [file.num_bytes for file in read_folder(write(tmp_path / "rows", records(), limit=limit)).files]
    assert len(sizes) > 1, "the test needs several shards"
    assert len(set(sizes)) == 1


def test_row_larger_than_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    assert [file.num_rows for file in read_folder(write(tmp_path / "rows", records(), limit=10)).files] == [1] * 60


def test_manifest_counts_rows_and_tokens(folder: Path) -> None:
    manifest = read_folder(folder).manifest
    assert (manifest["rows"], manifest["tokens"]) == (NUM_ROWS, int(records()[NUM_TOKENS].sum()))


def test_shards_are_the_same_bytes_however_the_rows_came(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "at once").mkdir()
    writer = ShardWriter(tmp_path / "at once", records().dtype, shard_bytes=LIMIT)
    writer.add(records())
    writer.finish(json.loads((folder / MANIFEST).read_text()))
    first, second = ({path.name: path.read_bytes() for path in f.iterdir()} for f in (folder, tmp_path / "at once"))
    assert first == second


def test_mosaicml_streaming_reads_the_shards(folder: Path) -> None:
    """With its own reader of the format, row by row."""
    cache._streaming()  # its package as a whole imports more than is installed
    from streaming.base.format import reader_from_json

    shards = json.loads((folder / INDEX).read_text())["shards"]
    rows = [row for shard in shards for row in reader_from_json(str(folder), None, shard)]
    found = np.array([(row[TOKENS], row[NUM_TOKENS]) for row in rows], records().dtype)
    assert np.array_equal(found, records())


def test_fingerprint_is_that_of_the_rows_compressed_or_not(tmp_path: Path, folder: Path) -> None:
    packed = write(tmp_path / "packed", records(), compress=True)
    assert read_folder(packed).fingerprint == read_folder(folder).fingerprint


@pytest.mark.parametrize(
    ("rows", "settings"),
    [
        (records(seed=1), {}),
        (records()[:-1], {}),
        (records(), {"tokenizer": "another"}),
        (records(), {"limit": 1000}),
    ],
    ids=["tokens", "number of rows", "tokenizer", "size of shards"],
)
def test_fingerprint_differs_with(tmp_path: Path, folder: Path, rows: Records, settings: dict[str, Any]) -> None:
    other = write(tmp_path / "other", rows, **settings)
    assert read_folder(other).fingerprint != read_folder(folder).fingerprint


def test_missing_and_truncated_shards_are_named_at_once(folder: Path) -> None:
    (folder / "shard.00001.mds").unlink()
    cut = folder / "shard.00003.mds"
    cut.write_bytes(cut.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"(?s)2 faults.*shard\.00001\.mds' is missing.*shard\.00003\.mds' has 6\d\d b"):
        read_folder(folder)


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
def test_folder_without_index_or_manifest_is_named_with_the_file(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=rf"rows' is no folder of prepared rows.*rows/{name}.*prepare_data"):
        read_folder(folder)


@pytest.mark.parametrize("name", [INDEX, MANIFEST])
@pytest.mark.parametrize(
    "content", [b"", b'{"shards": [', b"[]", b"3", b"{}", b"\xff\xfe", b'{"shards": []}', b'{"shards": [1]}'], ids=repr
)
def test_file_of_something_else_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=r"rows': index\.json and manifest\.json are not those of prepared rows"):
        read_folder(folder)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda shard: shard.update(version=3), "version 3"),
        (lambda shard: shard.update(format="jsonl"), "jsonl"),
        (lambda shard: shard.update(column_names=["tokens"]), "columns ['tokens']"),
        (lambda shard: shard.update(column_encodings=["bytes", "uint32"]), "ValueError"),
        (lambda shard: shard.update(column_encodings=[2, 3]), "prepared rows"),
        (lambda shard: shard.pop("samples"), "KeyError"),
        (lambda shard: shard["raw_data"].update(basename="../x.mds"), "lies elsewhere"),
        (lambda shard: shard["raw_data"].update(basename="/etc/passwd"), "lies elsewhere"),
        (lambda shard: shard.update(zip_data=shard["raw_data"] | {"basename": "../x.zstd"}), "lies elsewhere"),
        (lambda s: s.update(zip_data=s["raw_data"], raw_data=s["raw_data"] | {"basename": "../x"}), "lies elsewhere"),
    ],
    ids=["version", "format", "columns", "encoding", "no encoding", "key", "up", "root", "zip", "unpacked"],
)
def test_index_of_something_else_says_what_it_is(folder: Path, change: Change, complaint: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    for shard in index["shards"]:
        change(shard)
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(DataError) as caught:
        read_folder(folder)
    assert complaint in str(caught.value)


def test_index_of_another_dataset_does_not_belong(tmp_path: Path, folder: Path) -> None:
    other = write(tmp_path / "other", records(seed=1))
    (folder / INDEX).write_bytes((other / INDEX).read_bytes())
    with pytest.raises(DataError, match=r"rows': index\.json does not belong to manifest\.json"):
        read_folder(folder)


def test_shards_that_mosaicml_streaming_wrote_are_refused(tmp_path: Path, folder: Path) -> None:
    """Rows of other columns, whose meaning is not known here."""
    cache._streaming()
    from streaming.base.format.mds.writer import MDSWriter

    theirs = tmp_path / "theirs"
    with MDSWriter(out=str(theirs), columns={"tokens": "ndarray:uint16:12"}) as writer:
        writer.write({"tokens": np.arange(12, dtype=np.uint16)})
    (theirs / MANIFEST).write_bytes((folder / MANIFEST).read_bytes())
    with pytest.raises(DataError, match=r"theirs.*columns \['tokens'\] in mds version 2"):
        read_folder(theirs)


def test_corrupt_byte_is_found_at_first_use(tmp_path: Path, folder: Path) -> None:
    """A row of the shard is read, not the one that is corrupt: the last."""
    corrupt(folder / "shard.00002.mds")
    config = DataConfig(length=LENGTH)
    source = source_module.load(str(folder), "train", config, BYTES, source_module.open_cache(config))
    with pytest.raises(DataError, match=r"rows/shard\.00002\.mds' is corrupt.*xxh64"):
        source.rows(np.array([2 * 14]))


def test_shard_cut_after_the_folder_was_read_is_named(folder: Path) -> None:
    found = read_folder(folder)
    data = np.fromfile(folder / found.files[0].name, np.uint8)[:-1]
    with pytest.raises(DataError, match=r"'some\.mds' has .* bytes, its index says"):
        rows_of(data, found.files[0], found.record, "some.mds", verify=False)


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "compressed"])
def test_verify_passes_what_is_whole(tmp_path: Path, compress: bool) -> None:
    folder = write(tmp_path / "rows", records(), compress=compress)
    assert verify(folder) == read_folder(folder)


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "compressed"])
def test_verify_names_all_corrupt_shards_at_once(tmp_path: Path, compress: bool) -> None:
    folder = write(tmp_path / "rows", records(), compress=compress)
    for number in (1, 3):
        (path,) = folder.glob(f"shard.0000{number}.*")
        corrupt(path)
    with pytest.raises(DataError, match=r"(?s)2 faults.*shard\.00001\.\w+.*is corrupt.*shard\.00003\.\w+.*is corrupt"):
        verify(folder)
