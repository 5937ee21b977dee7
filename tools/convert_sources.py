"""What a checkpoint to convert is: recognised, checked, and made readable tensor by tensor, whoever wrote it.

    native    a run directory or a checkpoint of ours (manifest.json)
    hf        a Hugging Face folder that tools/convert_ckpt.py exported
    mdlm      the original's Hugging Face folder, or its Lightning .ckpt

Nothing of a source is executed, and its files are not mapped into memory: weights are read in pieces of rows.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import convert_pickle
import numpy as np
import torch
from convert_pickle import PIECE
from torch import Tensor

from mdlm_scale import config as config_module
from mdlm_scale.config import BlockName, Config, DataConfig, ModelConfig, ScheduleName, TokenizerConfig
from mdlm_scale.errors import CheckpointError
from mdlm_scale.log import live
from mdlm_scale.model import dit
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.names import from_original, original_name, to_original
from mdlm_scale.run import checkpoint
from mdlm_scale.run.saver import DTYPES

PREFIX = "backbone."
ROTARY = PREFIX + "rotary_emb.inv_freq"  # a buffer of the original, which ours computes
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt")
RECOGNISED = (
    "a run directory or checkpoint of ours (checkpoints/step-..., manifest.json), a Hugging Face folder of ours or of "
    "the original (config.json), or the original's .ckpt file"
)
SUMS = "SHA256SUMS"  # of an export's weight files, as sha256sum writes and checks them
Rows = Callable[[int, int], Tensor]


@dataclass(frozen=True)
class Weight:
    """A tensor on disk."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Rows  # (first, behind the last) -> these rows
    is_original: bool  # with qkv rows in the original's order

    def pieces(self, name: str, model: ModelConfig, to_theirs: bool, dtype: torch.dtype) -> Iterator[Tensor]:
        """The whole in pieces, as the original or we order it; a qkv matrix that changes its order is one piece."""
        is_paper = model.block is BlockName.paper  # the original has no other, and an export of modern ones our order
        turned = is_paper and name.endswith("qkv.weight") and to_theirs != self.is_original
        num_rows = max(1, PIECE // (math.prod(self.shape[1:]) * self.dtype.itemsize))
        count = self.shape[0] if turned else num_rows
        for first in range(0, self.shape[0], count):
            piece = self.rows(first, min(first + count, self.shape[0]))
            if turned:
                piece = (to_original if to_theirs else from_original)(name, piece, model.num_heads)
            yield piece.to(dtype).contiguous()


@dataclass(frozen=True)
class Source:
    path: Path  # the checkpoint itself
    format: str
    config: Config  # of its run, as far as it is known
    vocab_size: int
    mask_id: int | None
    fingerprint: str | None  # of its tokenizer
    has_tokenizer: bool  # config.tokenizer.name names one
    weights: dict[str, dict[str, Weight]]  # kind -> our name -> the tensor; `ema`, `model` or both
    step: int | None
    notes: list[str] = field(default_factory=list)


def open_source(path: Path) -> Source:
    """A CheckpointError tells all that is wrong with it."""
    if not path.exists():
        raise CheckpointError(f"{path} does not exist. It must be {RECOGNISED}.")
    folder = None if path.is_file() else checkpoint.newest(path)
    try:
        if path.is_file():
            return _open_torch(path)
        if folder is not None:
            return _open_native(folder)
        if (path / "config.json").is_file():
            return _open_hugging_face(path)
    except (
        LookupError,
        TypeError,
        AttributeError,
        ValueError,
        RecursionError,
    ) as error:  # its descriptions are anybody's
        raise CheckpointError(f"{path} does not describe itself as such files do ({error!r}).") from error
    raise CheckpointError(f"{path} is no checkpoint. It must be {RECOGNISED}.")


def parameter_shapes(model: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """By our name."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in DiT(model, vocab_size, mask_id=0).named_parameters()}


def original_order(names: list[str]) -> list[str]:
    """Our names in the order of the original's parameters: its last layer has the vocabulary before the modulation."""
    last = ("norm.weight", "head.weight", "head.bias", "modulation.weight", "modulation.bias")
    return [name for name in names if name not in last] + list(last)


def _open_native(folder: Path) -> Source:
    manifest = checkpoint.read_manifest(folder)
    config, index = config_module.from_tree(manifest["config"]), manifest["tensors"]
    kinds = {"model": "raw", "ema": "averaged"}
    made = manifest.get("converted", {}).get("weights", kinds)  # one kind may be there under both names
    found = {kind: _of_kind(index, kind) for kind in kinds if made[kind] == kinds[kind]}
    found = {kind: entries for kind, entries in found.items() if entries}
    if not all("embed.weight" in entries for entries in found.values()) or not found:
        raise CheckpointError(f"{folder}: its manifest names no embed.weight of the model, or of its average.")
    vocab_size = next(iter(found.values()))["embed.weight"]["shape"][0]
    fingerprint, step = manifest["fingerprints"].get("tokenizer"), manifest["state"]["step"]
    live(f"reading {folder.name}, to compare every file with its sha256")
    faults = [f"it is damaged: {fault}" for fault in checkpoint.damaged_files(folder, manifest["files"])]
    expected = parameter_shapes(config.model, vocab_size)
    for kind, entries in found.items():
        faults += _unlike({f"{kind}/{name}": shape for name, shape in expected.items()},
                          {f"{kind}/{name}": tuple(entry["shape"]) for name, entry in entries.items()})  # fmt: skip
        stored = {name: sum(math.prod(box["size"]) for box in entry["boxes"]) for name, entry in entries.items()}
        short = [name for name, entry in entries.items() if stored[name] != math.prod(entry["shape"])]
        faults += [f"{kind}/{name} has {stored[name]} elements of {entries[name]['shape']}" for name in short]
    if faults:
        raise CheckpointError(*(f"{folder}: {fault}." for fault in faults))
    files = {file: header(folder / file) for file in manifest["files"]}
    weights = {
        kind: {name: _boxed(folder, entries[name], files) for name in expected} for kind, entries in found.items()
    }
    source = Source(folder, "native", config, vocab_size, None, fingerprint, fingerprint is not None, weights, step)
    converted = manifest.get("converted")
    return source if not converted else replace(source, mask_id=converted["mask_id"], step=converted["step"])


def _of_kind(index: dict[str, Any], kind: str) -> dict[str, Any]:
    return {key.removeprefix(f"{kind}/"): entry for key, entry in index.items() if key.startswith(f"{kind}/")}


def _boxed(folder: Path, entry: dict[str, Any], files: dict[str, dict[str, Weight]]) -> Weight:
    """A tensor whose boxes several ranks wrote."""

    def read(file: str, key: str, at: tuple[slice, ...]) -> Tensor:
        return files[file][key].rows(at[0].start, at[0].stop)[:, *at[1:]]

    def rows(first: int, end: int) -> Tensor:
        target = torch.empty(end - first, *entry["shape"][1:], dtype=dtype)
        checkpoint.fill(target, [first] + [0] * (target.dim() - 1), entry["boxes"], read)
        return target

    dtype = getattr(torch, entry["dtype"])
    return Weight(dtype, tuple(entry["shape"]), rows, is_original=False)


def _open_hugging_face(folder: Path) -> Source:
    try:
        told = json.loads((folder / "config.json").read_text())
        kind = told.get("model_type")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} cannot be read: {error}.") from error
    if kind not in ("mdlm_scale", "mdlm"):
        raise CheckpointError(f"{folder} is of model_type {kind!r}, which is unknown. It must be {RECOGNISED}.")
    fields = ("vocab_size", "model_length", "hidden_dim", "cond_dim", "n_blocks", "n_heads")
    faults = [f"{folder / 'config.json'}: {name}={told.get(name)!r} must be a whole number above 0."
              for name in fields if type(told.get(name)) is not int or told[name] < 1]  # fmt: skip
    try:
        tensors = _tensors_of(folder)
    except CheckpointError as error:
        faults += error.faults
    else:
        faults += _changed(folder)
    kinds: dict[str, tuple[Any, ...]] = {"dropout": (float, int), "time_conditioning": (bool,)}
    kinds |= dict.fromkeys(("mask_token_id", "mask_index", "n_kv_heads"), (int, type(None)))
    faults += [f"{folder / 'config.json'}: {name}={told[name]!r} is of a wrong type."
               for name, kind in kinds.items() if name in told and type(told[name]) not in kind]  # fmt: skip
    if told.get("block", "paper") not in BlockName.__members__:
        known = " or ".join(BlockName)
        faults.append(f"{folder / 'config.json'}: block={told['block']!r} is unknown; it must be {known}.")
    if faults:
        raise CheckpointError(*faults)
    model = ModelConfig(
        told["hidden_dim"], told["n_blocks"], told["n_heads"], told["cond_dim"], float(told.get("dropout", 0.1)),
        bool(told.get("time_conditioning", False)), BlockName(told.get("block", "paper")), told.get("n_kv_heads"),
    )  # fmt: skip
    ours = told.get("mdlm_scale") or {}
    config = config_module.from_tree(ours.get("config", {}))
    config = replace(config, model=model, data=replace(config.data, length=told["model_length"]))
    weights = _by_our_names(folder, model, told["vocab_size"], tensors)
    fingerprint, has_files = ours.get("tokenizer_fingerprint"), any((folder / f).is_file() for f in TOKENIZER_FILES)
    if fingerprint is None and has_files:
        config = replace(config, tokenizer=TokenizerConfig(str(folder.resolve())))
    label = "hf" if kind == "mdlm_scale" else "mdlm"
    return Source(
        folder, label, config, told["vocab_size"], told.get("mask_token_id", told.get("mask_index")), fingerprint,
        fingerprint is not None or has_files, {"ema": weights} if ours.get("weights") != "raw" else {"model": weights},
        ours.get("step"),
    )  # fmt: skip


def _changed(folder: Path) -> list[str]:
    """Of the files whose sums an export wrote beside them."""
    file = folder / SUMS
    if not file.is_file():
        return []
    live(f"reading {folder.name}, to compare its weights with their sha256")
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        path = folder / Path(name).name
        if path.is_file() and checkpoint.sha256(path) != digest:
            found.append(f"{path} does not have the sha256 that {SUMS} tells: it was damaged, or changed since it was "
                         f"exported. If that was meant, remove {SUMS}.")  # fmt: skip
    return found


def _tensors_of(folder: Path) -> dict[str, Weight]:
    index, single, pickled = (
        folder / n for n in ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin")
    )
    if not index.is_file():
        if single.is_file():
            return header(single)
        if pickled.is_file():
            return {k: _torch_weight(pickled, t) for k, t in _tensors_in(pickled, convert_pickle.read(pickled)).items()}
        raise CheckpointError(f"{folder} holds no model.safetensors, and no index of several.")
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}.") from error
    if missing := [file for file in files if Path(file).name != file or not (folder / file).is_file()]:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}, which its index names.")
    return {key: weight for file in files for key, weight in header(folder / file).items()}


