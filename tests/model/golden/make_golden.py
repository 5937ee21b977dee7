"""Cut one case out of the file of tensors that the original code produced: python make_golden.py REFERENCE.pt

Leaves of the reference are named by their path, as in cases/base/grads/blocks.0.norm1.weight: tensors are stored as
they are, numbers and words as JSON in the metadata. Kept are one case, the tables of the schedules and the EMA series.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GOLDEN = Path(__file__).with_name("reference.safetensors")
KEPT = ("cases/base/", "noise/", "ema/", "meta/")
UNUSED = (
    ["hidden"],
    ["cond"],
    ["sigma_in"],
    ["unet_conditioning"],
    ["u_t"],
    ["is_t"],
)  # inner steps that no test looks at


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every leaf of nested dicts and lists by its path."""
    if not isinstance(tree, dict | list | tuple):
        return {path: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {k: v for key, below in items for k, v in leaves(below, f"{path}/{key}" if path else str(key)).items()}


def is_kept(path: str) -> bool:
    return path.startswith(KEPT) and path.split("/")[2:3] not in UNUSED


def main(reference: str) -> None:
    kept = {k: v for k, v in leaves(torch.load(reference, weights_only=True)).items() if is_kept(k)}
    tensors = {k: v.clone(memory_format=torch.contiguous_format) for k, v in kept.items() if isinstance(v, Tensor)}
    words = {k: json.dumps(v) for k, v in kept.items() if not isinstance(v, Tensor)}
    save_file(tensors, GOLDEN, metadata=words)


if __name__ == "__main__":
    main(sys.argv[1])
