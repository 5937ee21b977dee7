"""A masked diffusion language model (MDLM, arXiv 2406.07524) in one file that needs only torch and transformers.

It is copied into every folder that tools/convert_ckpt.py exports, and runs there alone. Parameters have the names of
the original checkpoints, and `forward` returns raw logits as the original does: the column of the mask token among
them, which was never trained and means nothing. `labels` and `generate` leave it out: the mask is never an answer.

B sequences, L positions, D width, H heads, G heads of keys and values (groups of heads), K head width, S parts of a
group, F width inside the MLP, V vocabulary, C conditioning width, M masked rows.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

SINUSOID_WIDTH = 256
HALF = (torch.bfloat16, torch.float16)
EPS = 1e-5  # of the norms


class MdlmConfig(PretrainedConfig):
    model_type = "mdlm_scale"

    def __init__(
        self,
        vocab_size: int = 50258,
        model_length: int = 1024,
        hidden_dim: int = 768,
        cond_dim: int = 128,
        n_blocks: int = 12,
        n_heads: int = 12,
        dropout: float = 0.1,
        time_conditioning: bool = False,
        block: str = "paper",  # or "modern": RMSNorm, SwiGLU, normed queries and keys, grouped-query attention
        n_kv_heads: int | None = None,  # modern: heads of keys and values; n_heads by default
        mask_token_id: int | None = None,  # the last id by default
        schedule: dict[str, Any] | None = None,  # name, e, sigma_min, sigma_max; loglinear with e = 1e-3 by default
        mdlm_scale: dict[str, Any] | None = None,  # where the weights come from; nothing here reads it
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        self.vocab_size = vocab_size
        self.model_length = model_length
        self.hidden_dim = hidden_dim
        self.cond_dim = cond_dim
        self.n_blocks = n_blocks
        self.n_heads = n_heads
        self.dropout = dropout
        self.time_conditioning = time_conditioning
        self.block = block
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.mask_token_id = vocab_size - 1 if mask_token_id is None else mask_token_id
        self.schedule = schedule or {"name": "loglinear", "e": 1e-3}
        self.mdlm_scale = mdlm_scale


class MdlmForMaskedLM(PreTrainedModel):
    config_class = MdlmConfig
    base_model_prefix = "mdlm"
    _keys_to_ignore_on_load_unexpected = [r"backbone\.rotary_emb\.inv_freq"]  # noqa: RUF012 - computed here, in float64

    def __init__(self, config: MdlmConfig) -> None:
        super().__init__(config)
        self.backbone = Backbone(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        timesteps: Tensor | None = None,
        labels: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Raw logits (B, L, V), and with `labels` the mean cross entropy where they are not -100.

        `timesteps` (B,) is sigma = -log P(readable); needed with time conditioning, without effect otherwise.
        `attention_mask` has no effect: in training every position reads every other, padding too.
        """
        logits_BLV = self.backbone.output_layer.linear(self.backbone.hidden(input_ids, timesteps))
        loss: Any = None
        if labels is not None:
            answer_BLV = without_mask(logits_BLV, self.config.mask_token_id)
            loss = F.cross_entropy(answer_BLV.flatten(0, 1), labels.flatten().to(logits_BLV.device), ignore_index=-100)
        if return_dict is False:
            return (logits_BLV,) if loss is None else (loss, logits_BLV)
        return MaskedLMOutput(loss=loss, logits=logits_BLV)

    @torch.inference_mode()
    def generate(
        self,
        input_ids: Tensor | None = None,
        *,
        length: int | None = None,
        num_samples: int = 1,
        num_steps: int = 128,
        sampler: str = "ancestral",
        seed: int | None = None,
    ) -> Tensor:
        """Token ids (num_samples * B, length), without the mask; `length` is that of the training rows by default.

        `input_ids` (B, P) is a prompt, or text with mask tokens in it: what is readable stays, all else is filled in.
        `ancestral` goes from t = 1 to 0 in `num_steps` steps; `first_hitting` makes one token at a time, each at the
        exact time of its unmasking (arXiv 2409.02908). Tokens are drawn in float64: in float32 the tail of a large
        vocabulary is cut off. With a `seed` the result is the same on every device, up to the rounding of logits.
        """
        length = self.config.model_length if length is None else length
        mask_id = self.config.mask_token_id
        prompt = torch.empty((1, 0), dtype=torch.long) if input_ids is None else input_ids
        faults = [f"num_samples={num_samples} must be at least 1."] if num_samples < 1 else []
        if prompt.dim() != 2 or prompt.shape[1] > length:
            faults.append(f"input_ids of shape {tuple(prompt.shape)} must be (B, P) with P <= length={length}.")
        if sampler not in ("ancestral", "first_hitting"):
            faults.append(f"sampler={sampler!r} must be ancestral or first_hitting.")
        if num_steps < 1:
            faults.append(f"num_steps={num_steps} must be at least 1.")
        if faults:
            raise ValueError(" ".join(faults))
        z_BL = F.pad(prompt.to(self.device), (0, length - prompt.shape[1]), value=mask_id)
        z_BL = z_BL.repeat_interleave(num_samples, dim=0)
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        was_training = self.training
        self.eval()
        if sampler == "ancestral":
            self._ancestral(z_BL, num_steps, generator)
        else:
            self._first_hitting(z_BL, generator)
        self.train(was_training)
        return z_BL

    def _ancestral(self, z_BL: Tensor, num_steps: int, generator: torch.Generator) -> None:
        """In place. Which tokens are unmasked does not depend on what they become, so it is decided first."""
        for step in range(num_steps, 0, -1):
            mask_prob_t, mask_prob_s = (mask_prob(self.config.schedule, t / num_steps) for t in (step, step - 1))
            # nothing may stay masked at the end, also where a schedule has masks left at t = 0
            stay = 0.0 if step == 1 else mask_prob_s / mask_prob_t
            is_drawn_BL = (z_BL == self.config.mask_token_id) & (_uniforms(z_BL, generator) >= stay)
            sigma_B = torch.full((len(z_BL),), sigma(self.config.schedule, step / num_steps), dtype=torch.float64)
            self._draw(z_BL, is_drawn_BL, sigma_B, generator)

    def _first_hitting(self, z_BL: Tensor, generator: torch.Generator) -> None:
        """In place. With n masks left at mask probability p, the next one falls at p * u^(1/n), u uniform."""
        mask_id = self.config.mask_token_id
        p_B = torch.full((len(z_BL),), mask_prob(self.config.schedule, 1.0), dtype=torch.float64)
        while (is_masked_BL := z_BL == mask_id).any():
            n_B = is_masked_BL.sum(1).cpu()
            u_B = torch.rand(len(z_BL), dtype=torch.float64, generator=generator)
            p_B = torch.where(n_B > 0, p_B * u_B ** (1 / n_B.clamp(min=1)), p_B)
            score_BL = _uniforms(z_BL, generator).masked_fill(~is_masked_BL, -1.0)
            first_BL = F.one_hot(score_BL.argmax(1), z_BL.shape[1]).bool()  # any masked position, equally likely
            self._draw(z_BL, first_BL & is_masked_BL, -torch.log1p(-p_B), generator)

    def _draw(self, z_BL: Tensor, is_drawn_BL: Tensor, sigma_B: Tensor, generator: torch.Generator) -> None:
        """Replace these tokens by draws from the network; only rows in which one is drawn are computed."""
        row_B = torch.nonzero(is_drawn_BL.any(1)).squeeze(1)
        if len(row_B) == 0:
            return
        hidden_BLD = self.backbone.hidden(z_BL[row_B], sigma_B.to(z_BL.device)[row_B])
        logits_MV = self.backbone.output_layer.linear(hidden_BLD[is_drawn_BL[row_B]])
        cdf_MV = torch.softmax(without_mask(logits_MV.double(), self.config.mask_token_id), dim=1).cumsum(dim=1)
        total_M = cdf_MV[:, -1]
        if not total_M.isfinite().all():
            raise ValueError("The network gives no numbers (NaN): weights like these have nothing to say.")
        u_M = torch.rand(len(cdf_MV), dtype=torch.float64, generator=generator).to(z_BL.device)
        # below the total, or the search would run past the last token that has any probability
        point_M = torch.minimum(u_M * total_M, torch.nextafter(total_M, torch.zeros_like(total_M)))
        z_BL[is_drawn_BL] = torch.searchsorted(cdf_MV, point_M[:, None], right=True).squeeze(1)

    def _init_weights(self, module: nn.Module) -> None:
        """The constructors below do that."""


