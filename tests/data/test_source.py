"""Rows from text: nothing dropped, nothing repeated, the end padded and known; and text that cannot be used."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from mdlm_scale.config import DataConfig, TokenizerConfig
from mdlm_scale.data import source as source_module
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.source import Source, documents, faults, wrap
from mdlm_scale.errors import DataError

BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9, 10, 11], [12, 13]]
STREAM = [token for ids in DOCUMENTS for token in [*ids, BYTES.eos_id]]  # 18 tokens: the last row full, or not
LENGTHS = (3, 5, 6, 8, 20, 64)


@pytest.mark.parametrize("length", LENGTHS)
def test_wrapped_rows_hold_every_token_once(length: int) -> None:
    source = wrap(DOCUMENTS, length, BYTES)
    x_BL, is_token_BL = source.rows(torch.arange(source.num_rows))
    real = [row[is_token].tolist() for row, is_token in zip(x_BL, is_token_BL, strict=True)]
    assert [token for row in real for token in row[1:-1]] == STREAM


@pytest.mark.parametrize("length", LENGTHS)
def test_wrapped_rows_begin_and_end(length: int) -> None:
    source = wrap(DOCUMENTS, length, BYTES)
    x_BL, is_token_BL = source.rows(torch.arange(source.num_rows))
    last_B = is_token_BL.sum(1) - 1
    ends = torch.stack([x_BL[:, 0], x_BL[torch.arange(source.num_rows), last_B]], dim=1)
    assert torch.equal(ends, torch.tensor([BYTES.bos_id, BYTES.eos_id]).expand_as(ends))


@pytest.mark.parametrize("length", LENGTHS)
def test_rows_are_as_many_as_the_stream_fills(length: int) -> None:
    assert wrap(DOCUMENTS, length, BYTES).rows_NL.shape == (math.ceil(len(STREAM) / (length - 2)), length)


@pytest.mark.parametrize("length", LENGTHS)
def test_only_what_is_real_counts(length: int) -> None:
    """Everything but padding: the stream, and two tokens around each row's part of it."""
    source = wrap(DOCUMENTS, length, BYTES)
    _, is_token_BL = source.rows(torch.arange(source.num_rows))
    assert int(is_token_BL.sum()) == len(STREAM) + 2 * source.num_rows


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_not_real_is_padding(length: int) -> None:
    source = wrap(DOCUMENTS, length, BYTES)
    x_BL, is_token_BL = source.rows(torch.arange(source.num_rows))
    assert torch.equal(x_BL == BYTES.pad_id, ~is_token_BL)


def test_rows_come_by_number() -> None:
    source = wrap(DOCUMENTS, 6, BYTES)
    x_BL, _ = source.rows(torch.tensor([2, 0, 2]))
    assert torch.equal(x_BL, source.rows_NL[[2, 0, 2]].long())


def test_python_splits_are_disjoint() -> None:
    assert set(documents("python", "train")) & set(documents("python", "validation")) == set()


def test_python_splits_are_the_whole() -> None:
    splits = [*documents("python", "train"), *documents("python", "validation")]
    assert sorted(splits) == sorted(text for _, text in source_module.python_documents())


def test_python_documents_are_a_megabyte() -> None:
    assert sum(len(text) for _, text in source_module.python_documents()) >= 1_000_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ("one\n\n  \ntwo", ["one", "two"]),
        ("one\r\ntwo\r\n", ["one", "two"]),
        (" indented größer\n", [" indented größer"]),
        ("a page\fand another\u2028and a paragraph\n", ["a page\fand another\u2028and a paragraph"]),
    ],
    ids=["lines", "blank lines", "windows", "spaces", "other separators"],
)
def test_text_file_is_one_document_a_line(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(text.encode())
    assert list(documents(str(path), "train")) == expected


def test_text_file_becomes_rows(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("ab\nc\n")
    source = source_module.load(str(path), "train", DataConfig(length=7), BYTES)
    assert source.rows_NL.tolist() == [[256, 97, 98, 257, 99, 257, 257]]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "is not a file"),
        (b"\xff\xfe\xff", "is not UTF-8 text"),
        (b"", "holds no text"),
        (b"\n  \n", "holds no text"),
    ],
    ids=["missing", "not UTF-8", "empty", "blank"],
)
def test_unusable_file_is_named(tmp_path: Path, content: bytes | None, complaint: str) -> None:
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=rf"data\.validation='.*some\.txt' {complaint}"):
        source_module.load(str(path), "validation", DataConfig(), BYTES)


def test_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("a")
    too_large = dataclasses.replace(BYTES, encode=lambda text: [260])
    with pytest.raises(DataError, match=r"token id 260, but the vocabulary .* has 260 entries"):
        source_module.load(str(path), "train", DataConfig(), too_large)


@pytest.mark.parametrize(
    ("num_rows", "counts"),
    [(1, (2, 2)), (2, (3, 2, 1)), (99, (3, 2, 1))],
    ids=["one row", "with a padded row", "more than there are"],
)
def test_unigram_perplexity_is_that_of_the_counts(num_rows: int, counts: tuple[int, ...]) -> None:
    """Tolerance: a few roundings of float64."""
    source = Source(torch.tensor([[1, 1, 2, 2], [1, 3, 0, 0]], dtype=torch.int32), last_length=2)
    total = sum(counts)
    by_hand = math.prod((total / count) ** (count / total) for count in counts)
    assert source.unigram_perplexity(num_rows) == pytest.approx(by_hand, rel=1e-14)


@pytest.mark.parametrize(
    ("rows", "last_length"),
    [([[1, 2, 3, 4], [5, 6, 7, 7]], 4), ([[1, 2, 3, 4], [5, 6, 8, 7]], 3), ([[1, 2], [3, 4], [5, 6], [7, 7]], 2)],
    ids=["end of the text", "token", "length"],
)
def test_fingerprint_changes_with_the_content(rows: list[list[int]], last_length: int) -> None:
    base = Source(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 7]], dtype=torch.int32), last_length=3)
    assert Source(torch.tensor(rows, dtype=torch.int32), last_length).fingerprint() != base.fingerprint()


def test_fingerprint_is_equal_for_equal_rows() -> None:
    assert wrap(DOCUMENTS, 6, BYTES).fingerprint() == wrap(DOCUMENTS, 6, BYTES).fingerprint()


@pytest.mark.parametrize(("length", "num_faults"), [(2, 1), (3, 0)])
def test_row_needs_room_for_a_token(length: int, num_faults: int) -> None:
    assert len(faults(DataConfig(length=length))) == num_faults


def test_faults_come_at_once() -> None:
    assert len(faults(DataConfig(length=0, prefetch=0))) == 2
