"""Parameter names of the public checkpoint, and the order of the fused qkv matrix in both worlds."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mdlm_scale.config import BlockName, ModelConfig
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.names import from_original, original_name, to_original

CONFIG = ModelConfig(hidden_size=12, num_layers=11, num_heads=3, cond_size=4)  # block numbers of one and two digits
QKV = "blocks.0.qkv.weight"
PUBLIC_BLOCK = (
    "norm1.weight", "attn_qkv.weight", "attn_out.weight", "norm2.weight", "mlp.0.weight", "mlp.0.bias",
    "mlp.2.weight", "mlp.2.bias", "adaLN_modulation.weight", "adaLN_modulation.bias",
)  # fmt: skip
PUBLIC_REST = (
    "vocab_embed.embedding", "sigma_map.mlp.0.weight", "sigma_map.mlp.0.bias", "sigma_map.mlp.2.weight",
    "sigma_map.mlp.2.bias", "output_layer.norm_final.weight", "output_layer.linear.weight", "output_layer.linear.bias",
    "output_layer.adaLN_modulation.weight", "output_layer.adaLN_modulation.bias",
)  # fmt: skip


def test_names_are_those_of_the_public_checkpoint() -> None:
    model = DiT(CONFIG, vocab_size=7, mask_id=0)
    names = [original_name(name) for name, _ in model.named_parameters()]
    assert sorted(names) == sorted([*PUBLIC_REST, *(f"blocks.{i}.{name}" for i in range(11) for name in PUBLIC_BLOCK)])


def test_names_of_modern_blocks_are_alike() -> None:
    model = DiT(replace(CONFIG, block=BlockName.modern), vocab_size=7, mask_id=0)
    names = {original_name(name) for name, _ in model.named_parameters()}
    block = {f"blocks.{i}.{name}" for i in range(11) for name in PUBLIC_BLOCK if not name.startswith("mlp")}
    own = {f"blocks.{i}.{name}.weight" for i in range(11) for name in ("norm_qk", "mlp.0", "mlp.2")}
    assert names == {*PUBLIC_REST, *block, *own}


@pytest.mark.parametrize("name", ["rotary.weight", "blocks.0.norm3.weight", "xhead.weight", "blocks.0.qkv.bias"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(AssertionError, match=name):
        original_name(name)


def test_qkv_rows_of_one_head() -> None:
    """Our head 1 of 3, width 4: its q, k and v rows follow each other; the original keeps all q, then all k, then v."""
    theirs = torch.arange(36)[:, None].expand(36, 12)
    ours = from_original(QKV, theirs, num_heads=3)
    assert ours[12:24, 0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19, 28, 29, 30, 31]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6])
def test_qkv_there_and_back(num_heads: int) -> None:
    theirs = torch.arange(36 * 12).view(36, 12)
    assert torch.equal(to_original(QKV, from_original(QKV, theirs, num_heads), num_heads), theirs)


@pytest.mark.parametrize("convert", [from_original, to_original])
def test_other_tensors_stay_as_they_are(convert: Callable[[str, Tensor, int], Tensor]) -> None:
    tensor = torch.arange(36 * 12).view(36, 12)
    assert torch.equal(convert("blocks.0.mlp_in.weight", tensor, 3), tensor)
