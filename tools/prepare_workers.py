"""Documents to a folder of shards, by as many processes as there are, with the same bytes whatever their number.

Workers read, detokenise and tokenise blocks of documents; this process takes their results in order, cuts rows and
writes shards into `DIR.tmp`, which becomes `DIR` when all is written. Interrupted, it starts clean the next time.
"""

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import prepare_documents as documents
from prepare_documents import Block, File
from prepare_recipes import detokenizer
from shard_writer import SHARD_BYTES, ShardWriter

from mdlm_scale import log as log_module
from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import shards
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.rows import Records, Wrapping, record_type, stream, token_type, wrapped
from mdlm_scale.data.tokenizer import Ids, Tokenizer
from mdlm_scale.errors import DataError
from mdlm_scale.log import log

OURS = ("shard.", shards.INDEX, shards.MANIFEST)
TOLD = ("name", "fingerprint", "vocab_size", "mask_id", "pad_id", "bos_id", "eos_id")  # of the tokenizer


@dataclass(frozen=True)
class Settings:
    """All that decides what the rows hold, beside the documents."""

    tokenizer: str
    length: int
    wrapping: Wrapping = dataclasses.field(default_factory=Wrapping)
    column: str = "text"
    detokenizer: str = "none"
    strict: bool = False
    dtype: str | None = None  # uint16 or uint32; by default what the vocabulary needs
    shard_bytes: int = SHARD_BYTES
    compress: bool = False


@dataclass(frozen=True)
class Documents:
    """Files, and which of their records: all of them, or a known stretch."""

    files: list[File]
    start: int = 0
    stop: int | None = None

    def blocks(self) -> Iterator[Block]:
        return documents.part(documents.blocks(self.files), self.start, self.stop)


@dataclass
class Counts:
    documents: int = 0
    empty_documents: int = 0  # records without text: no rows come of them
    replaced_characters: int = 0  # that were no UTF-8
    text_bytes: int = 0  # UTF-8, as tokenised
    text_tokens: int = 0  # without those between documents and around rows

    def add(self, other: "Counts") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


class Cutter:
    """Makes rows in two halves: `pack` needs no neighbours and can run anywhere, `add` keeps the order."""

    def __init__(self, wrapping: Wrapping, length: int, tokenizer: Tokenizer, token: np.dtype[Any]) -> None:
        self.wrapping, self.length, self.tokenizer, self.token = wrapping, length, tokenizer, token
        self._rest: Ids = np.empty(0, token)

    def pack(self, documents: list[Ids]) -> Ids | Records:
        """Tokenised documents as a stretch of the stream, or as padded rows."""
        if self.wrapping.padded:
            return self._rows(documents)
        return stream(documents, self.tokenizer, self.token, self.wrapping.document_end)

    def add(self, packed: Ids | Records) -> Records:
        """The rows that are full now."""
        if self.wrapping.padded:
            return packed
        tokens, inner = np.concatenate([self._rest, packed]), self.length - 2 * self.wrapping.row_ends
        full = len(tokens) // inner * inner
        self._rest = tokens[full:].copy()
        return self._rows([tokens[:full]])

    def finish(self) -> Records:
        """The last row, padded, if tokens are left."""
        rest, self._rest = self._rest, self._rest[:0]
        return self._rows([rest])

    def _rows(self, texts: list[Ids]) -> Records:
        return wrapped(texts, self.length, self.tokenizer, self.token, self.wrapping.row_ends)


class Workers(ProcessPoolExecutor):
    """Processes that tokenise; they start with the first block."""

    def __init__(self, settings: Settings, count: int) -> None:
        context = get_context("forkserver")
        own = settings.tokenizer in ("bytes", "text8")
        context.set_forkserver_preload([__name__] if own else [__name__, "transformers.models.auto.tokenization_auto"])
        # Ctrl-C is the parent's to handle, and what it ignores now its children ignore from their first line on
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        forkserver.ensure_running()
        signal.signal(signal.SIGINT, handler)
        super().__init__(count, context, _start_worker, (settings,))
        self.count = count

    def __exit__(self, *_: object) -> None:
        self.shutdown(wait=True, cancel_futures=True)


