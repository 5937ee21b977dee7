"""Whether kernels that are not PyTorch's own compute here what PyTorch does, on inputs so small that it costs nothing.

Each that a run has chosen does its work once, gradients included, and is held to PyTorch in float64 on the CPU. A wrong
package or a broken GPU so ends a run before its first step, rather than spoil it unseen.
B sequences, L positions, H heads, K head width, M masked rows, D width, V vocabulary.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import OptimizerConfig
from mdlm_scale.errors import TrainingError, raise_if_any
from mdlm_scale.kernels import HALF
from mdlm_scale.model.head import masked_cross_entropy

# Of a result's largest element. Half precision: eight roundings of that, as of the logits or of what a product takes;
# otherwise sums of a thousand terms, and a GPU's exponential, which is a few roundings off.
LIMITS = {torch.bfloat16: 2**-5, torch.float16: 2**-8, torch.float32: 1e-5, torch.float64: 1e-12}

Results = dict[str, Tensor]  # by name, to be compared


def check(device: torch.device, dtype: torch.dtype, sharded: bool) -> list[str]:
    """A line for each such kernel with its difference, none on a CPU; a TrainingError names those that are off."""
    trials: list[tuple[str, str, torch.dtype, Callable[[torch.device, torch.dtype], tuple[Results, Results]]]] = [
        ("attention", kernels.attention_kernel(device.type, dtype), dtype, attention),
        ("the head's softmax", kernels.row_kernel(device.type), dtype, head),
        ("AdamW", kernels.adamw_kernel(device.type, sharded), torch.float32 if dtype in HALF else dtype, adamw),
    ]
    lines, faults = [], []
    for what, kernel, precision, trial in trials:
        if kernel in ("sdpa", "torch"):
            continue
        told = f"{what} by {kernel}, {str(precision).removeprefix('torch.')} on {device}"
        try:
            gap, where = _largest_gap(*trial(device, precision))
        except Exception as error:  # of any kind: a package that was built for another machine
            faults.append(f"{told}, does not run: {type(error).__name__}: {error}. {_what_to_do(kernel)}")
            continue
        limit = LIMITS[precision]
        if gap <= limit:
            lines.append(f"{told}: differs from PyTorch by {gap:.1e} (limit {limit:.1e})")
        else:
            faults.append(
                f"{told}, is wrong: its {where} differs from PyTorch's by {gap:.1e} of the largest element, and "
                f"rounding explains {limit:.1e}. {_what_to_do(kernel)}"
            )
    raise_if_any(faults, TrainingError)
    return lines


def attention(device: torch.device, dtype: torch.dtype) -> tuple[Results, Results]:
    """Two queries to a head of keys, and a length that is no multiple of anything."""
    shapes = {"queries": (2, 77, 4, 64), "keys": (2, 77, 2, 64), "values": (2, 77, 2, 64), "d_out": (2, 77, 4, 64)}
    inputs = {name: _waves(shape, device, dtype) for name, shape in shapes.items()}

    def differentiated(attend: Callable[..., Tensor], inputs: Results) -> Results:
        leaves = [inputs[name].requires_grad_() for name in ("queries", "keys", "values")]
        out_BLHK = attend(*leaves)
        gradients = torch.autograd.grad(out_BLHK, leaves, inputs["d_out"].to(out_BLHK.dtype))
        names = ("result", "gradient of the queries", "gradient of the keys", "gradient of the values")
        return dict(zip(names, (out_BLHK.detach(), *gradients), strict=True))

    def by_torch(q_BLHK: Tensor, *kv_BLHK: Tensor) -> Tensor:
        k_BHLK, v_BHLK = (x.repeat_interleave(2, 2).transpose(1, 2) for x in kv_BLHK)
        return F.scaled_dot_product_attention(q_BLHK.transpose(1, 2), k_BHLK, v_BHLK).transpose(1, 2)

    return differentiated(kernels.attention, inputs), differentiated(by_torch, _exact(inputs))


def head(device: torch.device, dtype: torch.dtype) -> tuple[Results, Results]:
    """More columns than a tile, the mask's the most probable of all, some targets probable and some not."""
    mask_id, num_rows, width, vocab_size = 4500, 37, 64, 5003
    inputs = {
        "hidden": _waves((num_rows, width), device, dtype),
        "weight": _waves((vocab_size, width), device, dtype) / 16,
        "bias": _waves((vocab_size,), device, dtype),
        "row weight": _waves((num_rows,), device, torch.float32).abs(),
    }
    target_M = torch.arange(num_rows) * 131 % mask_id
    inputs["bias"][target_M[:8]], inputs["bias"][mask_id] = 8.0, 12.0

    def differentiated(inputs: Results, row_kernel: str | None) -> Results:
        *leaves, row_weight_M = inputs.values()
        loss_sum, nll_M = masked_cross_entropy(
            *(x.requires_grad_() for x in leaves), target_M.to(row_weight_M.device), row_weight_M,
            mask_id=mask_id, row_kernel=row_kernel,
        )  # fmt: skip
        names = ("gradient of the hidden rows", "gradient of the weights", "gradient of the bias")
        return {"nats": nll_M} | dict(zip(names, torch.autograd.grad(loss_sum, leaves), strict=True))

    return differentiated(inputs, None), differentiated(_exact(inputs), "torch")


def adamw(device: torch.device, dtype: torch.dtype) -> tuple[Results, Results]:
    """Three updates of two tensors with a learning rate that changes, from a counter that is set, as in a run."""
    config = OptimizerConfig(lr=0.1, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2)
    params = {"matrix": _waves((33, 65), device, dtype), "vector": _waves((7,), device, dtype)}

    def updated(optimizer: torch.optim.Optimizer, params: Results) -> Results:
        kernels.set_adam_step(optimizer, params.values(), 0)
        for n in (1, 2, 3):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / n
            for p in params.values():
                p.grad = _waves(p.shape, p.device, p.dtype) / n
            optimizer.step()
        moments = {f"{key} of the {name}": optimizer.state[params[name]][key] for name in params for key in _MOMENTS}
        return params | moments

    exact = _exact(params)
    by_torch = torch.optim.AdamW(
        exact.values(), betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=config.weight_decay
    )
    return updated(kernels.adamw(params.values(), config, device), params), updated(by_torch, exact)


_MOMENTS = ("exp_avg", "exp_avg_sq")


def _waves(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers in -1 .. 1 as if drawn: of ever higher frequency, so that no row is like another."""
    number = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return torch.sin(number**2 * 0.7310585 + len(number)).view(shape).to(device, dtype)


def _exact(inputs: Results) -> Results:
    """The same numbers in float64 on the CPU."""
    return {name: x.detach().to("cpu", torch.float64, copy=True) for name, x in inputs.items()}


def _largest_gap(found: Results, right: Results) -> tuple[float, str]:
    """Relative to each result's largest element, and whose it is; what is no number is the farthest off."""
    gaps = {
        name: float((found[name].cpu().double() - exact).abs().max() / exact.abs().max())
        for name, exact in right.items()
    }
    where = max(gaps, key=lambda name: torch.inf if gaps[name] != gaps[name] else gaps[name])
    return gaps[where], where


def _what_to_do(kernel: str) -> str:
    return (
        f"Upgrade or rebuild {kernel} for this GPU; with MDLM_PLAIN_KERNELS=1 in the environment PyTorch does its work."
    )
