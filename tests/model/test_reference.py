"""Parity with tensors that the original code produced (github.com/kuleshov-group/mdlm, float32, dropout off).

One case is kept in golden/; every case of the full file is compared where MDLM_REFERENCE names it. Our model runs in
float32 and, to show that nothing but rounding remains between the two, in float64 on the same weights.
"""

import json
import os
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mdlm_scale.config import ModelConfig, ScheduleName
from mdlm_scale.diffusion import objective
from mdlm_scale.diffusion.corrupt import Batch, corrupt
from mdlm_scale.diffusion.posterior import subs_log_probs
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.names import from_original, original_name
from mdlm_scale.run.ema import decay_at

GOLDEN = Path(__file__).parent / "golden"
CASES = ("base", "mask_mid_vocab", "discrete_T1000", "cosine")
SCHEDULES = ("loglinear", "cosine")
DTYPES = (torch.float32, torch.float64)
EPS = 2.0**-23  # float32: the spacing of numbers near 1

# Float32 against anything: a dozen matrix products in a row, each a sum of up to 256 rounded terms; errors relative to
# the largest element. Measured: 4e-7 for logits, 1e-6 for gradients; another summation order may add to it.
ROUNDING = 1e-5


@cache
def golden() -> dict[str, Any]:
    with safe_open(GOLDEN / "reference.safetensors", "pt") as file:
        return {k: json.loads(v) for k, v in file.metadata().items()} | {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118


@cache
def full() -> dict[str, Any]:
    if "MDLM_REFERENCE" not in os.environ:
        pytest.skip("MDLM_REFERENCE does not name the full file of reference tensors")
    leaves = runpy.run_path(str(GOLDEN / "make_golden.py"))["leaves"]
    return leaves(torch.load(os.environ["MDLM_REFERENCE"], weights_only=True))


@cache
def reference(name: str) -> dict[str, Any]:
    """Leaves by path: of the golden file, else of the full one."""
    if kept := below(golden(), name):
        return kept
    return below(full(), name)


def below(leaves: dict[str, Any], path: str) -> dict[str, Any]:
    return {k.removeprefix(path + "/"): v for k, v in leaves.items() if k.startswith(path + "/")}


@dataclass(frozen=True)
class Outcome:
    """What our model makes of a reference batch."""

    model: DiT
    logits_BLV: Tensor
    nll_M: Tensor
    nelbo: Tensor
    batch: Batch


@cache
def ours(name: str, dtype: torch.dtype) -> Outcome:
    case = reference(f"cases/{name}")
    cfg = below(case, "cfg")
    model = DiT(
        # dropout as in training: without keys none is applied, as in the reference
        ModelConfig(cfg["d"], cfg["layers"], cfg["heads"], cfg["cond"], 0.1, cfg["time_conditioning"]),
        cfg["V"],
        cfg["mask_index"],
    ).to(dtype)
    weights = below(case, "state_dict")
    with torch.no_grad():
        for ours_name, p in model.named_parameters():
            p.copy_(from_original(ours_name, weights[original_name(ours_name)], cfg["heads"]))
    batch = batch_of(case)
    nelbo_sum, nll_M = model(batch)
    nelbo = nelbo_sum / batch.num_tokens
    nelbo.backward()
    with torch.no_grad():
        logits_MV = model.logits(batch.z_BL, batch.sigma_B, torch.arange(batch.x_BL.numel()))
    return Outcome(model, logits_MV.view(*batch.x_BL.shape, -1), nll_M, nelbo.detach(), batch)


def batch_of(case: dict[str, Any]) -> Batch:
    """The reference's batch, with our weights."""
    x_BL, z_BL, t_B, is_token_BL = case["x0"], case["xt"], case["t"].double(), case["attention_mask"].bool()
    num_times = case["cfg/T"] or None
    if num_times:  # ours are multiples of 1/T in float64; the weight would see the rounding to float32 T times enlarged
        t_B = torch.round(t_B * num_times) / num_times
    weight_B = objective.weight(schedule_of(case["cfg/noise"]), t_B, num_times=num_times)
    rows_M = torch.nonzero(((z_BL == case["cfg/mask_index"]) & is_token_BL).flatten()).squeeze(1)
    return Batch(
        x_BL=x_BL,
        z_BL=z_BL,
        t_B=t_B,
        sigma_B=schedule_of(case["cfg/noise"]).sigma(t_B),
        is_token_BL=is_token_BL,
        rows_M=rows_M,
        target_M=x_BL.flatten()[rows_M],
        weight_M=weight_B[rows_M // x_BL.shape[1]],
        elbo_weight_M=weight_B[rows_M // x_BL.shape[1]],
        dropout_keys=None,
        num_tokens=int(is_token_BL.sum()),
    )


def schedule_of(name: str) -> Schedule:
    return Schedule(ScheduleName(name))


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Within `tolerance` of the largest element."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max()
    assert error <= tolerance, f"relative difference {error:.1e}"


def assert_schedule(table: dict[str, Any], quantity: str, schedule: Schedule) -> None:
    t = table["t"].double()
    alpha = schedule.alpha(t)
    # In float32 alpha and 1 - alpha carry an absolute error of an EPS or two; the reference derives sigma = -log(alpha)
    # and dsigma = -alpha'/alpha from them. Some more for the sine, and relative to sigma and dsigma themselves.
    value, error = {
        "sigma": (schedule.sigma(t), 2 * EPS * (schedule.sigma(t) + 1 / alpha)),
        "dsigma": (-schedule.dalpha(t) / alpha, 2 * EPS * (1 + 1 / alpha) * (-schedule.dalpha(t) / alpha)),
        "move_chance": (schedule.mask_prob(t), torch.full_like(t, 2 * EPS)),
    }[quantity]
    assert ((table[quantity].double().flatten() - value).abs() <= error).all()


def test_the_golden_file_is_a_cut_of_the_full_one() -> None:
    whole = full()
    for path, value in golden().items():
        assert torch.equal(value, whole[path]) if isinstance(value, Tensor) else value == whole[path]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("quantity", ["sigma", "dsigma", "move_chance"])
def test_schedule_tables(name: str, quantity: str) -> None:
    assert_schedule(reference(f"noise/{name}"), quantity, schedule_of(name))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("quantity", ["sigma", "dsigma", "move_chance"])
def test_schedule_of_the_batch(name: str, quantity: str) -> None:
    case = reference(f"cases/{name}")
    assert_schedule(case, quantity, schedule_of(case["cfg/noise"]))


@pytest.mark.parametrize("name", CASES)
def test_corrupted_tokens(name: str) -> None:
    case = reference(f"cases/{name}")
    mask_prob_B = schedule_of(case["cfg/noise"]).mask_prob(case["t"].double())
    z_BL = corrupt(case["x0"], case["u_mask"] < mask_prob_B[:, None], mask_id=case["cfg/mask_index"])
    assert torch.equal(z_BL, case["xt"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_logits(name: str, dtype: torch.dtype) -> None:
    assert_close(ours(name, dtype).logits_BLV, reference(f"cases/{name}")["logits"], ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_log_probs(name: str, dtype: torch.dtype) -> None:
    case, outcome = reference(f"cases/{name}"), ours(name, dtype)
    log_probs_BLV = subs_log_probs(outcome.logits_BLV, case["xt"], mask_id=case["cfg/mask_index"])
    impossible = case["log_probs"] < -1e5  # the reference's stand-in for -inf is -1e6
    assert (log_probs_BLV[impossible] == -torch.inf).all()
    assert_close(log_probs_BLV[~impossible], case["log_probs"][~impossible], ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss_per_token(name: str, dtype: torch.dtype) -> None:
    case, outcome = reference(f"cases/{name}"), ours(name, dtype)
    nll_BL = torch.zeros(case["x0"].shape, dtype=torch.float64)
    nll_BL.view(-1)[outcome.batch.rows_M] = outcome.nll_M.double() * outcome.batch.weight_M
    assert_close(nll_BL, case["nlls"], ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_loss(name: str, dtype: torch.dtype) -> None:
    assert_close(ours(name, dtype).nelbo, reference(f"cases/{name}")["loss"], ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_gradient(name: str, dtype: torch.dtype) -> None:
    case = reference(f"cases/{name}")
    gradients = below(case, "grads")
    for ours_name, p in ours(name, dtype).model.named_parameters():
        expected = from_original(ours_name, gradients.pop(original_name(ours_name)), case["cfg/heads"])
        assert p.grad is not None
        assert_close(p.grad, expected, ROUNDING)
    assert not gradients  # none is left over


def test_moving_average() -> None:
    series = reference("ema")
    for i in range(2):
        shadow = series[f"init/{i}"].clone()
        for step in range(12):
            shadow.lerp_(series[f"params/{step}/{i}"], 1 - decay_at(series["decay"], updates=step + 1))
            # the same three float32 operations in another order; values are of order 1, errors shrink with each step
            torch.testing.assert_close(shadow, series[f"shadow/{step}/{i}"], rtol=0, atol=4 * EPS)