def prepare(source: Documents, output: Path, settings: Settings, workers: Workers) -> dict[str, Any]:
    """Write the shards of these documents to `output`, or find them there already; returns the manifest."""
    tokenizer = tokenizer_module.load(TokenizerConfig(name=settings.tokenizer))
    _check(settings, tokenizer)
    made_from = {
        "source": [{"file": file.path, "bytes": file.num_bytes} for file in source.files],
        "records": [source.start, source.stop],
        **dataclasses.asdict(settings),
        "tokenizer": {key: getattr(tokenizer, key) for key in TOLD},
    }
    if (there := _already(output, made_from)) is not None:
        log.info(f"{output} is already prepared: {there['rows']:,} rows")
        return there
    cutter = _cutter(settings, tokenizer)
    counts = Counts()
    with _aside(output) as folder:
        record = record_type(settings.length, cutter.token)
        writer = ShardWriter(folder, record, shard_bytes=settings.shard_bytes, compress=settings.compress)
        progress = _Progress(output, source)
        for block, packed, found in _tokenised(source.blocks(), workers):
            writer.add(cutter.add(packed))
            counts.add(found)
            progress.show(block, counts)
        writer.add(cutter.finish())
        if writer.num_rows == 0:
            names = ", ".join(file.path for file in source.files[:5])
            raise DataError(f"there is no text in {names} ({counts.empty_documents} empty records).")
        manifest = writer.finish({"format": 1, **made_from, **vars(counts)})
    return manifest


def _check(settings: Settings, tokenizer: Tokenizer) -> None:
    if settings.length < 3:
        raise DataError(f"--length {settings.length} must be at least 3: a token between BOS and EOS.")
    if settings.dtype is not None and tokenizer.vocab_size - 1 > np.iinfo(settings.dtype).max:
        raise DataError(
            f"--dtype {settings.dtype} holds ids up to {np.iinfo(settings.dtype).max}, but '{tokenizer.name}' has "
            f"{tokenizer.vocab_size} entries. Use --dtype {token_type(tokenizer.vocab_size).name}."
        )


def _already(output: Path, made_from: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest, if this very output is there; a folder with anything else in it is refused."""
    if output.exists() and not output.is_dir():
        raise DataError(f"--output {output} is a file; give a folder.")
    if not output.name:
        raise DataError(f"--output {output} has no name; give a new folder.")
    if not output.is_dir() or not any(output.iterdir()):
        return None
    try:
        manifest = shards.read_folder(output).manifest
    except DataError as error:
        raise DataError(f"--output {output} holds other files ({error}) Choose another folder.") from error
    wanted = json.loads(json.dumps(made_from))
    differing = [key for key in wanted if manifest.get(key) != wanted[key]]
    if differing:
        raise DataError(
            f"--output {output} holds other shards, made with another {', '.join(differing)}. Choose another folder, "
            f"or remove it."
        )
    return manifest


@contextmanager
def _aside(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place at the end, and is removed if something goes wrong."""
    folder = output.with_name(output.name + ".tmp")
    new = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"--output {output} cannot be written: {error}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"another process is writing {folder} now. Wait for it, or stop it.") from error
        if foreign := [path.name for path in folder.iterdir() if not path.name.startswith(OURS)]:
            raise DataError(f"--output {output} needs {folder}, which holds other files ({foreign[0]}). Remove it.")
        for path in folder.iterdir():  # of an attempt that was killed
            path.unlink()
        try:
            yield folder
            os.fsync(lock)
            os.replace(folder, output)
        except OSError as error:
            raise DataError(f"--output {output} cannot be written: {error}.") from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)  # unless it has become the output
            with suppress(OSError):  # the output is in the first of them
                for parent in new:
                    parent.rmdir()
    finally:
        os.close(lock)


