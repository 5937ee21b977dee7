"""The parity ladder: the same step, the same run, whatever the layout; and that this suite would notice otherwise."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mdlm_scale.config import Recompute
from parity.bugs import BUGS, is_caught
from parity.cells import CELLS, Cell, differences, fsdp, growth_for, plain, run, zero
from parity.trial import REFUSED, Trial


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id=f"{c.name} {c.trial.precision}", marks=[pytest.mark.slow] * c.slow) for c in CELLS],
)
def test_layout_computes_what_one_process_does(cell: Cell) -> None:
    """P1 and P2: one step with every gradient, then the whole run; noise bit-equal; refusals leave no trace."""
    found = differences(cell.trial)
    assert found.faults(cell.trial.precision, growth_for(cell.trial)) == []


def recomputing(trial: Trial, how: Recompute) -> Trial:
    return replace(trial, parallel=replace(trial.parallel, recompute=how))


SWITCHES = {
    "recompute full": lambda trial: replace(trial, parallel=replace(trial.parallel, recompute=Recompute.full)),
    "recompute selective": lambda trial: replace(
        trial, parallel=replace(trial.parallel, recompute=Recompute.selective)
    ),
    "evaluation in between": lambda trial: replace(trial, evaluated=True),
    "prefetch": lambda trial: replace(trial, prefetch=0),
}
LAYOUTS = {
    "plain": plain(2),
    "FSDP2": fsdp(2),
    "ZeRO 0": zero(0, 2),
    "ZeRO 1": zero(1, 2),
    "ZeRO 2": zero(2, 2),
    "ZeRO 3": zero(3, 2),
    "FSDP2 tp 2": fsdp(2, tp_size=2),
    "FSDP2 tp 2, sequence parallel": fsdp(2, tp_size=2, sequence_parallel=True),
    "ZeRO 1 tp 2": zero(1, 2, tp_size=2),
    "ZeRO 3 tp 2": zero(3, 2, tp_size=2),
}


@pytest.mark.parametrize(
    "layout",
    [
        "plain",
        "FSDP2",
        "FSDP2 tp 2, sequence parallel",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("FSDP2 tp 2", "ZeRO 1", "ZeRO 3", "ZeRO 3 tp 2")),
    ],
)
def test_switches_do_not_change_a_bit(layout: str) -> None:
    """P3."""
    base = replace(LAYOUTS[layout], steps=6, evaluated=False)
    expected = run(base)[0]
    for name, switch in SWITCHES.items():
        found = run(switch(base))[0]
        assert (found["loss"], found["norm"]) == (expected["loss"], expected["norm"]), name
        for key, value in expected["parameters"].items():
            assert torch.equal(found["parameters"][key], value), f"{name}: {key}"


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("plain", "FSDP2", "ZeRO 1"))) for n in LAYOUTS]
)
def test_step_that_is_not_finite_on_one_rank_leaves_no_trace(layout: str) -> None:
    """Weights, moments, counters and averages of all ranks are as if the judge had refused a good step."""
    base = replace(LAYOUTS[layout], steps=5)
    expected = run(base)
    for poison in ("loss", "norm"):
        assert_refused(run(replace(base, poison=poison)), expected)


def assert_refused(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (own, other) in enumerate(zip(found, expected, strict=True)):
        assert own["traces"] == [], rank
        assert not math.isfinite(own["norm"][REFUSED]), rank
        assert (own["loss"][REFUSED + 1 :], own["norm"][REFUSED + 1 :]) == (
            other["loss"][REFUSED + 1 :],
            other["norm"][REFUSED + 1 :],
        )
        assert all(torch.equal(own["parameters"][name], value) for name, value in other["parameters"].items())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, n in enumerate(BUGS)])
def test_seeded_bug_is_caught(name: str) -> None:
    """P5."""
    assert is_caught(name)
