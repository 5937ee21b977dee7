"""Rows by number: the same ones wherever they lie, and data that is not what the run was configured for."""

import dataclasses
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from shard_writer import ShardWriter
from torch import Tensor

from mdlm_scale.config import DataConfig, TokenizerConfig
from mdlm_scale.data import source as source_module
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, record_type
from mdlm_scale.data.source import Source, faults, in_memory
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.errors import DataError

BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
LENGTH, NUM_ROWS, IN_SHARD = 12, 60, 14  # five shards, the last smaller


def records(seed: int = 0, token: str = "<u2") -> Records:
    """Rows of random tokens; every third is padded."""
    random = np.random.default_rng(seed)
    made = np.empty(NUM_ROWS, record_type(LENGTH, np.dtype(token)))
    made[TOKENS] = random.integers(256, size=(NUM_ROWS, LENGTH))
    made[NUM_TOKENS] = np.where(np.arange(NUM_ROWS) % 3, LENGTH, random.integers(2, LENGTH, size=NUM_ROWS))
    return made


def write(folder: Path, rows: Records, *, compress: bool = False) -> str:
    folder.mkdir()
    writer = ShardWriter(folder, rows.dtype, shard_bytes=700, compress=compress)
    writer.add(rows)
    told = {"name": BYTES.name, "fingerprint": BYTES.fingerprint, "vocab_size": BYTES.vocab_size}
    writer.finish({"tokenizer": told})
    return str(folder)


def load(
    where: str | dict[str, float],
    tmp_path: Path,
    *,
    tokenizer: Tokenizer = BYTES,
    split: str = "train",
    **settings: Any,
) -> Source:
    config = DataConfig(**{"length": LENGTH, "cache_dir": str(tmp_path / "cache"), **settings})
    return source_module.load(where, split, config, tokenizer, source_module.open_cache(config))