def _tokenised(blocks: Iterator[Block], workers: Workers) -> Iterator[tuple[Block, Ids | Records, Counts]]:
    """The blocks' tokens in the order of the blocks; a few are under way at a time, however many there are."""
    under_way: deque[tuple[Block, Future[tuple[Ids | Records, Counts]]]] = deque()
    try:
        for block in blocks:
            under_way.append((dataclasses.replace(block, data=None), workers.submit(_work, block)))
            if len(under_way) > 3 * workers.count:
                first, future = under_way.popleft()
                yield first, *future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, *future.result()
    except BrokenProcessPool as error:
        raise DataError("a worker was killed, perhaps for want of memory. Try fewer --workers.") from error


_worker: tuple[Settings, Tokenizer, Callable[[str], str], Cutter]


def _start_worker(settings: Settings) -> None:
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizer_module.load(TokenizerConfig(name=settings.tokenizer))
    _worker = settings, tokenizer, detokenizer(settings.detokenizer), _cutter(settings, tokenizer)


def _end_with_parent() -> None:
    """A pool's workers do not see that their parent was killed: they wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(block: Block) -> tuple[Ids | Records, Counts]:
    settings, tokenizer, detokenize, cutter = _worker
    found = documents.read(block, settings.column, strict=settings.strict)
    texts = [detokenize(text) for text in found.texts]
    ids = tokenizer.encode_batch(texts)
    num_tokens = [len(document) for document in ids]
    everything = np.concatenate([np.empty(0, np.uint8), *ids])
    if (everything == tokenizer.mask_id).any() or (everything >= tokenizer.vocab_size).any():
        raise DataError(
            f"'{block.file.path}', records {block.first + 1} to {block.first + block.num_records}: tokenizer "
            f"'{tokenizer.name}' gives its mask id {tokenizer.mask_id}, which only noise may write, or an id beyond "
            f"its {tokenizer.vocab_size} entries."
        )
    counts = Counts(
        len(texts), found.num_empty, found.num_replaced, sum(len(text.encode()) for text in texts), sum(num_tokens)
    )
    return cutter.pack(ids), counts


def _cutter(settings: Settings, tokenizer: Tokenizer) -> Cutter:
    token = np.dtype(settings.dtype or token_type(tokenizer.vocab_size))
    return Cutter(settings.wrapping, settings.length, tokenizer, token)


class _Progress:
    """A live line after each block: documents/s, tokens/s and the time that is left.

    Rates begin with the first block's end: how long workers take to start says nothing of the rest.
    """

    def __init__(self, output: Path, source: Documents) -> None:
        self.output = output
        self.by_records = source.stop is not None
        self.total = (source.stop or 0) - source.start if self.by_records else sum(f.num_bytes for f in source.files)
        self.done = 0
        self.first: tuple[float, float, int, int] | None = None  # time, share, documents and tokens by then

    def show(self, block: Block, counts: Counts) -> None:
        self.done += block.num_records if self.by_records else block.num_bytes
        now, share = time.monotonic(), min(self.done / max(self.total, 1), 1.0)
        if self.first is None:
            self.first = now, share, counts.documents, counts.text_tokens
            return
        start, first_share, num_documents, num_tokens = self.first
        seconds = max(now - start, 1e-3)
        left = seconds * (1 - share) / max(share - first_share, 1e-9)
        log_module.live(
            f"{self.output} {share:4.0%} | eta {log_module.duration(left)} | {counts.documents:,} documents, "
            f"{log_module.short((counts.documents - num_documents) / seconds)}/s | "
            f"{log_module.short(counts.text_tokens)} tokens, "
            f"{log_module.short((counts.text_tokens - num_tokens) / seconds)}/s"
        )