class Backbone(nn.Module):
    def __init__(self, config: MdlmConfig) -> None:
        super().__init__()
        self.config = config
        self.vocab_embed = Embedding(config.vocab_size, config.hidden_dim)
        self.sigma_map = SigmaMap(config.cond_dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_blocks))
        self.output_layer = OutputLayer(config)

    def hidden(self, z_BL: Tensor, sigma_B: Tensor | None) -> Tensor:
        """What the vocabulary projection reads, (B, L, D); the residual stream is at least float32."""
        if not self.config.time_conditioning:
            sigma_B = torch.zeros(1, device=z_BL.device)  # one condition for all samples
        elif sigma_B is None:
            raise ValueError("This model has time conditioning: `timesteps` (sigma, one a sample) is needed.")
        c_BC = F.silu(self.sigma_map(sigma_B.to(z_BL.device)))
        rotation = rotary_angles(z_BL.shape[1], self.config.hidden_dim // self.config.n_heads, z_BL.device)
        x_BLD = at_least_fp32(F.embedding(z_BL, self.vocab_embed.embedding))
        for block in self.blocks:
            x_BLD = block(x_BLD, c_BC, rotation)
        shift, scale = self.output_layer.adaLN_modulation(c_BC)[:, None].chunk(2, dim=-1)
        return self.output_layer.norm_final(x_BLD, shift, scale)


class Block(nn.Module):
    """x + gate * dropout(attention(norm(x))), then the same with an MLP; shifts, scales and gates come from c."""

    def __init__(self, config: MdlmConfig) -> None:
        super().__init__()
        width, self.is_modern = config.hidden_dim, config.block == "modern"
        self.num_heads, self.num_kv_heads, self.dropout = config.n_heads, config.n_kv_heads, config.dropout
        head_width = width // self.num_heads
        self.norm1 = Norm(width, self.is_modern)
        # rows ordered ([q, k, v], head, head width); modern: (group of heads, [its q's, k, v], head width)
        self.attn_qkv = Linear(width, (self.num_heads + 2 * self.num_kv_heads) * head_width, bias=False)
        if self.is_modern:
            self.norm_qk = HeadNorm((self.num_heads + self.num_kv_heads) * head_width)
        self.attn_out = Linear(width, width, bias=False)
        self.norm2 = Norm(width, self.is_modern)
        if self.is_modern:
            inside = -(-8 * width // (3 * 256)) * 256
            self.mlp = nn.Sequential(Linear(width, 2 * inside, bias=False), SwiGlu(), Linear(inside, width, bias=False))
        else:
            self.mlp = nn.Sequential(Linear(width, 4 * width), nn.GELU(approximate="tanh"), Linear(4 * width, width))
        self.adaLN_modulation = Linear(config.cond_dim, 6 * width)

    def forward(self, x_BLD: Tensor, c_BC: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c_BC)[:, None].chunk(6, dim=-1)
        y_BLD = self.attention(self.norm1(x_BLD, shift1, scale1), rotation)
        x_BLD = torch.addcmul(x_BLD, at_least_fp32(gate1), at_least_fp32(self.drop(y_BLD)))
        y_BLD = self.mlp(self.norm2(x_BLD, shift2, scale2))
        return torch.addcmul(x_BLD, at_least_fp32(gate2), at_least_fp32(self.drop(y_BLD)))

    def attention(self, x_BLD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.attn_qkv(x_BLD)
        if self.is_modern:
            qkv_BLGSK = qkv.unflatten(-1, (self.num_kv_heads, -1, self.attn_out.in_features // self.num_heads))
            qk_BLGSK, v = self.norm_qk(qkv_BLGSK[..., :-1, :]), qkv_BLGSK[..., -1, :]
            q, k = qk_BLGSK[..., :-1, :].flatten(2, 3), qk_BLGSK[..., -1, :]
        else:
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, rotation), rotate(k, rotation), v))
        y_BHLK = F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] < q.shape[1])
        return self.attn_out(y_BHLK.transpose(1, 2).flatten(2))

    def drop(self, y_BLD: Tensor) -> Tensor:
        return F.dropout(y_BLD, self.dropout, self.training)


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, width).uniform_(-(width**-0.5), width**-0.5))


