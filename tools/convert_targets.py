"""How a converted checkpoint is written: what is checked first, then a folder beside the target, then its name.

Every fault of source, target and tokenizer is told at once, before the first byte.
"""

import json
import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import convert_hf_files as hf_files
import torch
from convert_sources import PREFIX, ROTARY, SUMS, Source, Weight, inverse_frequencies, open_source, original_order
from torch import Tensor
from transformers import AutoTokenizer  # noqa: F401 - used by what is called here; imported before memory is measured

from mdlm_scale import config as config_module
from mdlm_scale import log as log_module
from mdlm_scale.config import BlockName, TokenizerConfig
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.errors import CheckpointError, ConfigError, UserError
from mdlm_scale.layout import Layout
from mdlm_scale.log import log
from mdlm_scale.model.names import original_name
from mdlm_scale.run.checkpoint import FORMAT, MANIFEST, State
from mdlm_scale.run.saver import versions, write_safetensors

NO_TOKENIZER = "none: convert it again with --tokenizer NAME or FOLDER"  # stands where a name would
Entries = dict[str, tuple[str, Weight]]  # key in the file -> our name, tensor


@dataclass(frozen=True)
class Plan:
    """A source that can be converted, and how."""

    source: Source
    kind: str  # of the weights: ema or model
    tokenizer: Tokenizer | None
    mask_id: int
    to: str
    dtype: torch.dtype | None  # None: as they are stored
    shard_bytes: float

    def dtype_of(self, weight: Weight) -> torch.dtype:
        """Native checkpoints are of float32 at least."""
        dtype = self.dtype or weight.dtype
        return torch.float32 if self.to == "native" and dtype.itemsize < 4 else dtype

    @property
    def told(self) -> str:
        return "averaged (EMA) weights" if self.kind == "ema" else "raw weights"


