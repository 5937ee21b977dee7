"""Tensors out of a file of torch.save, of which nothing is believed: no global is imported, nothing is called.

The file is a zip archive: `data.pkl` describes the objects, `data/N` are the raw bytes of their tensors. The unpickler
here builds containers of its own and records of tensors; every other global becomes an inert class that notes what it
is given. So the pickled configuration and tokenizer of a Lightning checkpoint do no harm, and the plain values inside
them can still be read (`plain`). Bytes of tensors are read in pieces when they are asked for.
"""

import io
import math
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mdlm_scale.errors import CheckpointError
from mdlm_scale.log import live

MAX_DESCRIPTION = 256 << 20  # bytes of data.pkl: it holds no weights
MEMO = ("PUT", "BINPUT", "LONG_BINPUT")  # opcodes that number an object
PIECE = 8 << 20  # bytes read at a time
LOCAL_HEADER = 30  # bytes of a zip entry's header, before its name and extra field

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class _Sealed:
    """What a pickle may hold but not change: else it would put other numbers where checked ones were."""

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it sets the state of what torch.save leaves as it is")


@dataclass(frozen=True)
class StoredTensor(_Sealed):
    """Where a tensor's bytes are in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte
    is_contiguous: bool


class Inert:
    """Stands for an object of a class that is not imported; keeps what the pickle wanted to give it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "Inert":
        made = object.__new__(cls)
        made.given = {"args": args, "items": {}}
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    given: dict[str, Any]

    def __setstate__(self, state: Any) -> None:
        self.given["state"] = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.given["items"][id(key)] = (key, value)

    def append(self, value: Any) -> None:
        self.given.setdefault("list", []).append(value)

    def extend(self, values: Any) -> None:
        self.given.setdefault("list", []).extend(values)

    def add(self, value: Any) -> None:
        pass


