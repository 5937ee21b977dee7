"""Text from a checkpoint: load the averaged weights into a model of their own, draw, decode, say what it took."""

import json
import math
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdlm_scale import config as config_module
from mdlm_scale import kernels
from mdlm_scale import log as log_module
from mdlm_scale.config import Config
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import sample, schedule
from mdlm_scale.diffusion.sample import Order, Rule
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.errors import CheckpointError, ConfigError, UserError
from mdlm_scale.log import log
from mdlm_scale.model.dit import DiT
from mdlm_scale.run import checkpoint, quality
from mdlm_scale.run.quality import Figures, Judge

STEPS = 128
GAP = "___"


@dataclass
class Network:
    """A model as the samplers ask it, and how much they did."""

    model: DiT
    schedule: Schedule
    calls: int = 0
    sequences: int = 0
    head_rows: int = 0

    def __call__(self, z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        log_module.live(f"sampling | {self.work()}")
        self.calls, self.sequences, self.head_rows = (
            self.calls + 1,
            self.sequences + len(z_BL),
            self.head_rows + len(rows_M),
        )
        return self.model.logits(z_BL, self.schedule.sigma(t_B), rows_M)

    def work(self) -> str:
        return f"{self.calls:,} network calls, of {self.sequences:,} rows | {self.head_rows:,} rows through the head"


def main(asked: Namespace) -> int:
    """`python -m mdlm_scale.sample`: print samples, and write them as JSON lines if asked."""
    log_module.start()
    trained, template_N, judge = _checked(asked)
    tokenizer = trained.tokenizer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        kernels.tune_cpu()
    network = Network(load_model(trained, device, asked.raw), schedule.from_config(trained.config.diffusion))
    rule = Rule(
        tokenizer.mask_id, tokenizer.vocab_size, asked.seed, Order(asked.sampler), asked.steps or STEPS,
        asked.temperature, asked.top_p, tokenizer.eos_id if asked.stop_at_eos else -1,
    )  # fmt: skip
    steps = None if rule.order is Order.first_hitting else rule.num_steps
    departures, started = rule.departures(), time.monotonic()
    note = f" (not the model's law: {', '.join(departures)})" if departures else ""
    samples: list[list[int]] = []
    with open(asked.json, "w", encoding="utf-8") if asked.json else nullcontext() as out:
        for ids in _drawn(asked, network, rule, template_N, trained.config.data.length):
            number, text = len(samples), tokenizer.decode(ids)
            samples.append(ids)
            print(f"--- sample {number}{note}\n{text}", flush=True)
            if out:
                line = {"sample": number, "seed": rule.seed, "sampler": rule.order, "steps": steps}
                out.write(json.dumps(line | {"departures": departures, "text": text, "ids": ids}) + "\n")
        seconds, num_tokens = time.monotonic() - started, sum(map(len, samples))
        log.info(
            f"{asked.num} samples, {num_tokens:,} tokens in {seconds:.1f} s: {num_tokens / seconds:,.1f} tokens/s | "
            f"{network.work()} | {rule.order}{f' in {steps} steps' if steps else ''}"
        )
        if asked.report or judge:
            found = _report(samples, tokenizer, judge, device)
            print("--- report", *(f"{key:15} {value}" for key, value in found.items()), sep="\n")
            if out:
                out.write(json.dumps({"report": found}) + "\n")
    return 0


def _drawn(asked: Namespace, network: Network, rule: Rule, template_N: Tensor, width: int) -> Iterator[list[int]]:
    """The wanted tokens of each sample, as they are done."""
    device, stride = network.model.embed.weight.device, asked.stride or max(1, width // 2)
    for first in range(0, asked.num, asked.batch):
        sample_B = torch.arange(first, min(first + asked.batch, asked.num), device=device)
        z_BN = template_N.to(device).expand(len(sample_B), -1)
        with torch.inference_mode():
            z_BN, wanted_B = sample.generate(
                network, network.schedule, rule, z_BN, sample_B, width=width, stride=stride
            )
        log_module.end_live()
        yield from (ids[:wanted] for ids, wanted in zip(z_BN.tolist(), wanted_B.tolist(), strict=True))


def _report(samples: list[list[int]], tokenizer: Tokenizer, judge: Judge | None, device: torch.device) -> Figures:
    """The judge reads text without the tokens that frame documents: each document on a line of its own."""
    if judge is None:
        return quality.figures(samples, [], None)
    frame = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id}
    parts = [[list(part) for framing, part in groupby(ids, frame.__contains__) if not framing] for ids in samples]
    judge[0].to(device)
    return quality.figures(samples, ["\n".join(map(tokenizer.decode, each)) for each in parts], judge)


def _checked(asked: Namespace) -> tuple["Trained", Tensor, Judge | None]:
    """Everything that can be asked before weights are read, all faults at once: a sample of given tokens and masks, and
    the judge."""
    errors: list[UserError] = [ConfigError(fault) for fault in _faults(asked)]
    judge = None
    try:
        trained = find_trained(Path(asked.checkpoint))
        template, faults = _template(asked, trained)
        errors += map(ConfigError, faults)
    except UserError as error:
        errors.insert(0, error)
    try:
        judge = quality.load_judge(asked.judge) if asked.judge else None
    except UserError as error:
        errors.append(error)
    if errors:
        raise type(errors[0])(*(fault for error in errors for fault in error.faults))
    return trained, torch.tensor(template), judge


def _template(asked: Namespace, trained: "Trained") -> tuple[list[int], list[str]]:
    """A sample before it is drawn, and what is wrong with it or with how this model is to fill it."""
    tokenizer, width, found = trained.tokenizer, trained.config.data.length, []
    length, mask = asked.length or width, tokenizer.decode([tokenizer.mask_id])
    if asked.sampler == Order.confidence and trained.config.model.time_conditioning:
        found.append("--sampler confidence has no time to tell this network (model.time_conditioning). Use another.")
    if asked.stride is not None and not 1 <= asked.stride < width:
        found.append(f"--stride {asked.stride} must lie in 1 .. {width - 1}: windows have {width} tokens.")
    given = asked.prompt if asked.infill is None else asked.infill
    if given is None:
        return [tokenizer.mask_id] * length, found
    if mask in given:
        found.append(f"The text given holds the mask token {mask}. Use --infill, where {GAP} is a gap.")
    pieces = given.split(GAP) if asked.infill is not None else [given]
    if asked.infill is not None and len(pieces) == 1:
        found.append(f"--infill has no gap: write {GAP} where one is to be, or use --prompt.")
    row = [tokenizer.bos_id, *tokenizer.encode(pieces[0])]
    for piece in pieces[1:]:
        row += [*[tokenizer.mask_id] * asked.gap, *tokenizer.encode(piece)]
    if len(row) > length or (len(row) == length and len(pieces) == 1):
        found.append(f"The text given takes {len(row)} tokens with BOS and gaps; a sample has {length} (--length).")
    return row + [tokenizer.mask_id] * (length - len(row)), found


def _faults(asked: Namespace) -> list[str]:
    """What is wrong with the request itself."""
    counts = {name: getattr(asked, name) for name in ("num", "batch", "steps", "length", "gap")}
    found = [f"--{name} {n} must be at least 1." for name, n in counts.items() if n is not None and n < 1]
    if asked.sampler == Order.first_hitting and asked.steps is not None:
        found.append(f"--steps {asked.steps} is of ancestral and confidence: first-hitting draws token by token.")
    if not 0 <= asked.temperature < math.inf:
        found.append(f"--temperature {asked.temperature} must be a number of at least 0.")
    if not 0 < asked.top_p <= 1:
        found.append(f"--top-p {asked.top_p} must lie in (0, 1].")
    if not 0 <= asked.seed < 2**64:
        found.append(f"--seed {asked.seed} must lie in 0 .. 2^64 - 1.")
    if asked.json and (Path(asked.json).is_dir() or not os.access(Path(asked.json).parent, os.W_OK)):
        found.append(f"--json {asked.json} cannot be written: it is a folder, or its folder is missing or not yours.")
    return found


@dataclass(frozen=True)
class Trained:
    """A checkpoint and what it was made with; its weights are still on disk."""

    folder: Path
    manifest: dict[str, Any]
    config: Config
    tokenizer: Tokenizer


def find_trained(path: Path) -> Trained:
    """A checkpoint directory, or the newest one of a run directory."""
    folder = checkpoint.newest(path)
    if folder is None:
        raise CheckpointError(f"{path} is neither a checkpoint (step-...) nor a run directory with one.")
    manifest = checkpoint.read_manifest(folder)
    config = config_module.from_tree(manifest["config"])
    tokenizer = tokenizer_module.load(config.tokenizer)
    if tokenizer.fingerprint != manifest["fingerprints"]["tokenizer"]:
        raise CheckpointError(f"tokenizer.name={config.tokenizer.name} is not the one that {folder} was trained with.")
    if (rows := manifest["tensors"]["ema/embed.weight"]["shape"][0]) != tokenizer.vocab_size:
        raise CheckpointError(
            f"{folder} has {rows} tokens, but tokenizer.name={config.tokenizer.name} {tokenizer.vocab_size}."
        )
    return Trained(folder, manifest, config, tokenizer)


def load_model(trained: Trained, device: torch.device, raw: bool = False, dtype: torch.dtype | None = None) -> DiT:
    """The network with averaged (EMA) or raw weights, ready to score."""
    checkpoint.verify(trained.folder, trained.manifest)
    with torch.device("meta"):
        model = DiT(trained.config.model, trained.tokenizer.vocab_size, trained.tokenizer.mask_id)
    kind = "model" if raw else "ema"
    names = [name for name, _ in model.named_parameters()]
    weights = {name: checkpoint.read_tensor(trained.folder, trained.manifest, f"{kind}/{name}") for name in names}
    model.load_state_dict(weights, assign=True)
    return model.to(device, dtype)
