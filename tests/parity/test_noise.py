"""P0: the noise of a global batch is the same on any number of ranks and after any resume, bit for bit.

No processes: a rank's loader is a function of its layout.
"""

from dataclasses import replace

import pytest
import torch

from mdlm_scale.config import BatchConfig, TimeSampling
from mdlm_scale.data.loader import Loader
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from parity.cells import plain
from parity.trial import LENGTH, config_of, make_loader, source

NUM_SLOTS, DROPOUT_SITES = 4096, 4
BY_SLOT, BY_ROW = ("x_BL", "z_BL", "t_B", "sigma_B", "is_token_BL"), ("target_M", "weight_M", "elbo_weight_M")


def loader(layout: Layout, micro_batch_size: int, sampling: TimeSampling) -> Loader:
    config = config_of(plain())
    config = replace(
        config,
        batch=BatchConfig(NUM_SLOTS, micro_batch_size),
        diffusion=replace(config.diffusion, time_sampling=sampling),
    )
    return make_loader(config, layout, source(padded=True), DROPOUT_SITES)


def slots_of(batches: list[Batch], name: str) -> torch.Tensor:
    return torch.cat([getattr(batch, name) for batch in batches])


@pytest.mark.parametrize("sampling", TimeSampling)
@pytest.mark.parametrize("step", [0, 1, 1_000_003])
@pytest.mark.parametrize(
    ("world_size", "tp_size", "replicate_size", "micro_batch_size"),
    [(1, 1, 1, 64), (2, 1, 1, 32), (4, 2, 1, 16), (64, 1, 4, 8), (512, 8, 2, 4), (4096, 1, 64, 1), (4096, 8, 1, 2)],
)
def test_any_rank_draws_its_slots_of_the_one_batch(
    world_size: int, tp_size: int, replicate_size: int, micro_batch_size: int, step: int, sampling: TimeSampling
) -> None:
    whole = loader(Layout(), NUM_SLOTS, sampling).make(step)
    some = {0, 1, world_size // 3, world_size - 1} & set(range(world_size))
    for rank in sorted(some):
        layout = Layout(world_size, rank, tp_size, replicate_size)
        batches = loader(layout, micro_batch_size, sampling).make(step)
        own = layout.slots(NUM_SLOTS)
        here = slice(own.start, own.stop)
        for name in BY_SLOT:
            assert torch.equal(slots_of(batches, name), slots_of(whole, name)[here]), (rank, name)
        keys = torch.cat([batch.dropout_keys for batch in batches if batch.dropout_keys is not None], dim=1)
        assert whole[0].dropout_keys is not None
        assert torch.equal(keys, whole[0].dropout_keys[:, here]), rank
        slot_M = whole[0].rows_M // LENGTH
        is_own_M = (slot_M >= own.start) & (slot_M < own.stop)
        for name in BY_ROW:
            assert torch.equal(slots_of(batches, name), slots_of(whole, name)[is_own_M]), (rank, name)