def _open_torch(path: Path) -> Source:
    """A Lightning checkpoint of the original."""
    saved = convert_pickle.read(path)
    if not isinstance(saved, dict) or not isinstance(saved.get("state_dict"), dict):
        raise CheckpointError(f"{path} holds no `state_dict`, as a Lightning checkpoint does. It must be {RECOGNISED}.")
    tensors = {key: _torch_weight(path, t) for key, t in _tensors_in(path, saved["state_dict"]).items()}
    embed, blocks = tensors.get(PREFIX + "vocab_embed.embedding"), 0
    for key in tensors:
        if match := re.fullmatch(re.escape(PREFIX) + r"blocks\.(\d+)\..*", key):
            blocks = max(blocks, int(match[1]) + 1)
    cond, rotary = tensors.get(PREFIX + "sigma_map.mlp.2.bias"), tensors.get(ROTARY)
    if embed is None or cond is None or len(embed.shape) != 2 or not blocks:
        raise CheckpointError(f"{path}: its state_dict is not the original's: no {PREFIX}vocab_embed.embedding, ...")
    hyper = saved.get("hyper_parameters", {}) or {}

    def of_config(kind: type, *keys: str) -> Any:
        value = convert_pickle.value_at(hyper, "config", *keys)
        return value if type(value) is kind else None

    (vocab_size, width), notes = embed.shape, []
    heads = width // (2 * rotary.shape[0]) if rotary else of_config(int, "model", "n_heads")
    if not isinstance(heads, int):
        raise CheckpointError(f"{path}: the number of heads cannot be told: neither {ROTARY} nor a config says it.")
    wanted = {"time_conditioning": bool, "model.length": int, "noise.type": str}
    told = {name: of_config(kind, *name.split(".")) for name, kind in wanted.items()}
    if missing := [name for name, value in told.items() if value is None]:
        notes.append(
            f"its config does not tell {', '.join(missing)}: time_conditioning=false, 1024, loglinear are taken"
        )
    dropout = of_config(float, "model", "dropout")
    model = ModelConfig(width, blocks, heads, cond.shape[0], 0.1 if dropout is None else dropout,
                        bool(told["time_conditioning"]))  # fmt: skip
    config = Config(model=model, data=DataConfig(length=told["model.length"] or 1024))
    if (noise := told["noise.type"] or "loglinear") in ScheduleName.__members__:
        config = replace(config, diffusion=replace(config.diffusion, schedule=ScheduleName(noise)))
    else:
        notes.append(f"its noise.type is {noise}, which has no schedule here: loglinear is taken")
    if name := of_config(str, "data", "tokenizer_name_or_path"):
        notes.append(f"its config names the tokenizer {name}: --tokenizer {name} would add it")
    weights = {"model": _by_our_names(path, model, vocab_size, tensors)}
    average = _average(path, saved.get("ema"), list(weights["model"]), parameter_shapes(model, vocab_size))
    if average:
        weights["ema"] = average
    step = saved.get("global_step")
    return Source(
        path, "mdlm", config, vocab_size, None, None, False, weights, step if type(step) is int else None, notes
    )


