"""The network: a bidirectional transformer over partly masked tokens, modulated by the noise level (adaLN-zero).

The head and the loss are part of the forward pass, on masked rows only, so that no caller ever sees B x L x V logits
and so that an engine that shards parameters gathers them where they are used. The model knows no ranks. The residual
stream is at least float32; every Linear computes in the dtype of its weight.
B sequences, L positions, D width, H heads, K head width, V vocabulary, C conditioning width, M masked rows.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mdlm_scale import kernels
from mdlm_scale.config import ModelConfig, Recompute, outside
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.diffusion.noise import is_dropped
from mdlm_scale.model.head import Head

SITES = 2  # places a block drops activations at: after attention, after the MLP
SINUSOID_WIDTH = 256


class DiT(nn.Module):
    def __init__(self, config: ModelConfig, vocab_size: int, mask_id: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.config = config
        self.recompute = Recompute.none
        self.embed = nn.Embedding(vocab_size, width)
        self.time_in = Linear(SINUSOID_WIDTH, config.cond_size)
        self.time_out = Linear(config.cond_size, config.cond_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = Norm(width)
        self.modulation = Linear(config.cond_size, 2 * width)
        self.head = Head(width, vocab_size, mask_id)

    @property
    def num_dropout_sites(self) -> int:
        return SITES * self.config.num_layers if self.config.dropout > 0 else 0

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of weighted nats over the masked rows, and each row's nats, (M,), without gradient."""
        hidden_BLD = self.hidden(batch.z_BL, batch.sigma_B, batch.dropout_keys)
        hidden_MD = hidden_BLD.flatten(0, 1).index_select(0, batch.rows_M)
        return self.head(hidden_MD, batch.target_M, batch.weight_M)

    def logits(self, z_BL: Tensor, sigma_B: Tensor, rows_M: Tensor) -> Tensor:
        """Raw logits at the given rows of the flattened batch, (M, V)."""
        hidden_BLD = self.hidden(z_BL, sigma_B, None)
        return self.head.logits(hidden_BLD.flatten(0, 1).index_select(0, rows_M))

    def hidden(self, z_BL: Tensor, sigma_B: Tensor, dropout_keys: Tensor | None) -> Tensor:
        """What the head reads, (B, L, D)."""
        c_BC = self.condition(sigma_B)
        rotation = rotary_angles(z_BL.shape[1], self.config.hidden_size // self.config.num_heads, z_BL.device)
        x_BLD = at_least_fp32(self.embed(z_BL))
        for i, block in enumerate(self.blocks):
            keys = None if dropout_keys is None else dropout_keys[SITES * i : SITES * (i + 1)]
            if self.recompute is Recompute.none or not torch.is_grad_enabled():
                x_BLD = block(x_BLD, c_BC, rotation, keys)
                continue
            contexts = keep_products if self.recompute is Recompute.selective else noop_context_fn
            x_BLD = checkpoint(
                block, x_BLD, c_BC, rotation, keys, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        shift, scale = self.modulation(c_BC)[:, None].chunk(2, dim=-1)
        return self.norm(x_BLD, shift, scale)

    def condition(self, sigma_B: Tensor) -> Tensor:
        """The conditioning vector, (B, C); without time conditioning one for all samples, (1, C)."""
        if not self.config.time_conditioning:
            sigma_B = torch.zeros_like(sigma_B[:1])
        return F.silu(self.time_out(F.silu(self.time_in(sinusoid(sigma_B)))))


class Block(nn.Module):
    """x + gate * dropout(attention(norm(x))), then the same with an MLP; shifts, scales and gates come from c."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.position_slice = 0  # which of equally long slices of the positions is here
        self.norm1 = Norm(width)
        self.qkv = Linear(width, 3 * width, bias=False)  # rows ordered (head, [q, k, v], head width)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = Norm(width)
        self.mlp_in = Linear(width, 4 * width)
        self.mlp_out = Linear(4 * width, width)
        self.modulation = Linear(config.cond_size, 6 * width)

    def forward(self, x_BLD: Tensor, c_BC: Tensor, rotation: tuple[Tensor, Tensor], keys: Tensor | None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c_BC)[:, None].chunk(6, dim=-1)
        # dropout divides what it keeps by the probability to keep it: done on the gates, which are small
        keep_prob = 1.0 if keys is None else 1.0 - self.dropout
        y_BLD = self.attention(self.norm1(x_BLD, shift1, scale1), rotation)
        x_BLD = torch.addcmul(x_BLD, at_least_fp32(gate1) / keep_prob, self.drop(y_BLD, keys, 0))
        y_BLD = self.mlp_out(F.gelu(self.mlp_in(self.norm2(x_BLD, shift2, scale2)), approximate="tanh"))
        return torch.addcmul(x_BLD, at_least_fp32(gate2) / keep_prob, self.drop(y_BLD, keys, 1))

    def attention(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        qkv_BLHSK = self.qkv(x_BLD).unflatten(-1, (self.num_heads, 3, -1))
        q_BLHK, k_BLHK = rotate(qkv_BLHSK[..., :2, :], rotation).unbind(-2)
        return self.attn_out(kernels.attention(q_BLHK, k_BLHK, qkv_BLHSK[..., 2, :]).flatten(2))

    def drop(self, y_BLD: Tensor, keys: Tensor | None, site: int) -> Tensor:
        """Counter-based dropout: which elements fall is a function of the sample's key, not of a generator."""
        y_BLD = at_least_fp32(y_BLD)
        if keys is None:
            return y_BLD
        length = y_BLD.shape[1]
        position_L = torch.arange(length, dtype=torch.int32, device=y_BLD.device) + self.position_slice * length
        is_dropped_BLD = is_dropped(keys[site], position_L, y_BLD.shape[2], self.dropout)
        return y_BLD.masked_fill(is_dropped_BLD, 0.0)


class Linear(nn.Linear):
    """nn.Linear that takes any input dtype and computes in the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class Norm(nn.Module):
    """LayerNorm with a weight only, followed by x * (1 + scale) + shift; at least float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x_BLD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
        weight_D, shift_B1D, scale_B1D = (at_least_fp32(p) for p in (self.weight, shift_B1D, scale_B1D))
        if len(shift_B1D) == 1:  # one modulation for all samples is an ordinary LayerNorm
            scaled_D = weight_D * (1 + scale_B1D[0, 0])
            return F.layer_norm(x_BLD, weight_D.shape, scaled_D, shift_B1D[0, 0], eps=1e-5)
        return torch.addcmul(shift_B1D, F.layer_norm(x_BLD, weight_D.shape, weight_D, eps=1e-5), 1 + scale_B1D)


def keep_products() -> Any:
    """For selective recomputation: the outputs of matrix products and of attention stay, the cheap rest is repeated."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        costly = any(part in str(op) for part in ("mm", "linear", "attention", "attn"))
        return CheckpointPolicy.MUST_SAVE if costly else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def at_least_fp32(x: Tensor) -> Tensor:
    """Half precision becomes float32; float32 and float64 stay."""
    return x.to(torch.float32) if x.dtype in kernels.HALF else x


def sinusoid(sigma_B: Tensor) -> Tensor:
    """Cosines, then sines, of sigma at geometric frequencies, (B, 256)."""
    half = SINUSOID_WIDTH // 2
    exponent = torch.arange(half, dtype=sigma_B.dtype, device=sigma_B.device) / half
    angle_BF = sigma_B[:, None] * torch.exp(-math.log(10_000) * exponent)
    return torch.cat([angle_BF.cos(), angle_BF.sin()], dim=1)


def rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * 10000^(-2i/K), each (L, K/2) float64."""
    exponent = torch.arange(0, head_width, 2, dtype=torch.float64, device=device) / head_width
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * 10_000.0**-exponent
    return angle.cos(), angle.sin()


class _Rotate(torch.autograd.Function):
    """Half the memory traffic of the same formula left to autograd: the gradient is the rotation back."""

    @staticmethod
    def forward(ctx: Any, x_BLHSK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        turned = torch.empty(x_BLHSK.shape, dtype=cos.dtype, device=x_BLHSK.device)
        first, second = at_least_fp32(x_BLHSK).chunk(2, dim=-1)
        first_out, second_out = turned.chunk(2, dim=-1)
        torch.mul(first, cos, out=first_out).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=second_out).addcmul_(first, sin)
        return turned.to(x_BLHSK.dtype)

    @staticmethod
    def backward(ctx: Any, d_turned: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(d_turned, cos, -sin), None, None


def rotate(x_BLHSK: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding: the first half of a head's channels is turned with the second, by an angle per position."""
    wide = torch.float32 if x_BLHSK.dtype in kernels.HALF else x_BLHSK.dtype
    cos, sin = (r.to(wide)[:, None, None] for r in rotation)
    if torch.compiler.is_compiling():  # the compiler fuses the formula, and does not take the in-place version
        first, second = at_least_fp32(x_BLHSK).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x_BLHSK.dtype)
    return _Rotate.apply(x_BLHSK, cos, sin)


def faults(config: ModelConfig) -> list[str]:
    """What is wrong with the model section."""
    found = outside("model", config, ("hidden_size", "num_layers", "num_heads", "cond_size"))
    found += outside("model", config, ("dropout",), lambda p: 0 <= p < 1, "lie in [0, 1)")
    if found:
        return found
    width, heads = config.hidden_size, config.num_heads
    if width % heads or width // heads % 2:
        fitting = [h for h in range(1, width + 1) if width % h == 0 and width // h % 2 == 0]
        near = ", ".join(map(str, sorted(sorted(fitting, key=lambda h: abs(h - heads))[:3])))
        fault = "does not divide" if width % heads else f"gives an odd head width, {width // heads}, with"
        advice = f"Nearest that work: {near}." if near else "The width must be even: the rotary embedding turns pairs."
        found.append(f"model.num_heads={heads} {fault} model.hidden_size={width}. {advice}")
    return found
