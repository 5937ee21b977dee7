"""The network against a plain formula of the whole of it, and the switches that must not change what it computes.

Weights are random everywhere: with adaLN-zero's initial zeros only the head would have a gradient.
B sequences, L positions, D width, H heads, K head width, V vocabulary, M masked rows.
"""

import math
import os
import shutil
from dataclasses import replace

import pytest
import torch
import torch._functorch.config
from torch import Tensor

from mdlm_scale.config import BlockName, DiffusionConfig, ModelConfig, Recompute
from mdlm_scale.diffusion.corrupt import Batch, corrupted
from mdlm_scale.diffusion.noise import is_dropped, times
from mdlm_scale.diffusion.schedule import from_config
from mdlm_scale.model import dit
from mdlm_scale.model.dit import Block, DiT, Norm
from mdlm_scale.model.init import fills, init_range

VOCAB, MASK, LENGTH, BATCH = 13, 6, 10, 4
CONFIG = ModelConfig(hidden_size=24, num_layers=2, num_heads=3, cond_size=5, dropout=0.25, time_conditioning=True)
MODERN = replace(CONFIG, block=BlockName.modern, num_heads=6, num_kv_heads=2)


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> DiT:
    """Every parameter random and of order one after its matrix product, none at its initial zero."""
    generator = torch.Generator().manual_seed(0)
    model = DiT(config, VOCAB, MASK).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.3 * noise if "norm" in name else noise / math.sqrt(p.shape[-1] if p.dim() == 2 else 10))
    return model


def make_batch(dropout_sites: int = 0, slots: range = range(BATCH), is_token: bool = True) -> Batch:
    """These slots of a step; the second row is padded, if any token is real."""
    generator = torch.Generator().manual_seed(1)
    x_BL = torch.randint(VOCAB - 1, (BATCH, LENGTH), generator=generator)
    x_BL += x_BL >= MASK  # clean rows hold no mask token
    is_token_BL = torch.full((BATCH, LENGTH), is_token)
    is_token_BL[1, 6:] = False
    config, rows = DiffusionConfig(), slice(slots.start, slots.stop)
    return corrupted(
        x_BL[rows],
        is_token_BL[rows],
        times(config, 0, 3, BATCH)[rows],
        config=config,
        schedule=from_config(config),
        seed=0,
        step=3,
        slots=slots,
        mask_id=MASK,
        vocab_size=VOCAB,
        dropout_sites=dropout_sites,
    )


def loss_and_gradients(model: DiT, *batches: Batch) -> dict[str, Tensor]:
    """The loss summed over micro-batches, and every gradient, by name."""
    model.zero_grad()
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        nelbo_sum, _ = model(batch)
        nelbo_sum.backward()
        loss += nelbo_sum.detach()
    return {"loss": loss} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of its largest element."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        error = (actual[name].double() - value.double()).abs().max() / value.double().abs().max()
        assert error <= tolerance, f"{name}: relative difference {error:.1e}"


