"""Rows of tokens by number, wherever they lie: mapped from a folder, fetched from elsewhere, or made of a little text.

`data.train` and `data.validation` name a folder of shards (tools/prepare_data.py), an address of one (`s3://...`), a
small text file or `python`, whose rows are then made in memory; `data.train` may be a mixture, address by weight.
"""

import hashlib
import json
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from mdlm_scale.config import DataConfig, outside
from mdlm_scale.data import order, shards, texts
from mdlm_scale.data.cache import Cache, Remote, read_remote
from mdlm_scale.data.order import Index, Ints
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records, stream, token_type, wrapped
from mdlm_scale.data.shards import Description
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion.corrupt import row_faults
from mdlm_scale.errors import DataError, FetchError, raise_if_any

MAX_OPEN = 128  # shards mapped at a time, each with its file open
PART = 1024  # rows counted at a time


@dataclass(frozen=True)
class OpenShard:
    """The rows of a shard as bytes, and the file they are a map of, if somebody else may change it."""

    rows: memoryview
    is_full: bool  # no row is padded
    file: BinaryIO | None = None
    num_bytes: int = 0  # of the file, when it was opened

    def check(self) -> None:
        """To read a page that the file has lost would end the process without a word."""
        if self.file is None:
            return
        status = os.fstat(self.file.fileno())
        if status.st_nlink == 0:
            raise DataError(f"shard '{self.file.name}' is gone. Restore it.")
        if status.st_size != self.num_bytes:
            raise DataError(
                f"shard '{self.file.name}' has {status.st_size:,} bytes now, its index says {self.num_bytes:,}. "
                f"Restore it."
            )


@dataclass(frozen=True)
class Dataset:
    where: str
    shard_rows: tuple[int, ...]
    record: np.dtype[Any]
    fingerprint: str
    open: Callable[[int], OpenShard]
    remotes: tuple[Remote, ...] = ()  # the shards, if they must be fetched


