"""The network: a bidirectional transformer over partly masked tokens, modulated by the noise level (adaLN-zero).

The head and the loss are part of the forward pass, on masked rows only, so that no caller ever sees B x L x V logits
and so that an engine that shards parameters gathers them where they are used. The model knows no ranks. The residual
stream is at least float32; every Linear computes in the dtype of its weight.
B sequences, L positions, D width, H heads, G heads of keys and values (groups of heads), K head width, S parts of a
group, F width inside the MLP, V vocabulary, C conditioning width, M masked rows.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from mdlm_scale import kernels
from mdlm_scale.config import BlockName, ModelConfig, Recompute, outside
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.diffusion.noise import is_dropped
from mdlm_scale.model.head import Head

SITES = 2  # places a block drops activations at: after attention, after the MLP
SINUSOID_WIDTH = 256
EPS = 1e-5  # of the norms


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
        self.norm = Norm(width, config.block)
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
    """x + gate * dropout(attention(norm(x))), then the same with an MLP; shifts, scales and gates come from c.

    Rows of qkv are ordered (group of heads, [its q's, k, v], head width), those of a modern mlp_in (unit, [gate, up]):
    a slice of either is whole units, which tensor-parallel ranks deal out.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_heads = config.hidden_size, num_kv_heads(config)
        self.is_modern = config.block is BlockName.modern
        self.num_kv_heads = kv_heads
        self.dropout = config.dropout
        self.position_slice = 0  # which of equally long slices of the positions is here
        self.norm1 = Norm(width, config.block)
        head_width = width // config.num_heads
        self.qkv = Linear(width, (config.num_heads + 2 * kv_heads) * head_width, bias=False)
        if self.is_modern:
            self.norm_qk = HeadNorm((config.num_heads + kv_heads) * head_width)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = Norm(width, config.block)
        inside = mlp_width(config)
        self.mlp_in = Linear(width, 2 * inside if self.is_modern else inside, bias=not self.is_modern)
        self.mlp_out = Linear(inside, width, bias=not self.is_modern)
        self.modulation = Linear(config.cond_size, 6 * width)

    def forward(self, x_BLD: Tensor, c_BC: Tensor, rotation: tuple[Tensor, Tensor], keys: Tensor | None) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c_BC)[:, None].chunk(6, dim=-1)
        # dropout divides what it keeps by the probability to keep it: done on the gates, which are small
        keep_prob = 1.0 if keys is None else 1.0 - self.dropout
        y_BLD = self.attention(self.norm1(x_BLD, shift1, scale1), rotation)
        x_BLD = torch.addcmul(x_BLD, at_least_fp32(gate1) / keep_prob, self.drop(y_BLD, keys, 0))
        y_BLF = self.mlp_in(self.norm2(x_BLD, shift2, scale2))
        y_BLD = self.mlp_out(_SwiGlu.apply(y_BLF) if self.is_modern else F.gelu(y_BLF, approximate="tanh"))
        return torch.addcmul(x_BLD, at_least_fp32(gate2) / keep_prob, self.drop(y_BLD, keys, 1))

    def attention(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        qkv_BLGSK = self.qkv(x_BLD).unflatten(-1, (self.num_kv_heads, -1, 2 * rotation[0].shape[1]))
        qk_BLGSK, v_BLGK = qkv_BLGSK[..., :-1, :], qkv_BLGSK[..., -1, :]
        qk_BLGSK = rotate(self.norm_qk(qk_BLGSK) if self.is_modern else qk_BLGSK, rotation)
        q_BLHK, k_BLGK = qk_BLGSK[..., :-1, :].flatten(2, 3), qk_BLGSK[..., -1, :]
        return self.attn_out(kernels.attention(q_BLHK, k_BLGK, v_BLGK).flatten(2))

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
    """LayerNorm (modern: RMSNorm) with a weight only, followed by x * (1 + scale) + shift; at least float32."""

    def __init__(self, width: int, block: BlockName) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.block = block
        self.normed = rms_norm if block is BlockName.modern else layer_norm

    def forward(self, x_BLD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
        weight_D, shift_B1D, scale_B1D = (at_least_fp32(p) for p in (self.weight, shift_B1D, scale_B1D))
        if len(shift_B1D) == 1:  # one modulation for all samples is an ordinary LayerNorm
            return self.normed(x_BLD, weight_D * (1 + scale_B1D[0, 0]), shift_B1D[0, 0])
        return torch.addcmul(shift_B1D, self.normed(x_BLD, weight_D, None), 1 + scale_B1D)


class HeadNorm(nn.Module):
    """RMSNorm of each head of queries and keys, with a weight for each of its channels: products of queries and keys
    cannot grow with the weights, which keeps large models stable in half precision (arXiv 2302.05442)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, qk_BLGSK: Tensor) -> Tensor:
        weight_GSK = self.weight.view(qk_BLGSK.shape[2:])
        return F.rms_norm(qk_BLGSK, qk_BLGSK.shape[-1:], eps=EPS) * weight_GSK


def layer_norm(x_BLD: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
    return F.layer_norm(x_BLD, weight_D.shape, weight_D, bias_D, EPS)


def rms_norm(x_BLD: Tensor, weight_D: Tensor, bias_D: Tensor | None) -> Tensor:
    y_BLD = F.rms_norm(x_BLD, weight_D.shape, weight_D, EPS)
    return y_BLD if bias_D is None else y_BLD + bias_D


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


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up of neighbouring columns (arXiv 2002.05202). Only what comes in is kept for the backward pass:
    autograd would keep four tensors of the result's size more."""

    @staticmethod
    def forward(ctx: Any, y_BLF: Tensor) -> Tensor:
        ctx.save_for_backward(y_BLF)
        gate, up = at_least_fp32(y_BLF).unflatten(-1, (-1, 2)).unbind(-1)
        return (F.silu(gate) * up).to(y_BLF.dtype)

    @staticmethod
    def backward(ctx: Any, d_BLF: Tensor) -> Tensor:
        (y_BLF,) = ctx.saved_tensors
        gate, up = at_least_fp32(y_BLF).unflatten(-1, (-1, 2)).unbind(-1)
        share = torch.sigmoid(gate)
        d_up = d_BLF * gate * share
        d_gate = d_BLF * up * share * (1 + gate * (1 - share))
        return torch.stack([d_gate, d_up], dim=-1).flatten(-2).to(y_BLF.dtype)


def num_kv_heads(config: ModelConfig) -> int:
    """G, heads of keys and values."""
    return config.num_kv_heads or config.num_heads


def mlp_width(config: ModelConfig) -> int:
    """F; modern: 8/3 of the width, rounded up to what GPUs like, so that three matrices have the weights of two."""
    return -(-8 * config.hidden_size // (3 * 256)) * 256 if config.block is BlockName.modern else 4 * config.hidden_size


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
    kv_heads = config.num_kv_heads
    if kv_heads is not None and config.block is not BlockName.modern:
        found.append(f"model.num_kv_heads={kv_heads} is a setting of model.block=modern, not of {config.block}.")
    elif kv_heads is not None and (kv_heads < 1 or heads % kv_heads):
        divisors = ", ".join(str(g) for g in range(1, heads + 1) if heads % g == 0)
        found.append(f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}. These do: {divisors}.")
    return found
