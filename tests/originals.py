"""Checkpoints as the original code writes them, from tensors that it produced (model/golden): to be converted."""

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "model" / "golden" / "reference.safetensors"
BLOCK = (
    "norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight", "mlp.0.weight", "mlp.0.bias",
    "mlp.2.weight", "mlp.2.bias", "adaLN_modulation.weight", "adaLN_modulation.bias",
)  # fmt: skip
# in which the original's modules list their parameters, and so its average
PARAMETER_ORDER = (
    "vocab_embed.embedding", "sigma_map.mlp.0.weight", "sigma_map.mlp.0.bias", "sigma_map.mlp.2.weight",
    "sigma_map.mlp.2.bias", *(f"blocks.{i}.{name}" for i in range(2) for name in BLOCK),
    "output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias",
    "output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.bias",
)  # fmt: skip
VOCAB, LENGTH = 97, 32


def golden() -> dict[str, Tensor]:
    """The tensors of one case: `state_dict/...`, `xt`, `logits`, ...; of the full file if MDLM_REFERENCE names it."""
    if "MDLM_REFERENCE" in os.environ:
        case = torch.load(os.environ["MDLM_REFERENCE"], weights_only=True)["cases"]["base"]
        weights = {f"state_dict/{name}": tensor for name, tensor in case["state_dict"].items()}
        return weights | {name: tensor for name, tensor in case.items() if isinstance(tensor, Tensor)}
    with safe_open(GOLDEN, "pt") as file:
        keys = [key for key in file.keys() if key.startswith("cases/base/")]  # noqa: SIM118 - it is no dict
        return {key.removeprefix("cases/base/"): file.get_tensor(key) for key in keys}


def state_dict() -> dict[str, Tensor]:
    """With the original's names and the rotary buffer."""
    found = {k.removeprefix("state_dict/"): v for k, v in golden().items() if k.startswith("state_dict/")}
    return OrderedDict((f"backbone.{k}", v.contiguous()) for k, v in found.items())


def average() -> dict[str, Tensor]:
    """Another set of weights, by name."""
    return {name: tensor * 1.01 + 0.001 for name, tensor in state_dict().items()}


def hugging_face(folder: Path, weights: dict[str, Tensor] | None = None, **changed: Any) -> Path:
    """A folder like kuleshov-group/mdlm-owt, without its code."""
    folder.mkdir()
    save_file(state_dict() if weights is None else weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = {
        "architectures": ["MDLM"], "model_type": "mdlm", "torch_dtype": "float32", "vocab_size": VOCAB,
        "model_length": LENGTH, "hidden_dim": 64, "cond_dim": 32, "n_blocks": 2, "n_heads": 4, "dropout": 0.1,
        "time_conditioning": False, "auto_map": {"AutoModelForMaskedLM": "modeling_mdlm.MDLM"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(told | changed))
    return folder


class Tokenizer:
    """Stands for the tokenizer that a Lightning checkpoint pickles; it must not come back to life."""

    def __setstate__(self, state: Any) -> None:
        raise AssertionError("the tokenizer was unpickled")

    def __getstate__(self) -> dict[str, str]:
        return {"name": "gpt2"}


def lightning(path: Path, **changed: Any) -> Path:
    """A .ckpt with weights, their average without names, an optimizer, a configuration and a tokenizer."""
    shadow = average()
    config = OmegaConf.create({
        "time_conditioning": False, "T": 0, "model": {"length": LENGTH, "n_heads": 4, "dropout": 0.1},
        "noise": {"type": "loglinear"}, "data": {"tokenizer_name_or_path": "gpt2", "wrap": "${model.length}"},
    })  # fmt: skip
    saved = {
        "epoch": 0, "global_step": 1234, "pytorch-lightning_version": "2.2.1", "state_dict": state_dict(),
        "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 3e-4}]}],
        "hyper_parameters": {"config": config, "tokenizer": Tokenizer()},
        "ema": {
            "decay": 0.9999, "num_updates": 1234,
            "shadow_params": [shadow[f"backbone.{name}"] for name in PARAMETER_ORDER],
        },
    }  # fmt: skip
    torch.save(saved | changed, path)
    return path
