"""From documents to rows of fixed length: what stands between documents, around rows, and behind the last token.

A row is L token ids and the number of them that are real; what follows is padding. Nothing is dropped and nothing is
repeated: the last row is padded, and a document too long for a padded row of its own runs on into further rows.
"""

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


class Cutter:
    """Makes rows in two halves: `pack` needs no neighbours and can run anywhere, `add` keeps the order."""

    def __init__(self, wrapping: Wrapping, length: int, tokenizer: Tokenizer, token: np.dtype[Any]) -> None:
        self.wrapping, self.tokenizer, self.token = wrapping, tokenizer, token
        self.record = record_type(length, token)
        self.inner = length - 2 * wrapping.row_ends  # places for text
        self._rest: Ids = np.empty(0, self.token)

    def pack(self, documents: list[Ids]) -> Ids | Records:
        """Tokenised documents as a stretch of the stream, or as padded rows."""
        if self.wrapping.padded:
            parts = [ids[i : i + self.inner] for ids in documents for i in range(0, len(ids), self.inner)]
            records = self._empty(len(parts))
            for record, ids in zip(records, parts, strict=True):
                self._fill(record, ids)
            return records
        end = np.full(int(self.wrapping.document_end), self.tokenizer.eos_id, self.token)
        parts = [piece for ids in documents for piece in (ids.astype(self.token), end)]
        return np.concatenate([end[:0], *parts])

    def add(self, packed: Ids | Records) -> Records:
        """The rows that are full now."""
        if self.wrapping.padded:
            return packed
        stream = np.concatenate([self._rest, packed])
        num_rows = len(stream) // self.inner
        self._rest = stream[num_rows * self.inner :].copy()
        records = self._empty(num_rows)
        first = int(self.wrapping.row_ends)
        records[TOKENS][:, first : first + self.inner] = stream[: num_rows * self.inner].reshape(-1, self.inner)
        if self.wrapping.row_ends:
            records[TOKENS][:, 0], records[TOKENS][:, -1] = self.tokenizer.bos_id, self.tokenizer.eos_id
        records[NUM_TOKENS] = records[TOKENS].shape[1]
        return records

    def finish(self) -> Records:
        """The last row, padded, if tokens are left."""
        records = self._empty(int(len(self._rest) > 0))
        for record in records:
            self._fill(record, self._rest)
        self._rest = self._rest[:0]
        return records

    def _empty(self, num_rows: int) -> Records:
        records = np.empty(num_rows, self.record)
        records[TOKENS] = self.tokenizer.pad_id
        return records

    def _fill(self, record: Any, ids: Ids) -> None:
        around = [self.tokenizer.bos_id], [self.tokenizer.eos_id]
        whole = np.concatenate([around[0], ids, around[1]]) if self.wrapping.row_ends else ids
        record[TOKENS][: len(whole)] = whole
        record[NUM_TOKENS] = len(whole)
