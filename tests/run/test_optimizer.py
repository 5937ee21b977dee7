"""The learning rate as a function of the step."""

import pytest
import torch

from mdlm_scale.config import BlockName, EmaConfig, LrSchedule, ModelConfig, OptimizerConfig
from mdlm_scale.model.dit import DiT
from mdlm_scale.run.optimizer import faults, groups, lr_at, undecayed


@pytest.mark.parametrize(
    ("step", "expected"), [(0, 0.0), (1, 3e-4 / 2500), (1250, 1.5e-4), (2500, 3e-4), (10**6, 3e-4)]
)
def test_paper_recipe(step: int, expected: float) -> None:
    assert lr_at(OptimizerConfig(), step) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(("step", "expected"), [(10, 1.0), (60, 0.55), (110, 0.1), (10**6, 0.1)])
def test_cosine_falls_to_a_tenth(step: int, expected: float) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, schedule=LrSchedule.cosine, cosine_steps=110)
    assert lr_at(config, step) == pytest.approx(expected, rel=1e-12)


def test_no_warmup() -> None:
    assert lr_at(OptimizerConfig(warmup_steps=0), 0) == 3e-4


def test_faults_are_all_told() -> None:
    config = OptimizerConfig(lr=-1, beta1=1.0, weight_decay=-0.1, cosine_steps=5)
    named = ("optimizer.lr", "optimizer.beta1", "optimizer.weight_decay", "optimizer.cosine_steps", "ema.decay")
    found = faults(config, EmaConfig(decay=1.0))
    assert [name for name in named if any(name in fault for fault in found)] == list(named)
    assert len(found) == len(named)


@pytest.mark.parametrize("block", BlockName)
def test_in_a_modern_model_only_matrices_decay(block: BlockName) -> None:
    with torch.device("meta"):
        model = DiT(ModelConfig(16, 1, 2, block=block), vocab_size=5, mask_id=0)
    params = dict(model.named_parameters())
    found = groups(params, undecayed(model))
    assert sum(len(group["params"]) for group in found) == len(params)
    if block is BlockName.paper:
        assert [group.keys() for group in found] == [{"params"}]  # everything has the section's weight decay
    else:
        decaying, others = found
        assert {p.dim() for p in decaying["params"]} == {2}
        assert ({p.dim() for p in others["params"]}, others["weight_decay"]) == ({1}, 0.0)