def plain_loss(p: dict[str, Tensor], config: ModelConfig, batch: Batch) -> Tensor:
    """The whole network and its loss, written from the paper's description, with nothing fused and every row scored."""
    is_modern = config.block is BlockName.modern

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x if is_modern else x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def powers(n: int) -> Tensor:
        return torch.tensor([10_000 ** (-i / n) for i in range(n)], dtype=torch.float64)

    def rotary(x_BLHK: Tensor) -> Tensor:
        real, imaginary = x_BLHK.tensor_split(2, dim=-1)
        frequency = torch.tensor(
            [10_000 ** (-2 * i / x_BLHK.shape[-1]) for i in range(real.shape[-1])], dtype=torch.float64
        )
        angle = torch.arange(LENGTH)[:, None, None] * frequency
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)

    def dropped(y_BLD: Tensor, site: int) -> Tensor:
        if batch.dropout_keys is None:
            return y_BLD
        fallen = is_dropped(batch.dropout_keys[site], torch.arange(LENGTH), y_BLD.shape[-1], config.dropout)
        return torch.where(fallen, 0.0, y_BLD / (1 - config.dropout))

    def linear(x: Tensor, name: str) -> Tensor:
        return torch.einsum("...i,oi->...o", x, p[f"{name}.weight"]) + p.get(f"{name}.bias", 0.0)

    sigma_B = batch.sigma_B if config.time_conditioning else torch.zeros(len(batch.x_BL), dtype=torch.float64)
    angle = sigma_B[:, None] * powers(128)
    c = torch.cat([angle.cos(), angle.sin()], dim=1)
    for name in ("time_in", "time_out"):
        c = linear(c, name)
        c = c * torch.sigmoid(c)
    x = p["embed.weight"][batch.z_BL]
    for i in range(config.num_layers):
        b = f"blocks.{i}."
        modulation = linear(c, b + "modulation").view(len(c), 6, 1, -1).unbind(1)
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = modulation
        y = norm(x, p[b + "norm1.weight"]) * (1 + scale_attn) + shift_attn
        groups = config.num_kv_heads or config.num_heads
        heads = config.num_heads // groups  # of a group
        qkv = linear(y, b + "qkv").view(len(x), LENGTH, groups, heads + 2, -1)
        if is_modern:
            weight = p[b + "norm_qk.weight"].view(groups, heads + 1, -1)
            qkv = torch.cat([norm(qkv[..., :-1, :], weight), qkv[..., -1:, :]], dim=3)
        each = [(g, h) for g in range(groups) for h in range(heads)]
        q = rotary(torch.stack([qkv[:, :, g, h] for g, h in each], dim=2))
        k = rotary(torch.stack([qkv[:, :, g, -2] for g, _ in each], dim=2))
        v = torch.stack([qkv[:, :, g, -1] for g, _ in each], dim=2)
        attention = torch.softmax(torch.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1]), dim=-1)
        y = linear(torch.einsum("bhqs,bshk->bqhk", attention, v).flatten(2), b + "attn_out")
        x = x + gate_attn * dropped(y, 2 * i)
        y = norm(x, p[b + "norm2.weight"]) * (1 + scale_mlp) + shift_mlp
        y = linear(y, b + "mlp_in")
        y = y[..., ::2] * torch.sigmoid(y[..., ::2]) * y[..., 1::2] if is_modern else gelu(y)
        y = linear(y, b + "mlp_out")
        x = x + gate_mlp * dropped(y, 2 * i + 1)
    shift, scale = linear(c, "modulation").view(len(c), 2, 1, -1).unbind(1)
    logits_BLV = linear(norm(x, p["norm.weight"]) * (1 + scale) + shift, "head")
    answers = [v for v in range(VOCAB) if v != MASK]
    nll_BL = logits_BLV[..., answers].logsumexp(-1) - logits_BLV.gather(-1, batch.x_BL[..., None])[..., 0]
    is_scored_BL = (batch.z_BL == MASK) & batch.is_token_BL
    return (nll_BL * is_scored_BL / batch.t_B[:, None]).sum()  # the weight of the loglinear schedule is 1/t


@pytest.mark.parametrize("dropout_sites", [0, 4], ids=["no dropout", "dropout"])
@pytest.mark.parametrize("time_conditioning", [False, True])
@pytest.mark.parametrize("base", [CONFIG, MODERN, replace(MODERN, num_kv_heads=None)], ids=["paper", "modern", "heads"])
def test_loss_and_gradients_match_a_plain_formula(
    base: ModelConfig, time_conditioning: bool, dropout_sites: int
) -> None:
    config = replace(base, time_conditioning=time_conditioning)
    model, batch = random_model(config), make_batch(dropout_sites)
    p = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = plain_loss(p, config, batch)
    gradients = torch.autograd.grad(loss, list(p.values()))
    expected = {"loss": loss.detach()} | dict(zip(p, gradients, strict=True))
    assert_all_close(loss_and_gradients(model, batch), expected, 1e-12)  # float64 sums of at most thousands of terms


def test_padding_is_read_but_not_scored() -> None:
    batch = make_batch()
    assert set(batch.rows_M.tolist()).isdisjoint(torch.nonzero(~batch.is_token_BL.flatten()).squeeze(1).tolist())
    model, row = random_model(CONFIG), torch.tensor([LENGTH])  # the first position of the padded row
    z_BL = batch.z_BL.clone()
    z_BL[1, -1] = (z_BL[1, -1] + 1) % VOCAB
    before, after = (model.logits(z, batch.sigma_B, row) for z in (batch.z_BL, z_BL))
    assert not torch.equal(before, after)


def test_dropout_sites() -> None:
    assert [DiT(replace(CONFIG, dropout=d), VOCAB, MASK).num_dropout_sites for d in (0.0, 0.25)] == [0, 4]


