"""The forward process as data: a batch of clean rows becomes a batch that is already corrupted and ready to train on.

Done by the loader, on the host, ahead of the step: the number of masked rows M is then an ordinary int, and nothing in
a step draws a random number. B sequences, L positions, M masked real tokens.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig
from mdlm_scale.diffusion import noise, objective
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.errors import DataError, raise_if_any


@dataclass(frozen=True)
class Batch:
    x_BL: Tensor  # clean tokens, int64
    z_BL: Tensor  # what the network sees
    t_B: Tensor  # float64
    sigma_B: Tensor  # float64; what a time-conditioned network is told of t
    is_token_BL: Tensor  # False where the row is padded; padding is corrupted and read, but not scored
    rows_M: Tensor  # masked real tokens, as indices into the flattened (B * L)
    target_M: Tensor  # their clean tokens
    weight_M: Tensor  # what their cross entropies count in the loss, float64
    elbo_weight_M: Tensor  # and in the bound: the same, unless the loss is weighted otherwise
    dropout_keys: Tensor | None  # (sites, B) int32; None is no dropout
    num_tokens: int  # real tokens, masked or not

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Batch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        tensors = {f.name: v for f in dataclasses.fields(self) if isinstance(v := getattr(self, f.name), Tensor)}
        return dataclasses.replace(self, **{name: change(tensor) for name, tensor in tensors.items()})  # type: ignore[arg-type]


def corrupt(x_BL: Tensor, is_masked_BL: Tensor, *, mask_id: int) -> Tensor:
    """Draw z_t ~ q(z_t | x): the masked tokens become `mask_id`, the others stay."""
    return torch.where(is_masked_BL, mask_id, x_BL)


def corrupted(
    x_BL: Tensor,
    is_token_BL: Tensor,
    t_B: Tensor,
    *,
    config: DiffusionConfig,
    schedule: Schedule,
    seed: int,
    step: int,
    slots: range,
    mask_id: int,
    vocab_size: int,
    dropout_sites: int = 0,
) -> Batch:
    """The training batch for these slots of this step: rows `x_BL` at times `t_B`, with their masks and weights."""
    slot_B = torch.arange(slots.start, slots.stop)
    is_masked_BL = noise.is_masked(seed, step, slot_B, schedule.mask_prob(t_B), x_BL.shape[1])
    made = masked(
        x_BL, is_token_BL, is_masked_BL, t_B, schedule.sigma(t_B),
        weight_B=objective.weight(schedule, t_B, num_times=config.num_times, kind=config.weight),
        elbo_weight_B=objective.weight(schedule, t_B, num_times=config.num_times),
        mask_id=mask_id, vocab_size=vocab_size, where=f"Step {step}, slots {slots.start} to {slots.stop - 1}",
    )  # fmt: skip
    keys = noise.dropout_keys(seed, step, slot_B, dropout_sites) if dropout_sites else None
    return dataclasses.replace(made, dropout_keys=keys)


def masked(
    x_BL: Tensor,
    is_token_BL: Tensor,
    is_masked_BL: Tensor,
    t_B: Tensor,
    sigma_B: Tensor,
    *,
    weight_B: Tensor,
    elbo_weight_B: Tensor,
    mask_id: int,
    vocab_size: int,
    where: str,
) -> Batch:
    """The batch for given masks and weights, without dropout; a DataError begins with `where` the rows are from."""
    faults = row_faults(x_BL.flatten(), weight_B, mask_id=mask_id, vocab_size=vocab_size)
    raise_if_any((f"{where}: {fault}" for fault in faults), DataError)
    rows_M = torch.nonzero((is_masked_BL & is_token_BL).flatten()).squeeze(1)
    row_M = rows_M // x_BL.shape[1]
    return Batch(
        x_BL=x_BL,
        z_BL=corrupt(x_BL, is_masked_BL, mask_id=mask_id),
        t_B=t_B,
        sigma_B=sigma_B,
        is_token_BL=is_token_BL,
        rows_M=rows_M,
        target_M=x_BL.flatten()[rows_M],
        weight_M=weight_B[row_M],
        elbo_weight_M=elbo_weight_B[row_M],
        dropout_keys=None,
        num_tokens=int(is_token_BL.sum()),
    )


def row_faults(token_N: Tensor, weight_N: Tensor, *, mask_id: int, vocab_size: int | None) -> list[str]:
    """What is wrong with clean tokens and with what they count in the loss; asked on the host, where they are made.

    `vocab_size` is None where only a part of the vocabulary is known.
    """
    found = []
    if bool((token_N == mask_id).any()):
        found.append(f"the text holds the mask token, id {mask_id}, which only noise may write.")
    is_outside_N = (token_N < 0) | (token_N >= (torch.inf if vocab_size is None else vocab_size))
    if bool(is_outside_N.any()):
        bounds = "" if vocab_size is None else f", 0 .. {vocab_size - 1}"
        found.append(f"the text holds token id {int(token_N[is_outside_N][0])}, outside the vocabulary{bounds}.")
    is_bad_N = ~((weight_N >= 0) & (weight_N < torch.inf))
    if bool(is_bad_N.any()):
        found.append(f"a token's weight is {float(weight_N[is_bad_N][0])}; it must be finite and not negative.")
    return found
