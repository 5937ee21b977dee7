"""A little text to train on without preparing it: the lines of a file, or the documentation that ships with Python."""

import ast
import hashlib
import pkgutil
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from mdlm_scale.errors import DataError

PYTHON = "python"  # stands for the documentation that ships with Python
PYTHON_VALIDATION = 15  # documents of it, the last ones, that are for validation
PREPARED = (".jsonl", ".parquet", ".gz", ".zst")  # what only tools/prepare_data.py reads


def documents(where: str, split: str) -> list[str]:
    """Those of a text file, one a line, or of one split of `python`."""
    if where == PYTHON:
        texts = [text for _, text in python_documents()]
        return texts[:-PYTHON_VALIDATION] if split == "train" else texts[-PYTHON_VALIDATION:]
    if Path(where).suffix in PREPARED:
        raise DataError(f"'{where}' is no text file. Prepare it: python tools/prepare_data.py --input {where} ...")
    try:
        data = Path(where).read_bytes()
    except OSError as error:
        raise DataError(f"'{where}' cannot be read: {error}.") from error
    return [line.removesuffix("\r") for line in decoded(where, data).split("\n") if line.strip()]


def decoded(path: str, data: bytes, first: int = 0) -> str:
    """The text of lines that begin with line `first`, from 0; a DataError names the line that is no UTF-8."""
    if b"\0" in data:
        line = first + data[: data.index(b"\0")].count(b"\n") + 1
        raise DataError(f"'{path}', line {line}: a zero byte; this is not UTF-8 text.")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = first + data[: error.start].count(b"\n") + 1
        raise DataError(
            f"'{path}', line {line}: {error.reason} in UTF-8. Mend the file, or prepare it without --strict: such "
            f"bytes are then replaced and counted."
        ) from error


@lru_cache
def python_documents() -> tuple[tuple[str, str], ...]:
    """(name, text) of Python's help topics and of the library's doc strings, in an order that mixes the two."""
    from pydoc_data.topics import topics

    documents = list(topics.items())
    library = Path(ast.__file__).parent
    for name in sorted(module.name for module in pkgutil.iter_modules([str(library)])):
        path = library / f"{name}.py" if (library / f"{name}.py").is_file() else library / name / "__init__.py"
        if not path.is_file():
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = list(_doc_strings(tree))
        if texts:
            documents.append((name, "\n\n".join(texts)))
    return tuple(sorted(documents, key=lambda named: hashlib.sha256(named[0].encode()).digest()))


def _doc_strings(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    """Of a module, its classes and functions, and their methods."""
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _doc_strings(child)
