"""Rows of tokens in memory, from text: what the loader reads while a corpus is small.

Documents are tokenised without special tokens, an end-of-text token follows each, and the stream is cut into rows of
L - 2 tokens with BOS in front and EOS behind. The last row is padded: nothing is dropped.
"""

import ast
import hashlib
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from mdlm_scale.config import DataConfig
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.errors import DataError

PYTHON = "python"
VALIDATION_EVERY = 20  # one document in so many is for validation


@dataclass(frozen=True)
class Source:
    """Fixed rows of L tokens, by number."""

    rows_NL: Tensor  # int32 on the host
    last_length: int  # real tokens of the last row; the others are full

    @property
    def num_rows(self) -> int:
        return len(self.rows_NL)

    def rows(self, ids_B: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids, (B, L) int64, and which of them are real."""
        x_BL = self.rows_NL[ids_B].long()
        length = x_BL.shape[1]
        num_real_B = torch.where(ids_B == self.num_rows - 1, self.last_length, length)
        return x_BL, torch.arange(length) < num_real_B[:, None]

    def fingerprint(self) -> str:
        """Equal for equal rows: what a resumed run compares."""
        shape = f"{tuple(self.rows_NL.shape)} {self.last_length} ".encode()
        return hashlib.sha256(shape + self.rows_NL.numpy().tobytes()).hexdigest()

    def describe(self) -> str:
        num_rows, length = self.rows_NL.shape
        return f"{num_rows:,} rows of {length} tokens, {(num_rows - 1) * length + self.last_length:,} in all"

    def unigram_perplexity(self, num_rows: int) -> float:
        """Perplexity of the first rows under their own token frequencies: the best without context."""
        x_BL, is_token_BL = self.rows(torch.arange(min(num_rows, self.num_rows)))
        counts = torch.bincount(x_BL[is_token_BL]).double()
        p = counts[counts > 0] / counts.sum()
        return float(torch.exp(-(p * p.log()).sum()))


def load(where: str, split: str, config: DataConfig, tokenizer: Tokenizer) -> Source:
    """The rows of `python` or of a text file; `split` is train or validation and names the setting in errors."""
    source = wrap((tokenizer.encode(text) for text in documents(where, split)), config.length, tokenizer)
    if source.num_rows == 0:
        raise DataError(f"data.{split}='{where}' holds no text.")
    largest = int(source.rows_NL.max())
    if largest >= tokenizer.vocab_size:
        raise DataError(
            f"data.{split}='{where}' holds token id {largest}, but the vocabulary of tokenizer.name="
            f"'{tokenizer.name}' has {tokenizer.vocab_size} entries. Use the tokenizer that made the tokens."
        )
    if bool((source.rows_NL == tokenizer.mask_id).any()):
        raise DataError(
            f"data.{split}='{where}' holds the mask token, id {tokenizer.mask_id}, which only noise may write."
        )
    return source


def documents(where: str, split: str) -> Iterator[str]:
    """The texts of a split, one at a time."""
    if where == PYTHON:
        wanted = split == "validation"
        for name, text in python_documents():
            if (_bucket(name) == 0) == wanted:
                yield text
        return
    path = Path(where)
    if not path.is_file():
        raise DataError(f"data.{split}='{where}' is not a file. Give a text file (one document a line), or `python`.")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DataError(f"data.{split}='{where}' is not UTF-8 text: {error}.") from error
    yield from (line for line in lines if line.strip())


def wrap(documents: Iterable[list[int]], length: int, tokenizer: Tokenizer) -> Source:
    """Cut the stream of documents into rows of `length` tokens."""
    stream: list[int] = []
    for ids in documents:
        stream += [*ids, tokenizer.eos_id]
    inner = length - 2
    num_rows = -(-len(stream) // inner)
    rows_NL = torch.full((num_rows, length), tokenizer.pad_id, dtype=torch.int32)
    if num_rows == 0:
        return Source(rows_NL, 0)
    rows_NL[:, 0] = tokenizer.bos_id
    tokens = torch.tensor(stream, dtype=torch.int32)
    rows_NL[:-1, 1:-1] = tokens[: (num_rows - 1) * inner].view(-1, inner)
    rows_NL[:-1, -1] = tokenizer.eos_id
    rest = tokens[(num_rows - 1) * inner :]
    rows_NL[-1, 1 : len(rest) + 1] = rest
    rows_NL[-1, len(rest) + 1] = tokenizer.eos_id
    return Source(rows_NL, len(rest) + 2)


@lru_cache
def python_documents() -> tuple[tuple[str, str], ...]:
    """(name, text) of the documentation that ships with Python: its help topics, and the library's doc strings."""
    from pydoc_data.topics import topics

    documents = sorted(topics.items())
    library = Path(ast.__file__).parent
    for name in sorted(module.name for module in pkgutil.iter_modules([str(library)])):
        path = library / f"{name}.py" if (library / f"{name}.py").is_file() else library / name / "__init__.py"
        if not path.is_file():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = list(_doc_strings(tree))
        if texts:
            documents.append((name, "\n\n".join(texts)))
    return tuple(documents)


def _doc_strings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Of a module, its classes and functions, and their methods."""
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _doc_strings(child)


def _bucket(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % VALIDATION_EVERY


def faults(config: DataConfig) -> list[str]:
    """What is wrong with the data section, before any text is read."""
    found = []
    if config.length < 3:
        found.append(f"data.length={config.length} must be at least 3: a token between BOS and EOS.")
    if config.prefetch < 1:
        found.append(f"data.prefetch={config.prefetch} must be at least 1.")
    return found