@dataclass
class Source:
    """Fixed rows of L tokens, by number, out of one dataset or a mixture."""

    datasets: Sequence[Dataset]
    quotas: tuple[int, ...] = (1,)
    block_shards: int = 16
    cache: Cache | None = None
    _open: OrderedDict[tuple[int, int], OpenShard] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        self.index = Index(tuple(dataset.shard_rows for dataset in self.datasets), self.quotas, self.block_shards)
        self._shards = [(d, k) for d, dataset in enumerate(self.datasets) for k in range(len(dataset.shard_rows))]
        self._starts = np.concatenate([[0], np.cumsum([self.datasets[d].shard_rows[k] for d, k in self._shards])])
        self._record = self.datasets[0].record
        self._all_real = torch.ones(0, self.length, dtype=torch.bool)

    @property
    def num_rows(self) -> int:
        return int(self._starts[-1])

    @property
    def length(self) -> int:
        return int(self._record[TOKENS].shape[0])

    def rows(self, ids_B: Ints) -> tuple[Tensor, Tensor]:
        """Token ids, (B, L) int64, and which of them are real."""
        size = self._record.itemsize
        shard_B = np.searchsorted(self._starts, ids_B, side="right") - 1
        start_B = (ids_B - self._starts[shard_B]) * size
        shards = shard_B.tolist()
        opened = {shard: self._opened(self._shards[shard]) for shard in set(shards)}
        views = {shard: found.rows for shard, found in opened.items()}
        places = zip(shards, start_B.tolist(), (start_B + size).tolist(), strict=True)
        # joined as bytes: one copy and no sorting, which costs less than numpy's indexing shard by shard
        joined = bytearray().join([views[shard][start:stop] for shard, start, stop in places])
        records = np.frombuffer(joined, self._record)
        x_BL = torch.from_numpy(records[TOKENS]).to(torch.int64)
        if all(shard.is_full for shard in opened.values()):
            if len(self._all_real) < len(x_BL):
                self._all_real = torch.ones(x_BL.shape, dtype=torch.bool)
            return x_BL, self._all_real[: len(x_BL)]  # shared by batches, which nobody writes to
        num_real_B = torch.from_numpy(records[NUM_TOKENS].astype(np.int64))
        return x_BL, torch.arange(self.length) < num_real_B[:, None]

    def prepare(self, seed: int, step: int, global_batch_size: int) -> None:
        """Have what must be fetched for a step and its followers on its way, and let go of what came before."""
        if self.cache is not None:
            ahead = order.shards_ahead(seed, step, global_batch_size, self.index)
            for shard in set(self._open) - set(ahead):
                del self._open[shard]
            self.cache.want([self.datasets[d].remotes[k] for d, k in ahead if self.datasets[d].remotes])

    def fingerprint(self) -> str:
        """Equal for equal rows in equal shares: what a resumed run compares."""
        told = [[dataset.fingerprint, quota] for dataset, quota in zip(self.datasets, self.quotas, strict=True)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    def describe(self) -> str:
        parts = [
            f"{sum(dataset.shard_rows):,} rows in {len(dataset.shard_rows)} shard(s) of {dataset.where}"
            + (f" ({quota / sum(self.quotas):.2%})" if len(self.datasets) > 1 else "")
            for dataset, quota in zip(self.datasets, self.quotas, strict=True)
        ]
        return f"{', '.join(parts)}; {self.length} tokens a row"

    def unigram_perplexity(self, num_rows: int) -> float:
        """Perplexity of the first rows under their own token frequencies: the best without context."""
        counts = torch.zeros(0, dtype=torch.float64)
        num_rows = min(num_rows, self.num_rows)
        for start in range(0, num_rows, PART):
            x_BL, is_token_BL = self.rows(np.arange(start, min(start + PART, num_rows)))
            more = torch.bincount(x_BL[is_token_BL], minlength=len(counts)).double()
            more[: len(counts)] += counts
            counts = more
        p = counts[counts > 0] / counts.sum()
        return float(torch.exp(-(p * p.log()).sum()))

    def _opened(self, shard: tuple[int, int]) -> OpenShard:
        d, k = shard
        if shard in self._open:
            self._open.move_to_end(shard)
            self._open[shard].check()
        else:
            self._open[shard] = self.datasets[d].open(k)
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return self._open[shard]


def load(
    where: str | Mapping[str, float], split: str, config: DataConfig, tokenizer: Tokenizer, cache: Cache
) -> Source:
    """Open what `data.train` or `data.validation` names; all faults at once."""
    weights = {where: 1.0} if isinstance(where, str) else where
    datasets, found = [], []
    for address in weights:
        try:
            datasets.append(_dataset(address, split, config, tokenizer, cache))
        except DataError as error:
            found += [f"data.{split}: {fault}" for fault in error.faults]
    raise_if_any(found, DataError)
    if len({dataset.record for dataset in datasets}) > 1:
        types = ", ".join(f"{dataset.where}: {dataset.record[TOKENS].base}" for dataset in datasets)
        raise DataError(f"data.{split}: a mixture needs one type of tokens, not {types}. Prepare with one --dtype.")
    remotes = [remote for dataset in datasets for remote in dataset.remotes[: 2 * config.block_shards]]
    if (window := sum(remote.file.num_bytes for remote in remotes)) > cache.limit_bytes:
        raise DataError(
            f"data.cache_mb={config.cache_mb} is too small for data.{split}: two blocks of data.block_shards="
            f"{config.block_shards} shards take {window / 1e6:.6g} MB. Raise the one or lower the other."
        )
    return Source(datasets, order.quotas(list(weights.values())), config.block_shards, cache if remotes else None)


def open_cache(config: DataConfig) -> Cache:
    folder = config.cache_dir or Path(tempfile.gettempdir()) / f"mdlm_scale-{os.getuid()}"
    return Cache(Path(folder), int(config.cache_mb * 1e6))


def in_memory(records: Records, where: str = "memory", tokenizer_fingerprint: str = "") -> Dataset:
    """A dataset of one shard, made here."""
    told = f"{tokenizer_fingerprint} {records.dtype} {len(records)} ".encode()
    data = records.tobytes()
    shard = OpenShard(memoryview(data), _is_full(records))
    return Dataset(where, (len(records),), records.dtype, hashlib.sha256(told + data).hexdigest(), lambda k: shard)


def described(where: str) -> Description | None:
    """What is told of prepared rows; None for a text, whose rows are made in memory."""
    if where == texts.PYTHON or Path(where).is_file():
        return None
    if "://" in where:
        return read_remote(where)
    if Path(where).is_dir():
        return shards.read_folder(Path(where))
    raise DataError(
        f"'{where}' does not exist. Give a folder of shards (tools/prepare_data.py makes it), the address of one "
        f"(s3://...), a small text file, or `python`."
    )


def _dataset(where: str, split: str, config: DataConfig, tokenizer: Tokenizer, cache: Cache) -> Dataset:
    description = described(where)
    if description is None:
        return in_memory(_text_rows(where, split, config, tokenizer), where, tokenizer.fingerprint)
    raise_if_any(_disagreements(description, config, tokenizer), DataError)
    packed = any(file.compressed for file in description.files)
    return _fetched(description, cache) if packed or "://" in where else mapped(description)


def mapped(description: Description) -> Dataset:
    """Shards on a file system of this machine: pages of memory that are files."""
    verified: set[int] = set()

    def open_shard(k: int) -> OpenShard:
        described, path = description.files[k], Path(description.where) / description.files[k].name
        try:
            file = path.open("rb")
            data = np.memmap(file, np.uint8, mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"shard '{path}' cannot be read: {error}.") from error
        rows = shards.rows_of(data, described, description.record, str(path), verify=k not in verified)
        verified.add(k)
        return OpenShard(rows.reshape(-1).data, _is_full(rows.view(description.record)), file, len(data))

    return _of(description, open_shard)


def _fetched(description: Description, cache: Cache) -> Dataset:
    """Shards elsewhere, or compressed: copies in the cache."""
    remotes = tuple(
        Remote(f"{description.where.rstrip('/')}/{file.stored_name}", description.fingerprint[:16], file)
        for file in description.files
    )

    def open_shard(k: int) -> OpenShard:
        for _ in range(3):
            try:
                path = cache.get(remotes[k])
                data = np.memmap(path, np.uint8, mode="r")
                rows = shards.rows_of(data, remotes[k].file, description.record, str(path), verify=True)
                return OpenShard(rows.reshape(-1).data, _is_full(rows.view(description.record)))
            except FetchError:
                raise
            except FileNotFoundError:  # another process dropped it before it was open here
                continue
            except DataError:  # what an earlier run left there has suffered since
                path.unlink(missing_ok=True)
        raise DataError(f"shard '{remotes[k].url}' does not stay in {cache.folder}. Raise data.cache_mb.")

    return _of(description, open_shard, remotes)


def _of(description: Description, open_shard: Callable[[int], OpenShard], remotes: tuple[Remote, ...] = ()) -> Dataset:
    counts = tuple(file.num_rows for file in description.files)
    return Dataset(description.where, counts, description.record, description.fingerprint, open_shard, remotes)


def _is_full(records: Records) -> bool:
    return bool((records[NUM_TOKENS] == records[TOKENS].shape[-1]).all())


def _disagreements(description: Description, config: DataConfig, tokenizer: Tokenizer) -> list[str]:
    """What of the shards is not what the run was configured for."""
    found, made_by = [], description.manifest["tokenizer"]
    if description.length != config.length:
        found.append(
            f"'{description.where}' has rows of {description.length} tokens, but data.length={config.length}. Set "
            f"data.length={description.length}, or prepare the data with --length {config.length}."
        )
    if made_by["fingerprint"] != tokenizer.fingerprint:
        found.append(
            f"'{description.where}' was tokenised with '{made_by['name']}' ({made_by['vocab_size']} entries), but "
            f"tokenizer.name='{tokenizer.name}' has {tokenizer.vocab_size} and another vocabulary. Use the tokenizer "
            f"that made the tokens, or prepare the data with this one."
        )
    return found


def _text_rows(where: str, split: str, config: DataConfig, tokenizer: Tokenizer) -> Records:
    """The wrapped rows of a text file (or of one split of `python`)."""
    token = token_type(tokenizer.vocab_size)
    ids = tokenizer.encode_batch(texts.documents(where, split))
    records = wrapped([stream(ids, tokenizer, token)], config.length, tokenizer, token)
    if len(records) == 0:
        raise DataError(f"'{where}' holds no text.")
    tokens = torch.from_numpy(np.concatenate(ids).astype(np.int64))
    faults = row_faults(tokens, torch.empty(0), mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size)
    raise_if_any((f"'{where}': {fault}" for fault in faults), DataError)
    return records


def faults(config: DataConfig) -> list[str]:
    """What is wrong with the data section, before anything is read."""
    found = []
    if config.length < 3:
        found.append(f"data.length={config.length} must be at least 3: a token between BOS and EOS.")
    found += outside("data", config, ("prefetch", "block_shards"))
    if not isinstance(config.train, str):
        wrong = {where: weight for where, weight in config.train.items() if not weight > 0}
        found += [f"data.train: the weight {weight} of '{where}' must be positive." for where, weight in wrong.items()]
        if not wrong and config.train:
            shares = order.quotas(list(config.train.values()))
            small = [where for where, share in zip(config.train, shares, strict=True) if share == 0]
            found += [f"data.train: '{where}' has less than 1/{order.PERIOD} of the weight." for where in small]
        elif not config.train:
            found.append("data.train={} names no data.")
    return found
