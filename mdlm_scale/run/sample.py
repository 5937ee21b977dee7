"""Text from a checkpoint: load the averaged weights into a model of their own, draw, decode."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mdlm_scale import config as config_module
from mdlm_scale import log as log_module
from mdlm_scale.config import Config
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import sample, schedule
from mdlm_scale.errors import CheckpointError, ConfigError, raise_if_any
from mdlm_scale.model.dit import DiT
from mdlm_scale.run import checkpoint

BATCH = 16  # samples drawn together; no sample depends on the others


def main(path: str, num_samples: int, num_steps: int, seed: int, json_file: str | None) -> int:
    """`python -m mdlm_scale.sample`: print samples, and write them as JSON lines if asked."""
    log_module.start()
    counts = {"--num": num_samples, "--steps": num_steps}
    raise_if_any(f"{name} {count} must be at least 1." for name, count in counts.items() if count < 1)
    trained = find_trained(Path(path))
    config, tokenizer = trained.config, trained.tokenizer
    model = load_model(trained, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        out = open(json_file, "w", encoding="utf-8") if json_file else None  # noqa: SIM115
    except OSError as error:
        raise ConfigError(f"--json {json_file} cannot be written: {error}.") from error
    shape = schedule.from_config(config.diffusion)

    def logits(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        return model.logits(z_BL, shape.sigma(t_B), rows_M)

    with torch.inference_mode():
        for start in range(0, num_samples, BATCH):
            sample_B = torch.arange(start, min(start + BATCH, num_samples), device=model.embed.weight.device)
            z_BL = sample.ancestral(
                logits, shape, sample_B, config.data.length, num_steps=num_steps, mask_id=tokenizer.mask_id, seed=seed
            )
            for number, ids in zip(sample_B.tolist(), z_BL.tolist(), strict=True):
                text = tokenizer.decode(ids)
                print(f"--- sample {number}\n{text}")
                if out:
                    out.write(
                        json.dumps({"sample": number, "seed": seed, "steps": num_steps, "text": text, "ids": ids})
                        + "\n"
                    )
    if out:
        out.close()
    return 0


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
