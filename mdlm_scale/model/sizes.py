"""What a model costs: parameters, floating-point operations, bytes; and what this machine's matrix product delivers."""

import time
from dataclasses import dataclass

import torch

from mdlm_scale.config import ModelConfig
from mdlm_scale.model.dit import DiT


@dataclass(frozen=True)
class Sizes:
    num_parameters: int
    block_flops: float  # forward, a token: the blocks' matrix products and attention
    head_flops: float  # forward, a masked token

    def step_flops(self, num_tokens: int, num_masked: int) -> float:
        """Forward and backward of one step; the backward pass costs twice the forward."""
        return 3 * (self.block_flops * num_tokens + self.head_flops * num_masked)

    def state_bytes(self, weight_bytes: int, master_bytes: int) -> int:
        """Weights and gradients, both moments and the average; in half precision also masters and their gradients."""
        masters = 5 if weight_bytes != master_bytes else 3
        return self.num_parameters * (2 * weight_bytes + masters * master_bytes)


def sizes(config: ModelConfig, vocab_size: int, length: int) -> Sizes:
    """Counted on the real model, on the meta device."""
    with torch.device("meta"):
        model = DiT(config, vocab_size, mask_id=0)
    matrices = sum(
        p.numel() for name, p in model.blocks.named_parameters() if p.dim() == 2 and "modulation" not in name
    )
    attention = 4 * length * config.hidden_size * config.num_layers  # q k^T and the weighted sum of v
    return Sizes(
        num_parameters=sum(p.numel() for p in model.parameters()),
        block_flops=2.0 * matrices + attention,
        head_flops=2.0 * model.head.weight.numel(),
    )


def gemm_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.3) -> float:
    """Operations a second of square matrix products in a row, here and now: the yardstick for the times of steps."""
    size = 8192 if device.type == "cuda" else 1024
    a, b, c = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(3))
    torch.mm(a, b, out=c)  # set-up
    count, elapsed, start = 0, 0.0, time.perf_counter()
    while elapsed < seconds or count < 3:
        torch.mm(a, b, out=c)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count, elapsed = count + 1, time.perf_counter() - start
    return 2.0 * size**3 * count / elapsed
