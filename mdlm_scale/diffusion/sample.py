"""Samplers: from all masks to text, over any network given as a function.

`logits(z_BL, t_B, rows_M) -> logits_MV` scores the given rows of the flattened batch. Draws are float64, because in
float32 the tail of a large vocabulary is cut off, and are functions of (seed, sample number, step, position): a sample
does not depend on the others in its batch.
B samples, L positions, M rows about to be drawn, V vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mdlm_scale.diffusion.noise import random_bits, uniforms
from mdlm_scale.diffusion.posterior import stay_masked_prob
from mdlm_scale.diffusion.schedule import Schedule

Logits = Callable[[Tensor, Tensor, Tensor], Tensor]


def ancestral(
    logits: Logits, schedule: Schedule, sample_B: Tensor, length: int, *, num_steps: int, mask_id: int, seed: int
) -> Tensor:
    """Samples number `sample_B` in `num_steps` steps of p(z_s | z_t), (B, L).

    Whether a token is unmasked does not depend on what it becomes, so that is decided first, and the network's head is
    asked only where a token is about to be drawn: the same law, far less work.
    """
    z_BL = torch.full((len(sample_B), length), mask_id, device=sample_B.device)
    for step in range(num_steps, 0, -1):
        times = torch.tensor([step, step - 1], dtype=torch.float64) / num_steps
        mask_prob_t, mask_prob_s = schedule.mask_prob(times)
        # nothing may stay masked at the end, also where a schedule has masks left at t = 0
        stay = 0.0 if step == 1 else float(stay_masked_prob(mask_prob_s, mask_prob_t))
        bits_BL = random_bits(seed, "unmask", step, sample_B, length)
        is_drawn_BL = (z_BL == mask_id) & (bits_BL >= int(stay * 2**32))
        rows_M = torch.nonzero(is_drawn_BL.flatten()).squeeze(1)
        if len(rows_M) == 0:
            continue
        logits_MV = logits(z_BL, times[0].expand(len(sample_B)).to(z_BL.device), rows_M)
        u_M = uniforms(seed, "token", step, sample_B, length).flatten()[rows_M]
        z_BL.view(-1)[rows_M] = draw(logits_MV, u_M, mask_id=mask_id)
    return z_BL


def draw(logits_MV: Tensor, u_M: Tensor, *, mask_id: int) -> Tensor:
    """One token a row by inverting its distribution function at `u_M`; never the mask."""
    logits_MV = logits_MV.double()  # a copy, unless it was float64 already
    is_mask_V = torch.arange(logits_MV.shape[1], device=logits_MV.device) == mask_id
    cdf_MV = torch.softmax(logits_MV.masked_fill(is_mask_V, -torch.inf), dim=1).cumsum(dim=1)
    total_M = cdf_MV[:, -1]
    # below the total, or the search would run past the last token that has any probability
    point_M = torch.minimum(u_M * total_M, torch.nextafter(total_M, torch.zeros_like(total_M)))
    return torch.searchsorted(cdf_MV, point_M[:, None], right=True).squeeze(1)