class SigmaMap(nn.Module):
    """An MLP over cosines, then sines, of sigma at geometric frequencies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(Linear(SINUSOID_WIDTH, width), nn.SiLU(), Linear(width, width))

    def forward(self, sigma_B: Tensor) -> Tensor:
        half = SINUSOID_WIDTH // 2
        exponent = torch.arange(half, dtype=torch.float64, device=sigma_B.device) / half
        angle_BF = sigma_B.double()[:, None] * torch.exp(-math.log(10_000) * exponent)
        return self.mlp(torch.cat([angle_BF.cos(), angle_BF.sin()], dim=1))


class OutputLayer(nn.Module):
    def __init__(self, config: MdlmConfig) -> None:
        super().__init__()
        self.norm_final = Norm(config.hidden_dim, config.block == "modern")
        self.linear = Linear(config.hidden_dim, config.vocab_size)
        self.adaLN_modulation = Linear(config.cond_dim, 2 * config.hidden_dim)


class Linear(nn.Linear):
    """nn.Linear that takes any input dtype and computes in the weight's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class SwiGlu(nn.Module):
    """silu(gate) * up of neighbouring columns, at least float32."""

    def forward(self, y_BLF: Tensor) -> Tensor:
        gate, up = at_least_fp32(y_BLF).unflatten(-1, (-1, 2)).unbind(-1)
        return (F.silu(gate) * up).to(y_BLF.dtype)


