"""What each engine holds: initial weights made straight into shards, nothing whole on the way, half precision."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from parity.cells import float32, fsdp, plain, run, zero
from parity.ranks import run_ranks
from parity.storages import StoragePeak
from parity.trial import CPU, MASK_ID, VOCAB, Trial, config_of, initial

from mdlm_scale.config import Precision
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import build_engine, build_model, layout_of, places_of

ENGINES = {
    "plain": plain(2),
    "FSDP2": fsdp(2),
    **{f"ZeRO {stage}": zero(stage, 2) for stage in range(4)},
    "FSDP2 tp 2, sequence parallel": fsdp(2, tp_size=2, sequence_parallel=True),
    **{f"ZeRO {stage} tp 2": zero(stage, 2, tp_size=2, sequence_parallel=stage == 1) for stage in (0, 1, 3)},
}


def build(groups: Groups, trial: Trial) -> dict[str, Any]:
    """A model of some layers; what was held while it was built, and what its weights are."""
    config = config_of(trial)
    config = replace(config, model=replace(config.model, hidden_size=128, num_layers=8))
    layout = layout_of(config, groups.ranks)
    model = build_model(config, VOCAB, MASK_ID)
    names = [name for name, _ in model.named_parameters()]
    with StoragePeak() as bytes_:
        engine = build_engine(config, model, initial, CPU, layout, groups)
    whole = sizes(config.model, VOCAB, config.data.length)
    numbers = [place.shape.numel() for place in places_of(config, VOCAB, layout).values()]
    here = replace(whole, num_parameters=sum(numbers))
    state = here.state_bytes(trial.parallel, layout.shard_size, weight_bytes=4)
    return {
        "whole": 4 * whole.num_parameters,
        "here": 4 * here.num_parameters,
        "state": sum(state.values()) - state["ema"],
        "peak": bytes_.peak,
        "weights": {name: engine.full_parameter(name).clone() for name in names},
        "elements": sum(shard.master.numel() for shard in engine.shards().values()),
    }


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(fsdp(4), id="FSDP2"),
        pytest.param(zero(3, 4), id="ZeRO 3"),
        pytest.param(fsdp(4, tp_size=2), marks=pytest.mark.slow, id="FSDP2 tp 2"),
        pytest.param(zero(3, 4, tp_size=2), marks=pytest.mark.slow, id="ZeRO 3 tp 2"),
    ],
)
def test_no_rank_ever_holds_the_whole_model(trial: Trial) -> None:
    """At the worst moment of building there is the state that stays, and beside it a fraction of this tensor-parallel
    rank's model: DeepSpeed has two buffers of a twentieth each, rounded up to whole parameters."""
    tp_size = trial.parallel.tp_size
    ranks = run_ranks(build, 4, float32(trial), tp_size=tp_size)
    for rank in ranks:
        assert rank["peak"] < rank["state"] + 0.2 * rank["here"]
    # together the ranks of equal parts hold every element of their part once
    for first in range(tp_size):
        assert sum(rank["elements"] for rank in ranks[first::tp_size]) == ranks[first]["here"] // 4
    assert tp_size > 1 or ranks[0]["here"] == ranks[0]["whole"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * ("ZeRO 3 tp" in name)) for name in ENGINES if name != "plain"],
)
def test_initial_weights_are_those_of_one_process(name: str) -> None:
    expected = run_ranks(build, 1, float32(plain()))[0]["weights"]
    trial = float32(ENGINES[name])
    for rank in run_ranks(build, 2, trial, tp_size=trial.parallel.tp_size):
        assert all(torch.equal(rank["weights"][key], value) for key, value in expected.items())


@pytest.mark.parametrize("name", ENGINES)
def test_half_precision_trains_and_refuses(name: str) -> None:
    """Products in bf16 have three digits; masters, sums and moments are float32. No trace of the refused step."""
    trial = replace(ENGINES[name], steps=4)
    expected = run(replace(float32(plain(2)), steps=4))[0]
    half = float32(trial) if name != "plain" else trial
    for rank in run(replace(half, precision=Precision.bf16)):
        assert rank["traces"] == []
        assert all(math.isfinite(norm) for norm in rank["norm"])
        assert rank["loss"] == pytest.approx(expected["loss"], rel=1e-2)
        assert rank["norm"] == pytest.approx(expected["norm"], rel=3e-2)