def convert(args: Namespace) -> None:
    """The whole of the tool; a UserError tells why nothing was written."""
    start, before = time.monotonic(), _peak()
    plan = checked(args)
    target: Path = args.target.absolute()
    aside = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
        (_write_native if plan.to == "native" else _write_hugging_face)(aside, plan)
        _show(aside, target)
    except OSError as error:
        raise CheckpointError(
            f"{target} could not be written: {error.strerror or error}. Nothing is left of it; free some space or "
            f"choose another place."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    log_module.end_live()
    written = sum(file.stat().st_size for file in target.iterdir())
    memory = f", {(_peak() - before) / 1e6:.0f} MB of memory above the interpreter's" if before else ""
    print(
        f"{args.target}: {plan.told} of {plan.source.path} as {plan.to}, {written / 1e6:,.1f} MB in "
        f"{len(list(target.iterdir()))} files, {time.monotonic() - start:.1f} s{memory}\n"
        f"next: {_next(args.target, plan)}"
    )


def checked(args: Namespace) -> Plan:
    """Everything that can be wrong, told at once."""
    errors: list[UserError] = [ConfigError(fault) for fault in _target_faults(args)]
    if not args.shard_gb > 0:
        errors.append(ConfigError(f"--shard-gb {args.shard_gb} must be above 0."))
    if args.to == "native" and args.dtype and getattr(torch, args.dtype).itemsize < 4:
        errors.append(ConfigError(f"--dtype {args.dtype}: native checkpoints are of float32 at least. Leave it out."))
    source = tokenizer = asked = None
    try:
        if args.tokenizer is not None:
            asked = tokenizer = tokenizer_module.load(TokenizerConfig(args.tokenizer))
    except UserError as error:
        errors.append(_renamed(error))
    try:
        source = open_source(args.source)
        if args.tokenizer is None:
            source, tokenizer = _with_own_tokenizer(source)
    except UserError as error:
        errors.append(error)
    mask_id = 0
    if source is not None:
        last_id = source.vocab_size - 1 if tokenizer is None else tokenizer.mask_id
        mask_id = next(i for i in (args.mask_id, source.mask_id, last_id) if i is not None)
        errors += [ConfigError(fault) for fault in _vocabulary_faults(source, tokenizer, mask_id)]
        if args.raw and "model" not in source.weights:
            errors.append(ConfigError(f"--raw: {source.path} has only averaged weights. Leave it out."))
        if args.to == "mdlm" and source.config.model.block is not BlockName.paper:
            fault = (
                f"{source.path} has model.block={source.config.model.block}, which the original's code does not know."
            )
            errors.append(ConfigError(f"{fault} Choose --to hf or native."))
    if errors or source is None:
        raise type(errors[0])(*dict.fromkeys(fault for error in errors for fault in error.faults))
    kind = "model" if args.raw or "ema" not in source.weights else "ema"
    for note in source.notes:
        if tokenizer is None or "--tokenizer" not in note:
            log.info(note)
    if kind == "model" and not args.raw:
        log.info(f"{source.path} has no averaged (EMA) weights: its raw ones are taken")
    if asked is not None:
        name = args.tokenizer if not Path(args.tokenizer).is_dir() else str(Path(args.tokenizer).resolve())
        source = replace(source, config=replace(source.config, tokenizer=TokenizerConfig(name)))
    elif tokenizer is None:
        log.info(f"{source.path} has no tokenizer, and so DST has none; --tokenizer NAME|FOLDER would add one")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    return Plan(source, kind, tokenizer, mask_id, args.to, dtype, args.shard_gb * 1e9)


def _target_faults(args: Namespace) -> list[str]:
    target, source = args.target.resolve(), args.source.resolve()
    if target == source or target in source.parents or source in target.parents:
        return [f"DST {args.target} is SRC, or one holds the other. Choose another folder."]
    above = next(folder for folder in target.parents if folder.exists())
    try:
        tempfile.TemporaryFile(dir=above).close()
    except OSError as error:
        return [f"DST {args.target} cannot be made: {above}: {error.strerror}. Choose another folder."]
    if not target.exists():
        return []
    if not args.force:
        return [f"DST {args.target} exists. Choose another folder, or --force to replace it."]
    if target.is_dir() and (_was_converted(target) or not any(target.iterdir())):
        return []
    return [f"DST {args.target} holds something else than a converted checkpoint: --force does not replace it."]


def _was_converted(folder: Path) -> bool:
    """Both descriptions say so: a checkpoint of a run, or shards of text, have a manifest too."""
    for file, key in ((MANIFEST, "converted"), ("config.json", "mdlm_scale")):
        try:
            if key in json.loads((folder / file).read_text()):
                return True
        except (OSError, ValueError, TypeError):
            continue
    return False


def _with_own_tokenizer(source: Source) -> tuple[Source, Tokenizer | None]:
    """The tokenizer that the source names, or whose files it holds."""
    if not source.has_tokenizer:
        return source, None
    try:
        tokenizer = tokenizer_module.load(source.config.tokenizer)
        if source.fingerprint in (None, tokenizer.fingerprint):
            return source, tokenizer
        fault = f"'{source.config.tokenizer.name}' is not the tokenizer that {source.path} was trained with."
    except ConfigError as error:
        fault = str(error)
    if source.format == "hf" and (source.path / "tokenizer_config.json").is_file():
        own = TokenizerConfig(str(source.path.resolve()))
        log.info(f"its tokenizer {source.config.tokenizer.name} is not here: the folder's own files are taken")
        return replace(source, config=replace(source.config, tokenizer=own)), tokenizer_module.load(own)
    if source.format == "native":
        raise ConfigError(f"{fault} --tokenizer NAME|FOLDER names another place of it.")
    log.info(fault)
    return source, None


def _vocabulary_faults(source: Source, tokenizer: Tokenizer | None, mask_id: int) -> list[str]:
    found = []
    if tokenizer is not None and tokenizer.vocab_size != source.vocab_size:
        found.append(
            f"The tokenizer '{tokenizer.name}' has {tokenizer.vocab_size} entries, the mask included, and the model "
            f"{source.vocab_size}: they do not belong together. Give the model's with --tokenizer."
        )
    elif tokenizer is not None and tokenizer.mask_id != mask_id:
        found.append(f"The mask of the tokenizer '{tokenizer.name}' is token {tokenizer.mask_id}, not {mask_id}.")
    if not 0 <= mask_id < source.vocab_size:
        found.append(f"The mask id {mask_id} is outside the vocabulary, 0 .. {source.vocab_size - 1} (--mask-id).")
    return found


def _renamed(error: UserError) -> UserError:
    """With the tool's option in place of the setting."""
    return type(error)(*(fault.replace("tokenizer.name=", "--tokenizer ") for fault in error.faults))


def _write_hugging_face(folder: Path, plan: Plan) -> None:
    """Weights under the original's names, in files of at most `shard_bytes`; then what belongs to the format."""
    source = plan.source
    stored = source.weights[plan.kind]
    entries = {PREFIX + original_name(name): (name, stored[name]) for name in original_order(list(stored))}
    if plan.to == "mdlm":
        entries[ROTARY] = ("rotary", _rotary(source))
    shards: list[Entries] = [{}]
    room = plan.shard_bytes
    for key, (name, weight) in entries.items():
        num_bytes = _meta(plan, weight).nbytes
        if num_bytes > room and shards[-1]:
            shards, room = [*shards, {}], plan.shard_bytes
        shards[-1][key] = (name, weight)
        room -= num_bytes
    names = ["model.safetensors"] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    progress = _Progress(sum(_meta(plan, weight).nbytes for _, weight in entries.values()))
    sums = ""
    for file, shard in zip(names, shards, strict=True):
        sums += f"{_write_weights(folder / file, plan, shard, progress)}  {file}\n"
    (folder / SUMS).write_text(sums)
    if len(shards) > 1:
        places = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": progress.total}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    told = {"weights": "raw" if plan.kind == "model" else "ema", "step": source.step}
    config = hf_files.config_of(source, plan.tokenizer, plan.mask_id, told)
    dtype = plan.dtype or next(iter(stored.values())).dtype
    hf_files.write_config(folder, plan.to, str(dtype).removeprefix("torch."), config)
    if plan.to == "hf":
        hf_files.write_beside(folder, source, plan.tokenizer, plan.told, config)


def _write_native(folder: Path, plan: Plan) -> None:
    """A checkpoint of one rank at step 0, without moments: weights to sample, evaluate, or begin a run from.

    Where there is one set of weights, `model/` and `ema/` are the same bytes of the file.
    """
    source = plan.source
    raw = "model" if "model" in source.weights else plan.kind
    kinds = {"ema": plan.kind, "model": raw}
    entries = {
        f"{kind}/{name}": (name, weight)
        for kind in dict.fromkeys(kinds.values())
        for name, weight in source.weights[kind].items()
    }
    file = folder / "weights.safetensors"
    progress = _Progress(sum(_meta(plan, weight).nbytes for _, weight in entries.values()))
    digest = _write_weights(file, plan, entries, progress)
    index = {}
    for kind, stored in kinds.items():
        for name, weight in source.weights[stored].items():
            shape, dtype = list(weight.shape), str(plan.dtype_of(weight)).removeprefix("torch.")
            box = {"file": file.name, "entry": f"{stored}/{name}", "offset": [0] * len(shape), "size": shape}
            index[f"{kind}/{name}"] = {"shape": shape, "dtype": dtype, "boxes": [box]}
    config = source.config
    if plan.tokenizer is None:
        config = replace(config, tokenizer=TokenizerConfig(NO_TOKENIZER))
    told = {"ema": "averaged", "model": "raw"}
    manifest = {
        "format": FORMAT,
        "state": asdict(State()),
        "config": config_module.to_tree(config),
        "layout": asdict(Layout()),
        "versions": versions(),
        "fingerprints": {"tokenizer": plan.tokenizer.fingerprint} if plan.tokenizer else {},
        "converted": {
            "from": source.format,
            "step": source.step,
            "mask_id": plan.mask_id,
            "weights": {kind: told[stored] for kind, stored in kinds.items()},
            "moments": "none: a run begins from these weights with run.init_from, at step 0",
        },
        "tensors": index,
        "files": {file.name: {"bytes": file.stat().st_size, "sha256": digest}},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


@dataclass
class _Progress:
    total: int
    done: int = 0

    def add(self, num_bytes: int, name: str) -> None:
        self.done += num_bytes
        log_module.live(f"converting {self.done / max(1, self.total):4.0%} | {self.done / 1e6:,.0f} MB | {name}")


def _write_weights(path: Path, plan: Plan, entries: Entries, progress: _Progress) -> str:
    def contents() -> Iterator[Any]:
        for name, weight in entries.values():
            written = 0
            for piece in weight.pieces(name, plan.source.config.model, plan.to != "native", plan.dtype_of(weight)):
                yield piece.view(torch.uint8).numpy()
                written += piece.nbytes
                progress.add(piece.nbytes, name)
            assert written == _meta(plan, weight).nbytes, f"{name}: {written} bytes"

    return write_safetensors(path, {key: _meta(plan, weight) for key, (_, weight) in entries.items()}, contents())


def _meta(plan: Plan, weight: Weight) -> Tensor:
    return torch.empty(weight.shape, dtype=plan.dtype_of(weight), device="meta")


def _rotary(source: Source) -> Weight:
    model = source.config.model
    buffer = inverse_frequencies(model.hidden_size // model.num_heads)
    return Weight(torch.float32, tuple(buffer.shape), lambda first, end: buffer[first:end], is_original=True)


def _show(aside: Path, target: Path) -> None:
    """Everything is on disk before the name is."""
    for file in [*aside.iterdir(), aside]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _next(target: Path, plan: Plan) -> str:
    if plan.to == "hf":
        return f"python {target}/generate.py"
    if plan.to == "mdlm":
        return f"in the original's repository: python main.py backbone=hf_dit eval.checkpoint_path={target} ..."
    train = f"python -m mdlm_scale.train --config CONFIG run.init_from={target}"
    return train if plan.tokenizer is None else f"python -m mdlm_scale.sample --checkpoint {target}, or {train}"


def _peak() -> int:
    """Bytes of this process's memory at its highest so far; 0 where that is not told."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return 0