class _Dict(dict[Any, Any]):
    """An OrderedDict of the pickle; the attributes it had are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


@dataclass(frozen=True)
class _Rebuild(_Sealed):
    """One of the few calls that are answered."""

    answer: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.answer(*args)


@dataclass(frozen=True)
class _Storage(_Sealed):
    dtype: torch.dtype
    offset: int
    num_bytes: int


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *_: Any) -> StoredTensor:
    """What torch calls to rebuild a tensor, with every number checked against the storage."""
    numbers = (offset, *size, *stride)
    if not isinstance(storage, _Storage) or not all(type(n) is int and n >= 0 for n in numbers):
        raise pickle.UnpicklingError("it describes a tensor in a way that torch.save does not")
    if len(size) != len(stride):
        raise pickle.UnpicklingError("a tensor has other numbers of sizes and strides")
    itemsize = storage.dtype.itemsize
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and (last + 1) * itemsize > storage.num_bytes:
        raise pickle.UnpicklingError("a tensor reaches beyond its storage")
    wanted, step = [], 1
    for n in reversed(size):
        wanted.append(step)
        step *= n
    dense = all(n == 1 or a == b for n, a, b in zip(size, stride, reversed(wanted), strict=True))
    return StoredTensor(storage.dtype, tuple(size), storage.offset + offset * itemsize, dense)


class _Unpickler(pickle.Unpickler):
    def __init__(self, description: bytes, storage: Callable[[str, torch.dtype, int], _Storage]) -> None:
        super().__init__(io.BytesIO(description), encoding="utf-8", errors="replace")
        self.storage = storage

    def find_class(self, module: str, name: str) -> Any:
        """Never an import: one of our own few answers, or a new class of which nothing is known but its name."""
        match module, name:
            case "collections", "OrderedDict":
                return _Rebuild(lambda *args: _Dict(*args))
            case "torch._utils", "_rebuild_tensor_v2":
                return _Rebuild(_tensor)
            case "torch._utils", "_rebuild_parameter":
                return _Rebuild(lambda data, *_: data)
            case "torch", "Size":
                return _Rebuild(lambda sizes=(): tuple(sizes))
            case "torch" | "torch.storage", _ if name in STORAGES:
                return STORAGES[name]  # a torch.dtype: cannot be called, cannot be written into
        return type("Inert", (Inert,), {"stands_for": f"{module}.{name}"})

    def persistent_load(self, saved: Any) -> _Storage:
        match saved:
            case ("storage", torch.dtype() as dtype, str(key), str(), int(numel)):
                return self.storage(key, dtype, numel)
        raise pickle.UnpicklingError(f"it refers to a {type(saved).__name__} which is no storage of a known type")


def read(path: Path) -> Any:
    """The object that was saved, with a StoredTensor for each tensor; a CheckpointError if it cannot be had."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            members = {info.filename: info for info in archive.infolist()}
            found = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
            if len(found) != 1:
                raise CheckpointError(f"{path} is a zip archive, but not of torch.save (it has no data.pkl).")
            prefix = found[0].removesuffix("data.pkl")
            if members[found[0]].file_size > MAX_DESCRIPTION:
                raise CheckpointError(f"{path}: its data.pkl has {members[found[0]].file_size} bytes, no description.")
            order, intact = prefix + "byteorder", set[str]()
            if order in members and archive.read(order).strip() != b"little":
                raise CheckpointError(f"{path} was written on a big-endian machine.")

            def storage(key: str, dtype: torch.dtype, numel: int) -> _Storage:
                info = members.get(f"{prefix}data/{key}")
                if info is None or info.compress_type != zipfile.ZIP_STORED:
                    raise pickle.UnpicklingError(f"its storage data/{key} is missing or compressed")
                start = _start(file, info)
                if info.file_size < numel * dtype.itemsize or start + info.file_size > path.stat().st_size:
                    raise pickle.UnpicklingError(f"its storage data/{key} is too short")
                if key not in intact:
                    _verify(archive, info)
                    intact.add(key)
                return _Storage(dtype, start, info.file_size)

            description = archive.read(found[0])
            _check_memo(description)
            return _Unpickler(description, storage).load()
    except CheckpointError:
        raise
    except zipfile.BadZipFile as error:
        raise CheckpointError(
            f"{path} is no complete file of torch.save ({error}): cut short, or of PyTorch before 1.6 (save it again "
            f"with a newer one)."
        ) from error
    except Exception as error:  # a spoilt pickle fails in any way it likes
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error


def _verify(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> None:
    """Against the checksum that was written with the bytes."""
    live(f"reading {info.filename}, to compare it with its checksum")
    try:
        with archive.open(info) as entry:
            while entry.read(PIECE):
                pass
    except zipfile.BadZipFile as error:
        raise pickle.UnpicklingError(f"its entry {info.filename} is damaged") from error


def _check_memo(description: bytes) -> None:
    """The unpickler makes room for as many objects as a pickle says that it remembers: no more than it has bytes."""
    for code, argument, _ in pickletools.genops(description):
        if code.name in MEMO and argument is not None and argument > len(description):
            raise pickle.UnpicklingError(f"it remembers an object as number {argument}")


def value_at(value: Any, *keys: str) -> Any:
    """A plain value inside of what was an omegaconf configuration or a dict; None if there is none."""
    for key in keys:
        value = _content(value)
        value = value.get(key) if isinstance(value, dict) else None
    value = _content(value)
    return value if isinstance(value, str | int | float | bool) else None


def _content(value: Any) -> Any:
    """Containers of omegaconf keep theirs in `_content`, leaves in `_val`."""
    if isinstance(value, Inert) and isinstance(state := value.given.get("state"), dict):
        return state.get("_content", state.get("_val"))
    return value


def _start(file: io.BufferedReader, info: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its header, whose name and extra field have lengths of their own there."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_HEADER)
    if len(header) < LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        raise pickle.UnpicklingError(f"its entry {info.filename} is damaged")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return info.header_offset + LOCAL_HEADER + name_length + extra_length
