"""Files of torch.save from anywhere: what they hold is read, and whatever they ask for is not done."""

import contextlib
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import convert_pickle
import numpy as np
import pytest
import torch
from convert_pickle import StoredTensor
from omegaconf import OmegaConf

from mdlm_scale.errors import CheckpointError


def bytes_of(path: Path, tensor: StoredTensor) -> torch.Tensor:
    count = int(np.prod(tensor.shape))
    data = np.fromfile(path, np.uint8, count * tensor.dtype.itemsize, offset=tensor.offset)
    return torch.from_numpy(data).view(tensor.dtype).view(tensor.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_tensors_where_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = OrderedDict(a=torch.arange(12).view(3, 4).to(dtype), b=torch.nn.Parameter(torch.ones(5)))
    weights["part"] = weights["a"][1:]  # shares its storage
    torch.save({"state_dict": weights}, tmp_path / "w.pt")
    found = convert_pickle.read(tmp_path / "w.pt")["state_dict"]
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(bytes_of(tmp_path / "w.pt", found[name]), tensor.detach()), name


def test_a_transposed_tensor_is_told(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3, 4).t()}, tmp_path / "w.pt")
    assert not convert_pickle.read(tmp_path / "w.pt")["a"].is_contiguous


def test_values_of_a_configuration_without_its_classes(tmp_path: Path) -> None:
    config = OmegaConf.create({"model": {"length": 128}, "noise": {"type": "cosine"}, "drop": 0.5, "flag": True})
    torch.save({"config": config}, tmp_path / "w.pt")
    found = convert_pickle.read(tmp_path / "w.pt")

    def value(*keys: str) -> Any:
        return convert_pickle.value_at(found, "config", *keys)

    assert (value("model", "length"), value("noise", "type"), value("drop"), value("flag")) == (
        128,
        "cosine",
        0.5,
        True,
    )
    assert value("model") is None
    assert value("noise", "type", "further") is None
    assert isinstance(found["config"], convert_pickle.Inert)


class Reduced:
    def __init__(self, function: Callable[..., Any], *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def malicious(marker: Path) -> dict[str, bytes]:
    """Each would make the file `marker`, import the module `trap`, or change an object of this process."""
    shell, code = f"touch {marker}", f"open({str(marker)!r}, 'w')"
    run = b"cos\nsystem\n" + text(shell) + b"\x85R"
    return {
        "os.system": pickle.dumps(Reduced(os.system, shell), 2),
        "builtins.eval": pickle.dumps(Reduced(eval, code), 2),
        "builtins.exec, protocol 4": pickle.dumps(Reduced(exec, code), 4),
        "subprocess": pickle.dumps(Reduced(subprocess.call, ["touch", str(marker)]), 5),
        "an object of the inst opcode": b"(" + text(shell) + b"ios\nsystem\n.",
        "the obj opcode": opcodes(b"(cos\nsystem\n", text(shell), b"o"),
        "newobj": opcodes(b"ctrap\nTrap\n)\x81"),
        "copyreg._reconstructor": opcodes(b"ccopyreg\n_reconstructor\n(ctrap\nTrap\nc__builtin__\nobject\nNtR"),
        "copyreg.add_extension": opcodes(b"ccopyreg\nadd_extension\n(X\x02\0\0\0osX\x06\0\0\0systemK\x07tR0\x82\x07"),
        "state of an object": opcodes(b"ctrap\nTrap\n)\x81}", text("a"), run, b"sb"),
        "slots of an object": opcodes(b"ctrap\nTrap\n)\x81N}", text("__class__"), run, b"s\x86b"),
        "state of a class": opcodes(b"ctrap\nTrap\n}", text("__init__"), run, b"sb"),
        "slots of a known function": opcodes(b"ctorch._utils\n_rebuild_tensor_v2\nN}", text("answer"), run, b"s\x86b"),
        "slots of an ordered dict": opcodes(b"ccollections\nOrderedDict\nN}", text("keys"), run, b"s\x86b"),
        "getattr to the builtins": opcodes(
            b"c__builtin__\ngetattr\n", b"ctorch\nSize\n", text("__class__"), b"\x86R", run, b"\x86"
        ),
        "a known call with a function": opcodes(
            b"ctorch._utils\n_rebuild_parameter\ncos\nsystem\n\x85R", text(shell), b"\x85R"
        ),
        "a dotted name": opcodes(text("torch"), text("os.system"), b"\x93", text(shell), b"\x85R"),
        "a list with append": opcodes(b"ctrap\nTrap\n)\x81", b"(", run, b"e"),
        "a persistent id": opcodes(run, b"Q"),
    }  # fmt: skip


@pytest.mark.parametrize("name", malicious(Path("marker")))
def test_nothing_is_executed_or_imported(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "marker"
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w')\nclass Trap: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    description = malicious(marker)[name]
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", description)
        archive.writestr("w/data/0", bytes(16))
    before = convert_pickle._tensor, OrderedDict.keys, dict(vars(convert_pickle.Inert))
    with contextlib.suppress(CheckpointError):
        convert_pickle.read(tmp_path / "w.pt")
    assert not marker.exists()
    assert "trap" not in sys.modules
    assert (convert_pickle._tensor, OrderedDict.keys, dict(vars(convert_pickle.Inert))) == before


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "newobj", "copyreg._reconstructor"])
def test_the_same_does_harm_to_an_ordinary_unpickler(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the pickles above are what they claim to be."""
    marker = tmp_path / "marker"
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w')\nclass Trap: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pickle.Unpickler(io.BytesIO(malicious(marker)[name])).load()
    sys.modules.pop("trap", None)
    assert marker.exists()


def storage(numel: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0, more: bytes = b"") -> bytes:
    """A tensor over a storage of 16 bytes that claims to have `numel` floats, and what is done to the storage."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"J" + value.to_bytes(4, "little", signed=True) for value in values) + b"t"

    stored = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K" + bytes([numel]) + b"tQ"
    )
    tensor = b"J" + offset.to_bytes(4, "little", signed=True) + numbers(size) + numbers(stride)
    return opcodes(b"ctorch._utils\n_rebuild_tensor_v2\n(", stored + more, tensor, b"\x89NtR")


