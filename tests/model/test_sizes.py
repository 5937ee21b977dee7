"""Parameters of the paper's models, and floating-point operations against torch's own count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mdlm_scale.config import BlockName, EngineName, ModelConfig, ParallelConfig
from mdlm_scale.model.dit import SINUSOID_WIDTH, DiT
from mdlm_scale.model.sizes import Sizes, gemm_rate, sizes

SMALL = ModelConfig()


@pytest.mark.parametrize(
    ("config", "vocab_size", "num_parameters"),
    [
        (replace(SMALL, hidden_size=512, num_layers=8, num_heads=8), 50258, 80_061_266),
        (SMALL, 50258, 169_627_218),
        (SMALL, 30522, 139_292_986),
        (replace(SMALL, hidden_size=1024, num_layers=24, num_heads=16), 50258, 424_477_010),
    ],
    ids=["tiny", "small, GPT-2", "small, BERT", "medium"],
)
def test_number_of_parameters(config: ModelConfig, vocab_size: int, num_parameters: int) -> None:
    assert sizes(config, vocab_size, length=1024).num_parameters == num_parameters


@pytest.mark.parametrize("block", [{}, {"block": BlockName.modern, "num_kv_heads": 1}], ids=["paper", "modern"])
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_forward_flops_are_those_that_torch_counts(time_conditioning: bool, block: dict[str, Any]) -> None:
    config = ModelConfig(16, 2, 2, cond_size=8, time_conditioning=time_conditioning, **block)
    vocab_size, length, num_rows, num_masked = 11, 6, 3, 7
    model = DiT(config, vocab_size, mask_id=0)
    z_BL = torch.zeros(num_rows, length, dtype=torch.long)
    # attention as plain matrix products, which the counter knows on every machine
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model.logits(z_BL, torch.ones(num_rows), torch.arange(num_masked))
    # left out of `block_flops`, being for a sample and not for a token: the conditioning MLP and the modulations
    cond = config.cond_size
    matrices = SINUSOID_WIDTH * cond + cond * cond + cond * 16 * (6 * config.num_layers + 2)
    conditioning = 2 * matrices * (num_rows if time_conditioning else 1)
    size = sizes(config, vocab_size, length)
    counted = size.block_flops * num_rows * length + size.head_flops * num_masked + conditioning
    assert counter.get_total_flops() == counted


def test_a_step_costs_three_forward_passes() -> None:
    size = Sizes(num_parameters=0, block_flops=5.0, head_flops=7.0)
    assert size.step_flops(num_tokens=100, num_masked=50) == 3 * (500 + 350)


PLAIN, FSDP = ParallelConfig(engine=EngineName.plain), ParallelConfig(engine=EngineName.fsdp)
ZERO = [ParallelConfig(engine=EngineName.deepspeed, zero_stage=stage) for stage in range(4)]


@pytest.mark.parametrize(
    ("parallel", "weight_bytes", "whole", "divided"),
    [
        # (weight, gradient), master where it is another tensor, two moments, average
        (PLAIN, 2, 2 + 4 + 4 + 8 + 4, 0),
        (PLAIN, 4, 4 + 4 + 8 + 4, 0),
        (PLAIN, 8, 8 + 8 + 16 + 8, 0),
        (ZERO[0], 4, 4 + 4 + 8 + 4, 0),
        (ZERO[1], 4, 4 + 4, 4 + 8 + 4),
        (ZERO[1], 2, 2 + 2 + 4, 4 + 8 + 4),  # half-precision gradients beside their float32 sums
        (ZERO[2], 4, 4, 4 + 4 + 8 + 4),
        (ZERO[2], 2, 2, 4 + 4 + 8 + 4),
        (ZERO[3], 4, 0, 4 + 4 + 4 + 8 + 4),
        (FSDP, 4, 0, 4 + 4 + 8 + 4),
        (FSDP, 2, 0, 4 + 4 + 8 + 4),  # the shards are the masters
    ],
)
def test_state_bytes(parallel: ParallelConfig, weight_bytes: int, whole: int, divided: int) -> None:
    size = Sizes(num_parameters=1000, block_flops=0.0, head_flops=0.0)
    for shard_size in (1, 2, 8):
        state = size.state_bytes(parallel, shard_size, weight_bytes)
        assert sum(state.values()) == 1000 * whole + 1000 * divided // shard_size


def test_gemm_rate_is_positive() -> None:
    assert gemm_rate(torch.device("cpu"), torch.float32, seconds=0.0) > 0
