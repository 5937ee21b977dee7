"""From documents to rows of fixed length: what stands between documents, around rows, and behind the last token.

A row is L token ids and the number of them that are real; what follows is padding. Nothing is dropped and nothing is
repeated: the last row is padded, and a document too long for a padded row of its own runs on into further rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdlm_scale.data.tokenizer import Ids, Tokenizer

TOKENS, NUM_TOKENS = "input_ids", "num_tokens"  # the columns of a record
Records = NDArray[np.void]


@dataclass(frozen=True)
class Wrapping:
    padded: bool = False  # each document in rows of its own; else the documents are one stream, cut anywhere
    document_end: bool = True  # EOS after each document of a stream
    row_ends: bool = True  # BOS before and EOS behind the tokens of a row


def token_type(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def record_type(length: int, token: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([(TOKENS, token, (length,)), (NUM_TOKENS, "<u4")])


def stream(documents: Sequence[Ids], tokenizer: Tokenizer, token: np.dtype[Any], document_end: bool = True) -> Ids:
    """Tokenised documents one after the other."""
    end = np.full(int(document_end), tokenizer.eos_id, token)
    parts = [piece for ids in documents for piece in (ids.astype(token), end)]
    return np.concatenate([end[:0], *parts])


def wrapped(
    texts: Sequence[Ids], length: int, tokenizer: Tokenizer, token: np.dtype[Any], row_ends: bool = True
) -> Records:
    """Each of these in rows of its own; the last of its rows is padded."""
    inner = length - 2 * row_ends  # places for text
    parts = [ids[i : i + inner] for ids in texts for i in range(0, len(ids), inner)]
    begin, end = (np.full(int(row_ends), id_, token) for id_ in (tokenizer.bos_id, tokenizer.eos_id))
    records = np.empty(len(parts), record_type(length, token))
    records[TOKENS] = tokenizer.pad_id
    records[NUM_TOKENS] = [len(ids) + 2 * row_ends for ids in parts]
    for row_L, ids, num_tokens in zip(records[TOKENS], parts, records[NUM_TOKENS], strict=True):
        row_L[:num_tokens] = np.concatenate([begin, ids, end])
    return records