def state(name: str, value: int) -> bytes:
    """Sets an attribute of the object that comes before."""
    return b"}" + text(name) + b"J" + value.to_bytes(4, "little", signed=True) + b"sb"


@pytest.mark.parametrize(
    ("description", "fault"),
    [
        (storage(4, (5,), (1,)), "beyond its storage"),
        (storage(4, (2, 2), (100, 1)), "beyond its storage"),
        (storage(4, (4,), (1,), offset=-8), "in a way that torch.save does not"),
        (storage(4, (4,), (1,), offset=1), "beyond its storage"),
        (storage(4, (2, 2), (1,)), "numbers of sizes and strides"),
        (storage(5, (4,), (1,)), "too short"),
        (storage(4, (9,), (1,), more=state("num_bytes", 2**30)), "sets the state"),
        (storage(4, (4,), (1,))[:-1] + state("offset", -8) + b".", "sets the state"),
        (opcodes(b"K\x01r", b"\0\0\0\1"), "remembers an object as number 16777216"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "only 1 remain"),
        (opcodes(b"K\x01", b"2\x86" * 20, b"Q"), "refers to a tuple which is no storage"),
        (b"no pickle", "cannot be read"),
        (opcodes(b"K\x01Q"), "no storage of a known type"),
    ],
)  # fmt: skip
def test_descriptions_that_lie(description: bytes, fault: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", description)
        archive.writestr("w/data/0", bytes(16))
    with pytest.raises(CheckpointError, match=fault):
        convert_pickle.read(tmp_path / "w.pt")


def test_the_helper_describes_a_tensor(tmp_path: Path) -> None:
    """So that the refusals above are for what is wrong."""
    with zipfile.ZipFile(tmp_path / "w.pt", "w") as archive:
        archive.writestr("w/data.pkl", storage(4, (2, 2), (2, 1)))
        archive.writestr("w/data/0", np.arange(4, dtype=np.float32).tobytes())
    tensor = convert_pickle.read(tmp_path / "w.pt")
    assert bytes_of(tmp_path / "w.pt", tensor).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_storage_that_claims_more_than_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as archive:
        name, num_bytes = next((i.filename, i.file_size) for i in archive.infolist() if i.filename.endswith("data/0"))
    data = bytearray(path.read_bytes())
    at = data.rfind(name.encode()) - 46 + 20  # the two sizes in the entry of the zip's directory
    assert data[at : at + 8] == num_bytes.to_bytes(4, "little") * 2
    data[at : at + 8] = (2**31).to_bytes(4, "little") * 2
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="too short"):
        convert_pickle.read(path)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1000)}, tmp_path / "w.pt")
    data = (tmp_path / "w.pt").read_bytes()
    (tmp_path / "w.pt").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"no complete file of torch\.save"):
        convert_pickle.read(tmp_path / "w.pt")


def test_a_flipped_byte(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    torch.save({"a": torch.arange(1000.0)}, path)
    data = bytearray(path.read_bytes())
    data[data.find(torch.arange(1000.0).numpy().tobytes()) + 2000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="its entry w/data/0 is damaged"):
        convert_pickle.read(path)
