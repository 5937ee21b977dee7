"""One name for each parameter in each world: ours, and the original code's (which Hugging Face's checkpoint uses too).

The only tensor that differs is the fused qkv matrix: ours orders its rows (head, [q, k, v], head width), so that a
contiguous slice holds whole heads; the original's are q | k | v, each (head, head width). The original knows no modern
blocks: an export of those has the same names, and its rows as ours are.
"""

import re

from torch import Tensor

_TO_ORIGINAL = (
    (r"embed\.weight", r"vocab_embed.embedding"),
    (r"time_in\.(weight|bias)", r"sigma_map.mlp.0.\1"),
    (r"time_out\.(weight|bias)", r"sigma_map.mlp.2.\1"),
    (r"blocks\.(\d+)\.(norm1|norm2)\.weight", r"blocks.\1.\2.weight"),
    (r"blocks\.(\d+)\.qkv\.weight", r"blocks.\1.attn_qkv.weight"),
    (r"blocks\.(\d+)\.(norm_qk|attn_out)\.weight", r"blocks.\1.\2.weight"),
    (r"blocks\.(\d+)\.mlp_in\.(weight|bias)", r"blocks.\1.mlp.0.\2"),
    (r"blocks\.(\d+)\.mlp_out\.(weight|bias)", r"blocks.\1.mlp.2.\2"),
    (r"blocks\.(\d+)\.modulation\.(weight|bias)", r"blocks.\1.adaLN_modulation.\2"),
    (r"norm\.weight", r"output_layer.norm_final.weight"),
    (r"modulation\.(weight|bias)", r"output_layer.adaLN_modulation.\1"),
    (r"head\.(weight|bias)", r"output_layer.linear.\1"),
)


def original_name(name: str) -> str:
    """The original code's name of our parameter, without its `backbone.` prefix."""
    for ours, theirs in _TO_ORIGINAL:
        if re.fullmatch(ours, name):
            return re.sub(ours, theirs, name)
    raise AssertionError(f"parameter {name} has no name in the original code")


def from_original(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    """The original's tensor as ours; `name` is our name."""
    if not name.endswith("qkv.weight"):
        return tensor
    return tensor.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def to_original(name: str, tensor: Tensor, num_heads: int) -> Tensor:
    """Our tensor as the original's; `name` is our name."""
    if not name.endswith("qkv.weight"):
        return tensor
    return tensor.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