def _average(path: Path, ema: Any, names: list[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Weight]:
    """The list of averaged parameters, which has no names, in the order of the original's."""
    shadow = ema.get("shadow_params") if isinstance(ema, dict) else None
    if not shadow:
        return {}
    stored = _tensors_in(path, dict(enumerate(shadow)))
    order = original_order(names)
    expected = {f"ema.shadow_params[{i}]": shapes[name] for i, name in enumerate(order)}
    faults = _unlike(expected, {f"ema.shadow_params[{i}]": tensor.shape for i, tensor in stored.items()})
    if faults:
        raise CheckpointError(*(f"{path}: {fault}." for fault in faults))
    return {name: _torch_weight(path, stored[i]) for i, name in enumerate(order)}


def _tensors_in(path: Path, tree: Any) -> dict[Any, convert_pickle.StoredTensor]:
    tree = tree.get("state_dict", tree) if isinstance(tree, dict) else {}
    bad = [str(k) for k, v in tree.items() if not isinstance(v, convert_pickle.StoredTensor) or not v.is_contiguous]
    if bad:
        raise CheckpointError(f"{path}: {', '.join(bad[:5])} is no tensor, or not stored in one piece.")
    return tree


def _torch_weight(path: Path, t: convert_pickle.StoredTensor) -> Weight:
    return _raw(path, t.dtype, t.shape, t.offset)


def _by_our_names(path: Path, model: ModelConfig, vocab_size: int, tensors: dict[str, Weight]) -> dict[str, Weight]:
    """All parameters, and no others; the rotary buffer may be there and must be what ours computes."""
    faults = dit.faults(model)
    if model.num_layers > len(tensors):  # before so many are made
        faults.append(f"{model.num_layers} blocks are told of, and {len(tensors)} tensors are there.")
    if faults:
        raise CheckpointError(*(f"{path}: {fault}" for fault in faults))
    shapes = parameter_shapes(model, vocab_size)
    expected = {PREFIX + original_name(name): shape for name, shape in shapes.items()}
    stored = {key: weight.shape for key, weight in tensors.items()}
    half = model.hidden_size // model.num_heads // 2
    faults = _unlike({**expected, ROTARY: (half,)}, {ROTARY: (half,)} | stored)
    faults += [f"{k} has dtype {tensors[k].dtype}" for k in expected if k in tensors and tensors[k].dtype not in DTYPES]
    if not faults and ROTARY in tensors:
        theirs = tensors[ROTARY].rows(0, half).double()
        # of 8 bits at least, where it was stored in bf16
        if not torch.allclose(theirs, inverse_frequencies(2 * half).double(), rtol=2**-7, atol=0):
            faults = [f"{ROTARY} is not that of base 10000, which ours has"]
    if faults:
        raise CheckpointError(*(f"{path}: {fault}." for fault in faults))
    return {name: tensors[PREFIX + original_name(name)] for name in shapes}


def inverse_frequencies(head_width: int) -> Tensor:
    """The rotary buffer of the original, float32."""
    return 1.0 / 10_000.0 ** (torch.arange(0, head_width, 2).float() / head_width)


def _unlike(expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]) -> list[str]:
    """Keys that are missing, keys that are too many, shapes that disagree."""
    found = []
    for what, keys in (("missing", expected.keys() - stored), ("unknown", stored.keys() - expected.keys())):
        if keys:
            more = f" and {len(keys) - 10} more" if len(keys) > 10 else ""
            found.append(f"{what} keys: {', '.join(sorted(keys)[:10])}{more}")
    shapes = [(key, expected[key], stored[key]) for key in expected if key in stored and expected[key] != stored[key]]
    return found + [f"{key} has shape {list(theirs)}, not {list(ours)}" for key, ours, theirs in shapes]