def init_model(model: DiT, seed: int) -> None:
    rules = fills(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(init_range(seed, name, rules[name], 0, p.numel()).view(p.shape))


def test_a_fresh_model_gives_zero_logits() -> None:
    model, batch = DiT(CONFIG, VOCAB, MASK), make_batch()
    init_model(model, seed=0)
    logits_MV = model.logits(batch.z_BL, batch.sigma_B.float(), torch.arange(BATCH * LENGTH))
    assert torch.equal(logits_MV, torch.zeros(BATCH * LENGTH, VOCAB))


def test_a_fresh_model_holds_every_token_equally_likely() -> None:
    model, batch = DiT(CONFIG, VOCAB, MASK).double(), make_batch()
    init_model(model, seed=0)
    nll_M = model(batch)[1]
    torch.testing.assert_close(nll_M, torch.full_like(nll_M, math.log(VOCAB - 1)), rtol=1e-15, atol=0)  # one logarithm


@pytest.mark.parametrize("time_conditioning", [False, True])
def test_sigma_matters_with_time_conditioning_only(time_conditioning: bool) -> None:
    model, batch = random_model(replace(CONFIG, time_conditioning=time_conditioning)), make_batch()
    logits = [model.logits(batch.z_BL, sigma_B, batch.rows_M) for sigma_B in (batch.sigma_B, 2 * batch.sigma_B + 1)]
    assert torch.equal(*logits) is not time_conditioning


def test_logits_at_some_rows_are_those_of_all_rows() -> None:
    model, batch = random_model(CONFIG), make_batch()
    every = model.logits(batch.z_BL, batch.sigma_B, torch.arange(BATCH * LENGTH))
    some = model.logits(batch.z_BL, batch.sigma_B, batch.rows_M)
    torch.testing.assert_close(some, every[batch.rows_M], rtol=0, atol=1e-13)  # another blocking of the same product


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_recompute_changes_no_bit(dtype: torch.dtype) -> None:
    model, batch = random_model(CONFIG, dtype), make_batch(dropout_sites=4)
    kept = loss_and_gradients(model, batch)
    model.recompute = Recompute.full
    again = loss_and_gradients(model, batch)
    assert all(torch.equal(again[name], value) for name, value in kept.items())


def test_a_block_compiles_as_one_graph() -> None:
    model, batch = random_model(CONFIG, torch.float32), make_batch(dropout_sites=4)
    inputs: list[tuple[Tensor, ...]] = []
    model.blocks[0].register_forward_hook(lambda _module, args, _output: inputs.append(args))
    model(batch)
    explained = torch._dynamo.explain(Block.forward)(model.blocks[0], *inputs[0])
    assert [str(b.reason) for b in explained.break_reasons] == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
def test_compiled_blocks_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    # torch 2.13 stores graphs that return views wrongly, and reading them back may end the process
    monkeypatch.setattr(torch._functorch.config, "enable_autograd_cache", False)
    config = replace(CONFIG, num_layers=1)  # one block, one compilation
    model, batch = random_model(config, torch.float32), make_batch(dropout_sites=2)
    eager = loss_and_gradients(model, batch)
    for block in model.blocks:
        block.compile()
    # float32 sums of some hundred terms in another order; one element dropped otherwise would show as 1e-3 or more
    assert_all_close(loss_and_gradients(model, batch), eager, 1e-5)


def test_bf16_weights_keep_a_float32_residual_stream() -> None:
    model, batch = random_model(CONFIG, torch.bfloat16), make_batch()
    streams: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, inputs, output: streams.extend([inputs[0], output]))
    model(batch)
    assert [x.dtype for x in streams] == [torch.float32] * 4


def test_bf16_loss_is_close_to_float32() -> None:
    half, batch = random_model(CONFIG, torch.bfloat16), make_batch(dropout_sites=4)
    wide = DiT(CONFIG, VOCAB, MASK)
    wide.load_state_dict({name: p.float() for name, p in half.state_dict().items()})  # the same rounded weights
    # bf16 rounds to 2^-9, and some ten matrix products follow each other; a sum over rows averages the errors
    torch.testing.assert_close(half(batch)[0], wide(batch)[0], rtol=2**-6, atol=0)


@pytest.mark.parametrize("num_modulations", [1, 2])
def test_norm_computes_in_float32_from_bf16_modulation(num_modulations: int) -> None:
    generator = torch.Generator().manual_seed(2)
    norm, x_BLD = Norm(64, BlockName.paper).bfloat16(), torch.randn(2, 3, 64, generator=generator)
    torch.nn.init.ones_(norm.weight)
    shift, scale = 0.1 * torch.randn(2, num_modulations, 1, 64, generator=generator).bfloat16()
    expected = torch.nn.functional.layer_norm(x_BLD.double(), (64,)) * (1 + scale.double()) + shift.double()
    # float32: a dozen roundings of numbers below 4; bf16 anywhere on the way would be off by 1e-2
    torch.testing.assert_close(norm(x_BLD, shift, scale).double(), expected, rtol=0, atol=4e-6)


