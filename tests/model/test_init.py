"""Initial weights: a function of seed, name and index, with the values that the paper's model starts from."""

import math

import pytest
import torch
from scipy import stats

from mdlm_scale.config import BlockName, ModelConfig
from mdlm_scale.model import init
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.init import Fill, fills, init_range

CONFIG = ModelConfig(hidden_size=12, num_layers=2, num_heads=2, cond_size=5)
UNIFORM = Fill(bound=0.5)


@pytest.mark.parametrize("fill", [UNIFORM, Fill(1.0), Fill(0.0)], ids=str)
@pytest.mark.parametrize(("start", "numel"), [(0, 1), (0, 100), (1, 7), (3, 1), (4, 8), (41, 59), (99, 1), (50, 0)])
def test_a_range_is_that_part_of_the_whole(fill: Fill, start: int, numel: int) -> None:
    whole = init_range(7, "embed.weight", fill, 0, 100)
    assert torch.equal(init_range(7, "embed.weight", fill, start, numel), whole[start : start + numel])


def test_a_range_longer_than_the_drawing_chunk() -> None:
    start, numel = 5, init.CHUNK + 10
    whole = init_range(7, "embed.weight", UNIFORM, 0, start + numel)
    assert torch.equal(init_range(7, "embed.weight", UNIFORM, start, numel), whole[start:])


def test_a_range_beyond_32_bits_of_index() -> None:
    far = init_range(7, "embed.weight", UNIFORM, 2**34, 8)  # four elements a counter: its low word is 0 again
    assert not torch.equal(far, init_range(7, "embed.weight", UNIFORM, 0, 8))


def test_values_are_uniform() -> None:
    values = init_range(0, "embed.weight", UNIFORM, 0, 64_000)
    counts = torch.histc(values, bins=64, min=-0.5, max=0.5)
    # one fixed draw, so this never fails by chance; a wrong bound or a constant lane gives p = 0
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


def test_values_stay_within_the_bound() -> None:
    assert init_range(0, "embed.weight", UNIFORM, 0, 64_000).abs().max() < 0.5


@pytest.mark.parametrize(("seed", "name"), [(1, "embed.weight"), (2**32, "embed.weight"), (0, "time_in.weight")])
def test_values_differ_by_seed_and_name(seed: int, name: str) -> None:
    a, b = init_range(0, "embed.weight", UNIFORM, 0, 4096), init_range(seed, name, UNIFORM, 0, 4096)
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert correlation.abs() < 4 / math.sqrt(4096)  # four standard deviations of independent draws


def test_each_parameter_starts_as_in_the_paper() -> None:
    block = {
        "norm1.weight": Fill(1.0),
        "norm2.weight": Fill(1.0),
        "qkv.weight": Fill(bound=1 / math.sqrt(12)),
        "attn_out.weight": Fill(bound=1 / math.sqrt(12)),
        "mlp_in.weight": Fill(bound=1 / math.sqrt(12)),
        "mlp_in.bias": Fill(bound=1 / math.sqrt(12)),
        "mlp_out.weight": Fill(bound=1 / math.sqrt(48)),
        "mlp_out.bias": Fill(bound=1 / math.sqrt(48)),
        "modulation.weight": Fill(0.0),
        "modulation.bias": Fill(0.0),
    }
    rest = {
        "embed.weight": Fill(bound=1 / math.sqrt(12)),
        "time_in.weight": Fill(bound=1 / math.sqrt(256)),
        "time_in.bias": Fill(bound=1 / math.sqrt(256)),
        "time_out.weight": Fill(bound=1 / math.sqrt(5)),
        "time_out.bias": Fill(bound=1 / math.sqrt(5)),
        "norm.weight": Fill(1.0),
        "modulation.weight": Fill(0.0),
        "modulation.bias": Fill(0.0),
        "head.weight": Fill(0.0),
        "head.bias": Fill(0.0),
    }
    with torch.device("meta"):
        model = DiT(CONFIG, vocab_size=11, mask_id=3)
    assert fills(model) == rest | {f"blocks.{i}.{name}": fill for i in range(2) for name, fill in block.items()}


def test_what_adds_to_the_residual_stream_of_a_modern_model_starts_smaller_with_depth() -> None:
    config = ModelConfig(hidden_size=12, num_layers=8, num_heads=2, block=BlockName.modern)
    with torch.device("meta"):
        found = fills(DiT(config, vocab_size=11, mask_id=3))
    assert found["blocks.0.attn_out.weight"] == Fill(bound=1 / math.sqrt(12) / 4)
    assert found["blocks.7.mlp_out.weight"] == Fill(bound=1 / math.sqrt(256) / 4)
    assert found["blocks.0.qkv.weight"] == found["blocks.0.mlp_in.weight"] == Fill(bound=1 / math.sqrt(12))
    assert found["blocks.0.norm_qk.weight"] == found["blocks.0.norm1.weight"] == Fill(1.0)