def header(path: Path) -> dict[str, Weight]:
    """What a safetensors file holds; the bytes stay there."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            told = json.loads(file.read(length)) if length <= path.stat().st_size else {"": {}}
        told.pop("__metadata__", None)
        weights = {}
        for key, entry in told.items():
            dtype, shape, (first, end) = dtypes[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
            if not all(type(n) is int and n >= 0 for n in (*shape, first)):
                raise ValueError(f"{key} has sizes that are none")
            if end - first != math.prod(shape) * dtype.itemsize or 8 + length + end > path.stat().st_size:
                raise ValueError(f"{key} is cut short")
            weights[key] = _raw(path, dtype, shape, 8 + length + first)
        return weights
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no complete safetensors file of floating-point weights ({error}).") from error


def _raw(path: Path, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Weight:
    """Rows that follow each other in a file."""
    row = math.prod(shape[1:]) * dtype.itemsize

    def rows(first: int, end: int) -> Tensor:
        data = np.fromfile(path, np.uint8, (end - first) * row, offset=offset + first * row)
        if data.size != (end - first) * row:
            raise CheckpointError(f"{path} ends before its tensors do: it was cut short.")
        return torch.from_numpy(data).view(dtype).view(end - first, *shape[1:])

    return Weight(dtype, shape, rows, is_original=True)
