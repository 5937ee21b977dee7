"""One step's forward and backward pass over the global batch, and what is known of it afterwards."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.parallel.engine import Engine
from mdlm_scale.parallel.groups import Groups

BUCKETS = 10  # of t, for the loss by noise level


@dataclass(frozen=True)
class Report:
    """Sums over the global batch."""

    loss: float  # weighted nats a real token: what is trained
    nelbo: float  # the same with the bound's weights, which are the loss's unless `diffusion.weight` says otherwise
    num_tokens: int  # real tokens
    num_masked: int  # masked real tokens
    bucket_nll: list[float]  # mean nats of a masked token, unweighted, by tenth of t; NaN where there was none


def forward_backward(engine: Engine, batches: Sequence[Batch], groups: Groups) -> Report:
    """Leave the gradients of the mean loss in the engine; all counts are known before the first backward pass."""
    num_tokens = int(groups.sum([sum(batch.num_tokens for batch in batches)])[0])
    nlls = engine.forward_backward(batches, num_tokens)
    sums = torch.zeros(2 + 2 * BUCKETS, dtype=torch.float64, device=nlls[0].device)
    for batch, nll_M in zip(batches, nlls, strict=True):
        nll_M = nll_M.double()
        for i, weight_M in enumerate((batch.weight_M, batch.elbo_weight_M)):
            sums[i] += (nll_M * weight_M.to(nll_M.device)).sum()
        t_M = batch.t_B[batch.rows_M // batch.x_BL.shape[1]]
        bucket_M = (t_M * BUCKETS).long().clamp(max=BUCKETS - 1).to(nll_M.device)
        sums[2 : 2 + BUCKETS].index_add_(0, bucket_M, nll_M)
        sums[2 + BUCKETS :].index_add_(0, bucket_M, torch.ones_like(nll_M))
    loss_sum, nelbo_sum, *rest = groups.sum(sums.tolist())
    nats, counts = rest[:BUCKETS], rest[BUCKETS:]
    return Report(
        loss=loss_sum / num_tokens,
        nelbo=nelbo_sum / num_tokens,
        num_tokens=num_tokens,
        num_masked=int(sum(counts)),
        bucket_nll=[n / c if c else float("nan") for n, c in zip(nats, counts, strict=True)],
    )