@pytest.mark.parametrize("dropout_sites", [0, 4], ids=["no dropout", "dropout"])
def test_a_batch_without_masked_rows_gives_zero_loss_and_gradients(dropout_sites: int) -> None:
    model, batch = random_model(CONFIG), make_batch(dropout_sites, is_token=False)
    assert len(batch.rows_M) == 0
    results = loss_and_gradients(model, batch)
    assert set(results) == {"loss"} | {name for name, _ in model.named_parameters()}
    assert all(torch.equal(value, torch.zeros_like(value)) for value in results.values())


@pytest.mark.parametrize("cut", [1, 2])
@pytest.mark.parametrize("time_conditioning", [False, True])
def test_micro_batches_add_up_to_the_batch(time_conditioning: bool, cut: int) -> None:
    model = random_model(replace(CONFIG, time_conditioning=time_conditioning))
    whole = loss_and_gradients(model, make_batch(4))
    parts = loss_and_gradients(model, make_batch(4, range(cut)), make_batch(4, range(cut, BATCH)))
    assert_all_close(parts, whole, 1e-12)  # the same float64 terms, added in another order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"hidden_size": 0}, "model.hidden_size=0 must be at least 1."),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1."),
        ({"num_heads": 0}, "model.num_heads=0 must be at least 1."),
        ({"cond_size": 0}, "model.cond_size=0 must be at least 1."),
        ({"dropout": 1.0}, "model.dropout=1.0 must lie in [0, 1)."),
        ({"dropout": -0.1}, "model.dropout=-0.1 must lie in [0, 1)."),
        ({"num_heads": 5}, "model.num_heads=5 does not divide model.hidden_size=24. Nearest that work: 3, 4, 6."),
        (
            {"num_heads": 24},
            "model.num_heads=24 gives an odd head width, 1, with model.hidden_size=24. Nearest that work: 4, 6, 12.",
        ),
        (
            {"hidden_size": 7, "num_heads": 2},
            "model.num_heads=2 does not divide model.hidden_size=7. "
            "The width must be even: the rotary embedding turns pairs.",
        ),
    ],
)
def test_faults(change: dict[str, float], message: str | None) -> None:
    assert dit.faults(replace(CONFIG, **change)) == ([message] if message else [])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, num_kv_heads=3), "model.num_kv_heads=3 is a setting of model.block=modern, not of paper."),
        (
            replace(MODERN, num_kv_heads=4),
            "model.num_kv_heads=4 does not divide model.num_heads=6. These do: 1, 2, 3, 6.",
        ),
        (
            replace(MODERN, num_kv_heads=0),
            "model.num_kv_heads=0 does not divide model.num_heads=6. These do: 1, 2, 3, 6.",
        ),
    ],
)
def test_faults_of_grouped_heads(config: ModelConfig, message: str) -> None:
    assert dit.faults(config) == [message]


def test_a_modern_mlp_keeps_only_its_input() -> None:
    """Of the product before it, one tensor, though the formula has five."""
    y = torch.linspace(-3, 3, 80, dtype=torch.float64).view(2, 2, 20).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        dit._SwiGlu.apply(y)
    assert [t.shape for t in kept] == [y.shape]
    assert torch.autograd.gradcheck(dit._SwiGlu.apply, y)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)], ids=str)
def test_a_modern_norm_keeps_its_inputs_and_a_number_a_row(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        found = dit._RmsNorm.apply(x, weight)
    assert [t.numel() for t in kept] == [x.numel(), weight.numel(), 12]
    expected = torch.nn.functional.rms_norm(x, (5,), eps=dit.EPS) * weight
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)  # a few roundings of numbers of order one
    assert torch.autograd.gradcheck(dit._RmsNorm.apply, (x, weight))


@pytest.mark.parametrize(("width", "inside"), [(768, 2048), (1024, 2816), (2048, 5632), (3072, 8192), (4096, 11008)])
def test_a_modern_mlp_is_as_large_as_the_papers(width: int, inside: int) -> None:
    config = ModelConfig(hidden_size=width, block=BlockName.modern)
    assert dit.mlp_width(config) == inside
    assert 1.0 <= 3 * inside / (8 * width) < 1.04


def test_faults_are_reported_at_once() -> None:
    assert len(dit.faults(replace(CONFIG, hidden_size=0, num_layers=0, dropout=2.0))) == 3
