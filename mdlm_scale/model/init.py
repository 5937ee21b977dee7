"""Initial weights as a function of (seed, parameter name, element index).

Whoever needs a range of a parameter computes just that range: a shard equals the same part of the whole, bit for bit,
and nobody draws numbers for others. All weights are zeros, ones, or uniform in +-bound, as in the paper; in modern
blocks the matrices that add to the residual stream start smaller, the deeper the model.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mdlm_scale.config import BlockName
from mdlm_scale.diffusion.noise import philox, stream_id
from mdlm_scale.model.dit import DiT

CHUNK = 1 << 20  # elements drawn at a time: bounds the memory of the integer arithmetic


@dataclass(frozen=True)
class Fill:
    value: float = 0.0
    bound: float = 0.0  # above 0: uniform in [-bound, bound) instead of the value


def fills(model: DiT) -> dict[str, Fill]:
    """How each parameter starts; reads only names and shapes, so the model may be on the meta device."""
    shapes = {name: p.shape for name, p in model.named_parameters()}
    is_modern = model.config.block is BlockName.modern
    # 2n matrices add to the stream: together as much as one (GPT-2's rule)
    depth_scale = 1 / math.sqrt(2 * model.config.num_layers) if is_modern else 1.0
    return {name: _fill(name, shapes, depth_scale) for name in shapes}


def init_range(seed: int, name: str, fill: Fill, start: int, numel: int) -> Tensor:
    """Elements start .. start + numel of a parameter in row-major order, float64."""
    if fill.bound == 0:
        return torch.full((numel,), fill.value, dtype=torch.float64)
    parts = [_uniform(seed, name, at, min(CHUNK, start + numel - at)) for at in range(start, start + numel, CHUNK)]
    return (2 * torch.cat(parts) - 1) * fill.bound if parts else torch.empty(0, dtype=torch.float64)


def _fill(name: str, shapes: dict[str, torch.Size], depth_scale: float) -> Fill:
    module = name.rpartition(".")[0]
    if module.rpartition(".")[2].startswith("norm"):
        return Fill(1.0)
    if module.endswith("modulation") or module == "head":
        return Fill(0.0)  # adaLN-zero: at the start a block is the identity, and every token equally likely
    # torch's default for Linear is +-1/sqrt(fan in), of weight and bias; the embedding's is +-1/sqrt(width)
    bound = 1 / math.sqrt(shapes[f"{module}.weight"][1])
    return Fill(bound=bound * depth_scale if module.endswith(("attn_out", "mlp_out")) else bound)


def _uniform(seed: int, name: str, start: int, numel: int) -> Tensor:
    first, last = start // 4, (start + numel + 3) // 4
    index = torch.arange(first, last)
    zero = torch.zeros_like(index)
    counter = (index & 0xFFFFFFFF, index >> 32, zero, zero + stream_id("init " + name))
    bits = torch.stack(philox(seed, counter), dim=1).flatten()[start - 4 * first :][:numel]
    return (bits.double() + 0.5) / 2**32