class HeadNorm(nn.Module):
    """RMSNorm of each head of queries and keys, with a weight for each of its channels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, qk_BLGSK: Tensor) -> Tensor:
        return F.rms_norm(qk_BLGSK, qk_BLGSK.shape[-1:], eps=EPS) * self.weight.view(qk_BLGSK.shape[2:])


class Norm(nn.Module):
    """LayerNorm (modern: RMSNorm) with a weight only, followed by x * (1 + scale) + shift; at least float32."""

    def __init__(self, width: int, is_modern: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.is_modern = is_modern

    def forward(self, x_BLD: Tensor, shift_B1D: Tensor, scale_B1D: Tensor) -> Tensor:
        weight_D, shift_B1D, scale_B1D = (at_least_fp32(p) for p in (self.weight, shift_B1D, scale_B1D))
        normed = F.rms_norm if self.is_modern else F.layer_norm
        return torch.addcmul(shift_B1D, normed(x_BLD, weight_D.shape, weight_D, eps=EPS), 1 + scale_B1D)


def at_least_fp32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


def rotary_angles(length: int, head_width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of position * 10000^(-2i/K), each (L, 1, K/2) float64."""
    exponent = torch.arange(0, head_width, 2, dtype=torch.float64, device=device) / head_width
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None, None] * 10_000.0**-exponent
    return angle.cos(), angle.sin()


def rotate(x_BLHK: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """The first half of a head's channels is turned with the second, by an angle per position."""
    first, second = at_least_fp32(x_BLHK).chunk(2, dim=-1)
    cos, sin = (r.to(first.dtype) for r in rotation)
    turned = torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)
    return torch.cat(turned, dim=-1).to(x_BLHK.dtype)


def without_mask(logits_V: Tensor, mask_id: int) -> Tensor:
    """Logits, at least float32, with no probability for the mask."""
    is_mask_V = torch.arange(logits_V.shape[-1], device=logits_V.device) == mask_id
    return at_least_fp32(logits_V).masked_fill(is_mask_V, -torch.inf)


def mask_prob(schedule: dict[str, Any], t: float) -> float:
    """P(masked) at time t."""
    e = schedule.get("e", 0.0)
    match schedule["name"]:
        case "loglinear":
            return (1 - e) * t
        case "cosine":
            return 2 * (1 - e) * math.sin(math.pi / 4 * t) ** 2
        case "cosine_squared":
            return (1 - e) * math.sin(math.pi / 2 * t) ** 2
        case _:
            return -math.expm1(-sigma(schedule, t))


def sigma(schedule: dict[str, Any], t: float) -> float:
    """-log P(readable) at time t."""
    low, high = schedule.get("sigma_min", 0.0), schedule.get("sigma_max", 0.0)
    match schedule["name"]:
        case "linear":
            return low + t * (high - low)
        case "geometric":
            return low ** (1 - t) * high**t
        case _:
            p = mask_prob(schedule, t)
            return -math.log1p(-p) if p < 1 else math.inf


def _uniforms(z_BL: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(z_BL.shape, dtype=torch.float64, generator=generator).to(z_BL.device)
