"""What a model costs: parameters, floating-point operations, bytes; and what this machine's matrix product delivers."""

import time
from dataclasses import dataclass

import torch

from mdlm_scale.config import EngineName, ModelConfig, ParallelConfig
from mdlm_scale.model.dit import DiT


@dataclass(frozen=True)
class Sizes:
    num_parameters: int
    block_flops: float  # forward, a token: the blocks' matrix products and attention
    head_flops: float  # forward, a masked token

    def step_flops(self, num_tokens: int, num_masked: int) -> float:
        """Forward and backward of one step; the backward pass costs twice the forward."""
        return 3 * (self.block_flops * num_tokens + self.head_flops * num_masked)

    def state_bytes(self, parallel: ParallelConfig, shard_size: int, weight_bytes: int) -> dict[str, int]:
        """What a rank keeps between a backward pass and its update; transient buffers come on top.

        Masters are at least float32. Plain weights are their own masters, unless they are of half precision; ZeRO from
        stage 1 on keeps them apart in any case, FSDP has nothing but masters. In float32, ZeRO 1 and 2 also hold whole
        the gradients of the two parameters at the ends of a rank's part, which is not counted here.
        """
        half = weight_bytes < 4
        master_bytes = max(4, weight_bytes)
        stage = {EngineName.plain: 0, EngineName.fsdp: 3, EngineName.deepspeed: parallel.zero_stage}[parallel.engine]
        cut = {part: shard_size if stage >= first else 1 for part, first in _SHARDED_FROM.items()}
        if parallel.engine is EngineName.fsdp:
            weights, gradients, masters = master_bytes, master_bytes, 0
        elif stage == 0:
            weights, gradients, masters = weight_bytes, master_bytes, master_bytes * half
        else:
            weights, gradients, masters = weight_bytes, master_bytes, master_bytes
            gradients += weight_bytes * (half and stage == 1)  # half-precision ones beside their float32 sums
        a_parameter = {
            "weights": weights, "gradients": gradients, "masters": masters, "moments": 2 * master_bytes,
            "ema": master_bytes,
        }  # fmt: skip
        return {part: self.num_parameters * each // cut[part] for part, each in a_parameter.items()}


# the stage of ZeRO from which each is divided among the ranks
_SHARDED_FROM = {"weights": 3, "gradients": 2, "masters": 1, "moments": 1, "ema": 1}


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