def expected(rows: Records, ids: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    is_token_BL = np.arange(LENGTH) < rows[NUM_TOKENS][ids][:, None]
    return torch.from_numpy(rows[TOKENS][ids].astype(np.int64)), torch.from_numpy(is_token_BL)


def equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(params=["folder", "compressed", "address"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """The same rows, mapped where they lie, unpacked into a cache, or fetched into it."""
    where = write(tmp_path / "rows", records(), compress=request.param == "compressed")
    return load(f"file://{where}" if request.param == "address" else where, tmp_path)


@pytest.mark.parametrize(
    "ids",
    [
        np.random.default_rng(0).permutation(NUM_ROWS),
        np.array([7, 7, 50, 7, 50]),
        np.arange(IN_SHARD - 1, IN_SHARD + 1),
        np.array([NUM_ROWS - 1]),
        np.arange(0),
    ],
    ids=["all in any order", "again", "across shards", "last", "none"],
)
def test_rows_come_by_number(source: Source, ids: NDArray[np.int64]) -> None:
    assert equal(source.rows(ids), expected(records(), ids))


def test_rows_are_counted_through_the_shards(source: Source) -> None:
    assert source.index.shard_rows == ((IN_SHARD,) * 4 + (NUM_ROWS - 4 * IN_SHARD,),)


def test_unpadded_rows_are_all_real(tmp_path: Path) -> None:
    """Rows 1 and 2 of the three that repeat."""
    _, is_token_BL = load(write(tmp_path / "rows", records()), tmp_path).rows(np.array([1, 2]))
    assert is_token_BL.all()


def test_more_shards_than_may_be_open_are_read_in_turn(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_OPEN", 2)
    ids = np.random.default_rng(1).integers(NUM_ROWS, size=(20, 8))
    assert [k for k in range(20) if not equal(source.rows(ids[k]), expected(records(), ids[k]))] == []


def test_no_more_shards_are_open_than_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "MAX_OPEN", 2)
    source = load(write(tmp_path / "rows", records()), tmp_path)
    source.rows(np.arange(NUM_ROWS))
    mapped = Path("/proc/self/maps").read_text()
    assert sum(str(tmp_path / "rows") in line for line in mapped.splitlines()) == 2


def test_hash_is_compared_once_for_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may be mapped a thousand times in a run, and hashing it takes longer than reading a batch. So a file
    that is exchanged for another of the same size, after its first use and while it is not mapped, goes unnoticed."""
    monkeypatch.setattr(source_module, "MAX_OPEN", 1)
    source = load(write(tmp_path / "rows", records()), tmp_path)
    source.rows(np.array([0, IN_SHARD]))
    path, other = tmp_path / "rows" / "shard.00000.mds", tmp_path / "other.mds"
    data = bytearray(path.read_bytes())
    data[-LENGTH * 2 - 4] ^= 1  # the first token of the last row
    other.write_bytes(data)
    os.replace(other, path)
    x_BL, _ = source.rows(np.array([IN_SHARD - 1]))
    assert int(x_BL[0, 0]) == records()[TOKENS][IN_SHARD - 1, 0] ^ 1


def test_corrupt_copy_in_the_cache_is_not_trained_on(tmp_path: Path) -> None:
    """A copy of an earlier process, of the right size: a machine that lost its power leaves such files. It may be
    refused or fetched again, but its rows must not be used."""
    where, ids = write(tmp_path / "rows", records(), compress=True), np.arange(NUM_ROWS)
    load(where, tmp_path).rows(ids)
    (path,) = (tmp_path / "cache").glob("*/shard.00002.mds")
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    with suppress(DataError):
        assert equal(load(where, tmp_path).rows(ids), expected(records(), ids))


def test_shard_that_vanishes_is_named(tmp_path: Path) -> None:
    source = load(write(tmp_path / "rows", records()), tmp_path)
    (tmp_path / "rows" / "shard.00001.mds").unlink()
    with pytest.raises(DataError, match=r"rows/shard\.00001\.mds' cannot be read"):
        source.rows(np.array([IN_SHARD]))


def test_length_and_tokenizer_of_other_data_are_refused_at_once(tmp_path: Path) -> None:
    """Each with what to do."""
    where = write(tmp_path / "rows", records())
    text8 = tokenizer_module.load(TokenizerConfig(name="text8"))
    with pytest.raises(DataError) as caught:
        load(where, tmp_path, length=64, tokenizer=text8)
    told = str(caught.value)
    wanted = ("data.train", where, "Set data.length=12", "--length 64", "'bytes' (260", "'text8' has 35", "prepare the")
    assert [words for words in wanted if words not in told] == []


def test_faults_of_a_mixture_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"(?s)2 faults.*data\.train: 'absent'.*data\.train: 'missing'"):
        load({"absent": 1, write(tmp_path / "rows", records()): 1, "missing": 1}, tmp_path)


@pytest.mark.parametrize("where", ["absent", "absent.txt", "file:///absent"])
def test_data_that_is_not_there_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(DataError, match=rf"data\.validation: '{where}' (does not exist|holds no prepared rows)"):
        load(where, tmp_path, split="validation")


def test_text_file_becomes_rows(tmp_path: Path) -> None:
    """BOS, `ab`, EOS, `c`, EOS, EOS: one row of seven, and no padding."""
    path = tmp_path / "some.txt"
    path.write_text("ab\nc\n")
    x_BL, is_token_BL = load(str(path), tmp_path, length=7).rows(np.arange(1))
    assert (x_BL.tolist(), is_token_BL.tolist()) == ([[256, 97, 98, 257, 99, 257, 257]], [[True] * 7])


def test_python_splits_hold_different_rows(tmp_path: Path) -> None:
    splits = (load("python", tmp_path, split=split, length=128) for split in ("train", "validation"))
    train, validation = ({tuple(row) for row in s.rows(np.arange(s.num_rows))[0].tolist()} for s in splits)
    assert len(validation) > 100, "the test needs rows"
    assert train & validation == set()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(b"\xff\xfe\xff", "UTF-8"), (b"", "holds no text"), (b"\n  \n", "holds no text")],
    ids=["not UTF-8", "empty", "blank"],
)
def test_unusable_text_file_is_named(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.validation: '.*some\.txt'.*{complaint}"):
        load(str(path), tmp_path, split="validation")


def test_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a")
    too_large = dataclasses.replace(BYTES, encode_batch=lambda texts: [np.array([260])])
    with pytest.raises(DataError, match=r"some\.txt.*token id 260, outside the vocabulary, 0 \.\. 259"):
        load(str(path), tmp_path, tokenizer=too_large)


def mixture(tmp_path: Path, weights: tuple[float, float], token: str = "<u2") -> Source:
    for name, rows in (("first", records(1)), ("second", records(2, token))):
        if not (tmp_path / name).exists():
            write(tmp_path / name, rows)
    folders = [str(tmp_path / name) for name in ("first", "second")]
    return load(dict(zip(folders, weights, strict=True)), tmp_path)


def test_mixture_of_token_types_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one type of tokens, not .*first: uint16, .*second: uint32.* one --dtype"):
        mixture(tmp_path, (1.0, 1.0), "<u4")


def test_mixture_counts_through_its_datasets(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).permutation(2 * NUM_ROWS)
    joined = np.concatenate([records(1), records(2)])
    assert equal(mixture(tmp_path, (1, 1)).rows(ids), expected(joined, ids))


@pytest.mark.parametrize(("weights", "same"), [((2, 1), False), ((1, 1), True), ((5, 5), True)], ids=str)
def test_fingerprint_of_a_mixture_is_of_its_shares(tmp_path: Path, weights: tuple[float, float], same: bool) -> None:
    found = mixture(tmp_path, weights).fingerprint(), mixture(tmp_path, (1, 1)).fingerprint()
    assert (found[0] == found[1]) == same


def test_description_of_a_mixture_tells_the_shares(tmp_path: Path) -> None:
    assert re.search(
        r"60 rows .*/first \(75\.00%\), 60 rows .*/second \(25\.00%\)", mixture(tmp_path, (3, 1)).describe()
    )


def test_fingerprint_is_equal_wherever_the_rows_lie(tmp_path: Path, source: Source) -> None:
    assert source.fingerprint() == load(write(tmp_path / "again", records()), tmp_path).fingerprint()


@pytest.mark.parametrize("change", ["token", "length of a row", "number of rows"])
def test_fingerprint_of_rows_in_memory_changes_with(change: str) -> None:
    other = records()[: -1 if change == "number of rows" else None]
    other[TOKENS][3, 3] ^= change == "token"
    other[NUM_TOKENS][0] -= change == "length of a row"
    assert Source([in_memory(other)]).fingerprint() != Source([in_memory(records())]).fingerprint()


def test_fingerprint_of_rows_in_memory_is_equal_for_equal_rows() -> None:
    assert Source([in_memory(records())]).fingerprint() == Source([in_memory(records())]).fingerprint()


def test_cache_smaller_than_two_blocks_is_refused(tmp_path: Path) -> None:
    """Four shards of about 700 bytes, in a cache of 1000."""
    where = write(tmp_path / "rows", records(), compress=True)
    with pytest.raises(DataError, match=r"data\.cache_mb=0\.001 is too small for data\.train.*block_shards=2 .*0\.002"):
        load(where, tmp_path, cache_mb=0.001, block_shards=2)


def test_cache_as_large_as_the_data_is_enough(tmp_path: Path) -> None:
    """Five shards of at most 700 bytes, though two blocks could have 32."""
    where = write(tmp_path / "rows", records(), compress=True)
    assert load(where, tmp_path, cache_mb=0.0035, block_shards=16).num_rows == NUM_ROWS


@pytest.mark.parametrize(
    ("damage", "told"),
    [(lambda path: os.truncate(path, 100), "has 100 bytes now"), (Path.unlink, "is gone")],
    ids=["truncated", "removed"],
)
def test_shard_that_suffers_while_it_is_open_is_named(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    """Reading a lost page of a map would be a signal, not an error."""
    source = load(write(tmp_path / "rows", records()), tmp_path)
    source.rows(np.arange(NUM_ROWS))
    damage(tmp_path / "rows" / "shard.00001.mds")
    with pytest.raises(DataError, match=rf"shard\.00001\.mds' {told}"):
        source.rows(np.arange(NUM_ROWS))


def test_mapped_folder_needs_no_cache(tmp_path: Path) -> None:
    assert load(write(tmp_path / "rows", records()), tmp_path, cache_mb=0.001).num_rows == NUM_ROWS


@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(1, (2, 2)), (2, (3, 2, 1)), (99, (3, 2, 1))],
    ids=["one row", "with a padded row", "more than there are"],
)
def test_unigram_perplexity_is_that_of_the_counts(num_rows: int, counts: tuple[int, ...]) -> None:
    """Tolerance: a few roundings of float64."""
    rows = np.array([([1, 1, 2, 2], 4), ([1, 3, 0, 0], 2)], record_type(4, np.dtype("<u2")))
    total = sum(counts)
    by_hand = math.prod((total / count) ** (count / total) for count in counts)
    assert Source([in_memory(rows)]).unigram_perplexity(num_rows) == pytest.approx(by_hand, rel=1e-14)


def test_unigram_perplexity_does_not_depend_on_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Source([in_memory(records())]).unigram_perplexity(NUM_ROWS)
    monkeypatch.setattr(source_module, "PART", 5)
    assert Source([in_memory(records())]).unigram_perplexity(NUM_ROWS) == pytest.approx(whole, rel=1e-14)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"length": 2}, ["data.length=2 must"]),
        ({"length": 3}, []),
        ({"prefetch": 0}, ["data.prefetch=0 must"]),
        ({"block_shards": 0}, ["data.block_shards=0 must"]),
        ({"train": {"a": 0.0, "b": 1.0}}, ["weight 0.0 of 'a'"]),
        ({"train": {"a": 1.0, "b": -2.0}}, ["weight -2.0 of 'b'"]),
        ({"train": {"a": 1.0, "b": 1e-6}}, ["'b' has less than 1/10000"]),
        ({"train": {}}, ["data.train={} names no data"]),
        ({"train": {"a": 0.7, "b": 0.3}}, []),
        ({"train": {"a": 0.0, "b": -1.0}, "length": 0, "prefetch": 0}, ["length", "prefetch", "'a'", "'b'"]),
    ],
    ids=["length", "least length", "prefetch", "block", "zero", "negative", "too small", "empty", "mixture", "all"],
)
def test_faults_of_the_section_are_told_at_once(settings: dict[str, Any], told: list[str]) -> None:
    found = faults(DataConfig(**settings))
    assert [words in fault for words, fault in zip(told, found, strict=True)] == [True] * len(told)
