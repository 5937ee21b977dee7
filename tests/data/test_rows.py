"""Rows out of documents: every token once and in order, ends where they are promised, padding behind and counted."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from prepare_workers import Cutter

from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, Wrapping, token_type
from mdlm_scale.data.tokenizer import Ids

TOKENIZER = tokenizer_module.load(TokenizerConfig(name="bytes"))
B, E, P = TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id
LENGTH = 8
SIZES = (1, 6, 3, 8, 12, 17, 2, 2, 7)  # of documents; some fill rows of 6 or 8 places, and no stream of them all does
WRAPPINGS = [Wrapping(*flags) for flags in product([False, True], repeat=3)]
NAMES = [
    "-".join(name for name, flag in vars(wrapping).items() if flag) or "bare"  # as ids of the tests
    for wrapping in WRAPPINGS
]
every_wrapping = pytest.mark.parametrize("wrapping", WRAPPINGS, ids=NAMES)


def texts() -> list[Ids]:
    """Documents of these sizes, in which no token comes twice."""
    return np.split(np.arange(sum(SIZES), dtype=np.uint8), np.cumsum(SIZES)[:-1])


def cut(wrapping: Wrapping, documents: list[Ids], length: int = LENGTH, group: int = 1000) -> Records:
    """The rows of documents that come so many at a time."""
    cutter = Cutter(wrapping, length, TOKENIZER, np.dtype("<u2"))
    packed = [cutter.pack(documents[i : i + group]) for i in range(0, len(documents), group)]
    return np.concatenate([*(cutter.add(piece) for piece in packed), cutter.finish()])


@pytest.mark.parametrize(
    ("wrapping", "rows"),
    [
        (Wrapping(), [[B, 1, 2, E, E], [B, 3, 4, 5, E], [B, 6, E, E, P]]),
        (Wrapping(document_end=False), [[B, 1, 2, 3, E], [B, 4, 5, 6, E]]),
        (Wrapping(row_ends=False), [[1, 2, E, 3, 4], [5, 6, E, P, P]]),
        (Wrapping(document_end=False, row_ends=False), [[1, 2, 3, 4, 5], [6, P, P, P, P]]),
        (Wrapping(padded=True), [[B, 1, 2, E, P], [B, 3, 4, 5, E], [B, 6, E, P, P]]),
        (Wrapping(padded=True, document_end=False), [[B, 1, 2, E, P], [B, 3, 4, 5, E], [B, 6, E, P, P]]),
        (Wrapping(padded=True, row_ends=False), [[1, 2, P, P, P], [3, 4, 5, 6, P]]),
    ],
)
def test_ends_and_padding_stand_where_they_are_promised(wrapping: Wrapping, rows: list[list[int]]) -> None:
    found = cut(wrapping, [np.array([1, 2]), np.array([3, 4, 5, 6])], length=5)
    assert found[TOKENS].tolist() == rows


@every_wrapping
def test_every_token_comes_once_and_in_order(wrapping: Wrapping) -> None:
    ids = cut(wrapping, texts())[TOKENS].flatten()
    assert ids[ids < 256].tolist() == [*range(sum(SIZES))]


@every_wrapping
def test_number_of_tokens_says_where_padding_begins(wrapping: Wrapping) -> None:
    rows = cut(wrapping, texts())
    padding = np.arange(LENGTH) >= rows[NUM_TOKENS][:, None]
    assert np.array_equal(rows[TOKENS] == P, padding)


@every_wrapping
def test_no_row_is_empty(wrapping: Wrapping) -> None:
    assert cut(wrapping, texts())[NUM_TOKENS].min() > 2 * wrapping.row_ends


@pytest.mark.parametrize("wrapping", [w for w in WRAPPINGS if not w.padded], ids=NAMES[:4])
def test_only_the_last_row_of_a_stream_is_padded(wrapping: Wrapping) -> None:
    num_tokens = cut(wrapping, texts())[NUM_TOKENS]
    assert (num_tokens[:-1] == LENGTH).all()
    assert num_tokens[-1] < LENGTH


@pytest.mark.parametrize("wrapping", [w for w in WRAPPINGS if w.padded], ids=NAMES[4:])
def test_padded_row_holds_one_document(wrapping: Wrapping) -> None:
    owner = np.repeat(np.arange(len(SIZES)), SIZES)
    owners = [set(owner[row[row < 256]]) for row in cut(wrapping, texts())[TOKENS]]
    assert [len(documents) for documents in owners] == [1] * len(owners)


@pytest.mark.parametrize(("row_ends", "places"), [(True, 6), (False, 8)])
def test_document_takes_as_few_padded_rows_as_it_can(row_ends: bool, places: int) -> None:
    rows = cut(Wrapping(padded=True, row_ends=row_ends), texts())
    assert len(rows) == sum(-(-size // places) for size in SIZES)


@every_wrapping
@pytest.mark.parametrize("group", range(1, len(SIZES)))
def test_documents_in_any_groups_give_the_same_records(wrapping: Wrapping, group: int) -> None:
    assert cut(wrapping, texts(), group=group).tobytes() == cut(wrapping, texts()).tobytes()


@every_wrapping
def test_group_without_documents_changes_nothing(wrapping: Wrapping) -> None:
    cutter = Cutter(wrapping, LENGTH, TOKENIZER, np.dtype("<u2"))
    pieces = [cutter.add(cutter.pack(documents)) for documents in ([], texts()[:4], [], texts()[4:], [])]
    assert np.concatenate([*pieces, cutter.finish()]).tobytes() == cut(wrapping, texts()).tobytes()


@pytest.mark.parametrize("padded", [False, True])
def test_full_row_is_followed_by_no_empty_one(padded: bool) -> None:
    rows = cut(Wrapping(padded=padded, document_end=False), [np.arange(6), np.arange(12)])
    assert rows[NUM_TOKENS].tolist() == [LENGTH] * 3


def test_nothing_gives_no_rows() -> None:
    assert len(cut(Wrapping(), [])) == 0


@pytest.mark.parametrize(("vocab_size", "name"), [(260, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_token_takes_two_bytes_if_the_last_id_fits(vocab_size: int, name: str) -> None:
    assert token_type(vocab_size).name == name


@every_wrapping
def test_ids_beyond_two_bytes_are_kept(wrapping: Wrapping) -> None:
    large = replace(TOKENIZER, vocab_size=70_004, bos_id=70_000, eos_id=70_001, pad_id=70_002, mask_id=70_003)
    cutter = Cutter(wrapping, LENGTH, large, token_type(large.vocab_size))
    packed = cutter.pack([np.arange(69_000, 69_010, dtype=np.uint32)])
    ids = np.concatenate([cutter.add(packed), cutter.finish()])[TOKENS].flatten()
    assert ids[ids < 70_000].tolist() == [*range(69_000, 69_010)]
