"""Text from a checkpoint: load the averaged weights into a model of their own, draw, decode, say what it took."""

import hashlib
import json
import math
import time
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
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
from mdlm_scale.diffusion.sample import Order, Rule, generate
from mdlm_scale.diffusion.schedule import from_config
from mdlm_scale.errors import CheckpointError, ConfigError, UserError
from mdlm_scale.log import log
from mdlm_scale.model.dit import DiT
from mdlm_scale.run import checkpoint, quality
from mdlm_scale.run.metrics import json_faults, write_json
from mdlm_scale.run.quality import Judge

GAP = "___"


@torch.inference_mode()
def main(asked: Namespace) -> int:
    """`python -m mdlm_scale.sample`: print samples, and write them as JSON lines if asked."""
    log_module.start()
    trained, template_N, judge = _checked(asked)
    tokenizer, width, shape = trained.tokenizer, trained.config.data.length, from_config(trained.config.diffusion)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        kernels.tune_cpu()
    model = load_model(trained, device, asked.raw)
    rule = Rule(
        tokenizer.mask_id, tokenizer.vocab_size, asked.seed, Order(asked.sampler), asked.steps or Rule.num_steps,
        asked.temperature, asked.top_p, tokenizer.eos_id if asked.stop_at_eos else -1,
    )  # fmt: skip
    steps = None if rule.order is Order.first_hitting else rule.num_steps
    told = {
        "checkpoint": str(trained.folder), "weights": trained.weights(asked.raw),
        "seed": rule.seed, "sampler": rule.order, "steps": steps, "temperature": rule.temperature,
        "top_p": rule.top_p, "departures": rule.departures(), "prompt": asked.prompt, "infill": asked.infill,
    }  # fmt: skip
    note = f" (not the model's law: {', '.join(rule.departures())})" if rule.departures() else ""
    lines: list[dict[str, Any]] = []
    work, started, num_masks = Counter[str](), time.monotonic(), int((template_N == rule.mask_id).sum())
    again = (1 + min(rule.num_steps, num_masks)) / 2 if rule.order is Order.confidence else 1  # draws of a token

    def network(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        done = min(1.0, work["rows through the head"] / (asked.num * num_masks * again))
        log_module.live(f"sampling {done:4.0%} | {len(lines)} of {asked.num} done | {work['network calls']:,} calls")
        work.update({"network calls": 1, "rows in them": len(z_BL), "rows through the head": len(rows_M)})
        return model.logits(z_BL, shape.sigma(t_B), rows_M)

    for first in range(0, asked.num, asked.batch):
        sample_B = torch.arange(first, min(first + asked.batch, asked.num), device=device)
        z_BN, stride = template_N.to(device).expand(len(sample_B), -1), asked.stride or max(1, width // 2)
        z_BN, wanted_B = generate(network, shape, rule, z_BN, sample_B, width=width, stride=stride)
        log_module.end_live()
        for ids, wanted in zip(z_BN.tolist(), wanted_B.tolist(), strict=True):
            text = tokenizer.decode(ids[:wanted])
            print(f"--- sample {len(lines)}{note}\n{text}", flush=True)
            lines.append({"sample": len(lines), **told, "text": text, "ids": ids[:wanted]})
    seconds, samples = time.monotonic() - started, [line["ids"] for line in lines]
    num_tokens = sum(int((template_N[: len(ids)] == rule.mask_id).sum()) for ids in samples)  # without those given
    rate = f"{num_tokens:,} tokens in {seconds:.1f} s, {num_tokens / seconds:,.1f} tokens/s"
    effort = ", ".join(f"{count:,} {what}" for what, count in work.items())
    log.info(f"{rule.order}{f', {steps} steps' if steps else ''}: {asked.num} samples, {rate}; {effort}")
    if asked.json:  # before a judge reads them, who may fail
        write_json(asked.json, _jsonl(lines))
    if asked.report or judge:
        lines.append({"report": quality.report(samples, tokenizer, judge) | {"judge": asked.judge}})
        print("--- report", *(f"{key:15} {value}" for key, value in lines[-1]["report"].items()), sep="\n")
        if asked.json:
            write_json(asked.json, _jsonl(lines))
    return 0


def _jsonl(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _checked(asked: Namespace) -> tuple["Trained", Tensor, Judge | None]:
    """Everything that can be asked before weights are read, all faults at once; the judge is loaded."""
    errors: list[UserError] = [ConfigError(fault) for fault in _faults(asked)]
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
    tokenizer, width = trained.tokenizer, trained.config.data.length
    length, mask_id, mask = asked.length or width, tokenizer.mask_id, tokenizer.decode([tokenizer.mask_id])
    given = asked.prompt if asked.infill is None else asked.infill
    if any(0xD800 <= ord(character) < 0xE000 for character in given or ""):  # what Python makes of other bytes
        raise ConfigError("The text given is not UTF-8.")
    first, *others = [given or ""] if asked.infill is None else given.split(GAP)
    row = [] if given is None else [tokenizer.bos_id, *tokenizer.encode(first)]
    for text in others:
        row += [mask_id] * asked.gap + tokenizer.encode(text)
    wrong = {
        "--sampler confidence has no time to tell this network (model.time_conditioning=true). Use another sampler.":
            asked.sampler == Order.confidence and trained.config.model.time_conditioning,
        f"--stride {asked.stride} must lie in 1 .. {width - 1}: windows have {width} tokens.":
            asked.stride is not None and not 1 <= asked.stride < width,
        f"The text given holds the mask token {mask}. Use --infill, where {GAP} is a gap.": mask in (given or ""),
        f"--infill has no gap: write {GAP} for one, or use --prompt.": asked.infill is not None and not others,
        f"The text given takes {len(row)} tokens with BOS and gaps; a sample has {length}. Shorten it, or raise "
        "--length.":
            len(row) > length or (len(row) == length and not others),
    }  # fmt: skip
    return row + [mask_id] * (length - len(row)), [fault for fault, is_so in wrong.items() if is_so]


def _faults(asked: Namespace) -> list[str]:
    """What is wrong with the request itself."""
    counts = {name: getattr(asked, name) for name in ("num", "batch", "steps", "length", "gap")}
    wrong = {f"--{name} {n} must be at least 1.": n is not None and n < 1 for name, n in counts.items()} | {
        f"--steps {asked.steps} is of ancestral and confidence: first-hitting draws token by token.":
            asked.sampler == Order.first_hitting and asked.steps is not None,
        f"--temperature {asked.temperature} must be a number of at least 0.": not 0 <= asked.temperature < math.inf,
        f"--top-p {asked.top_p} must lie in (0, 1].": not 0 < asked.top_p <= 1,
        f"--seed {asked.seed} must lie in 0 .. 2^64 - 1.": not 0 <= asked.seed < 2**64,
    }  # fmt: skip
    return [fault for fault, is_so in wrong.items() if is_so] + json_faults(asked.json)


@dataclass(frozen=True)
class Trained:
    """A checkpoint and what it was made with; its weights are still on disk."""

    folder: Path
    manifest: dict[str, Any]
    config: Config
    tokenizer: Tokenizer

    @property
    def step(self) -> int | None:
        """Of the run that it is from; unknown of some that were converted."""
        return (self.manifest.get("converted") or self.manifest["state"])["step"]

    @property
    def fingerprint(self) -> str:
        """Of the files with its weights."""
        return hashlib.sha256(json.dumps(self.manifest["files"], sort_keys=True).encode()).hexdigest()

    def weights(self, raw: bool) -> str:
        """What is read: of what was converted there may be one kind, under both names."""
        kinds = self.manifest.get("converted", {}).get("weights", {"ema": "averaged", "model": "raw"})
        return "EMA" if kinds["model" if raw else "ema"] == "averaged" else "raw"


def find_trained(path: Path) -> Trained:
    """A checkpoint directory, or the newest one of a run directory."""
    folder = checkpoint.newest(path)
    if folder is None:
        what = "is neither a checkpoint (step-...) nor a run directory with one" if path.exists() else "does not exist"
        raise CheckpointError(f"{path} {what}. Give the run.dir of a run, or one of its checkpoints/step-... folders.")
    there = checkpoint.listed(path / "checkpoints")
    for newer in there[there.index(folder) + 1 :] if folder in there else ():
        log.warning(f"{newer} is passed over: its manifest cannot be read")
    manifest = checkpoint.read_manifest(folder)
    config = config_module.from_tree(manifest["config"])
    try:
        tokenizer = tokenizer_module.load(config.tokenizer)
    except ConfigError as error:
        convert = f"python tools/convert_ckpt.py {path} DST --to native --tokenizer FOLDER"
        raise ConfigError(f"{error} For a checkpoint whose tokenizer has moved: {convert}.") from error
    size, theirs = tokenizer.vocab_size, manifest["tensors"].get("ema/embed.weight", {"shape": [0]})["shape"][0]
    if tokenizer.fingerprint != manifest["fingerprints"]["tokenizer"] or size != theirs:
        raise CheckpointError(
            f"tokenizer.name={config.tokenizer.name} (V {size}) is not that of {folder} (V {theirs})."
        )
    return Trained(folder, manifest, config, tokenizer)


def load_model(trained: Trained, device: torch.device, raw: bool = False, dtype: torch.dtype | None = None) -> DiT:
    """The network with averaged (EMA) or raw weights, ready to score."""
    with torch.device("meta"):
        model = DiT(trained.config.model, trained.tokenizer.vocab_size, trained.tokenizer.mask_id)
    kind, where = "model" if raw else "ema", (trained.folder, trained.manifest)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    checkpoint.check_shapes(*where, {f"{kind}/{name}": shape for name, shape in shapes.items()})
    checkpoint.verify(*where)
    weights = {name: checkpoint.read_tensor(*where, f"{kind}/{name}") for name in shapes}
    model.load_state_dict(weights, assign=True)
    return model.to(device, dtype)
