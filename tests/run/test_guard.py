"""The guard: what it refuses, how often, and what it compares with; and a run that passes by bad steps."""

import math
from pathlib import Path

import pytest
import torch
from conftest import Train
from runs import rows, spoiling, tensors

from mdlm_scale.config import GuardConfig
from mdlm_scale.errors import TrainingError
from mdlm_scale.parallel.engine import Update
from mdlm_scale.run import build, checkpoint
from mdlm_scale.run.guard import WINDOW, Guard, faults
from mdlm_scale.run.step import Report


def report(loss: float) -> Report:
    return Report(loss=loss, nelbo=loss, num_tokens=1, num_masked=1, bucket_nll=[])


def step(guard: Guard, number: int, loss: float, norm: float = 1.0) -> tuple[bool, bool]:
    """Whether a step was applied, and whether the guard wants to rewind."""
    applied = guard.judge_norm(guard.judge(report(loss)), norm)
    return applied, guard.settle(number, report(loss), Update(norm, applied), None)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_refused(loss: float, norm: float) -> None:
    assert step(Guard(GuardConfig()), 0, loss, norm) == (False, False)


def test_skips_then_rewinds_then_stops() -> None:
    guard = Guard(GuardConfig(max_skips=2, max_rewinds=1))
    assert step(guard, 0, 1.0) == (True, False)
    assert [step(guard, k, math.nan)[1] for k in (1, 2, 3)] == [False, False, True]
    assert guard.refused == [1, 2, 3]
    guard.rewound([1.0])
    assert [step(guard, k, math.nan)[1] for k in (4, 5)] == [False, False]
    with pytest.raises(TrainingError, match=r"Step 6 .* one of 3 such steps in a row .* after 1 of 1 rewinds"):
        step(guard, 6, math.nan)


def test_a_good_step_forgives_the_bad_ones_before() -> None:
    guard = Guard(GuardConfig(max_skips=1, max_rewinds=0))
    for number in range(0, 10, 2):
        assert step(guard, number, math.nan) == (False, False)
        assert step(guard, number + 1, 1.0) == (True, False)


def test_a_spike_is_refused_and_not_remembered() -> None:
    """Losses 1.0 to 1.1: median 1.05, median deviation 0.02 and some; 20 scaled ones are about 0.75."""
    guard = Guard(GuardConfig(spike=20.0, max_skips=10**6))
    losses = [1.0 + 0.01 * (k % 11) for k in range(200)]
    assert all(step(guard, k, loss)[0] for k, loss in enumerate(losses))
    assert guard.losses == losses[-WINDOW:]
    highest = guard.highest()
    assert 1.5 < highest < 2.5
    for k in range(500):  # however many come, they do not become the rule
        assert not step(guard, 200 + k, highest + 0.01)[0]
    assert guard.highest() == highest
    assert step(guard, 700, highest - 0.01)[0]


def test_no_spike_before_there_is_something_to_compare_with() -> None:
    guard = Guard(GuardConfig(spike=1.0))
    assert all(step(guard, k, 10.0**k)[0] for k in range(16))


def test_equal_losses_allow_for_a_part_of_them() -> None:
    """A deviation of zero would refuse whatever is above the median."""
    guard = Guard(GuardConfig(spike=10.0))
    assert all(step(guard, k, 2.0)[0] for k in range(20))
    assert guard.highest() == pytest.approx(2.2)


def test_faults() -> None:
    assert faults(GuardConfig(max_skips=-1, max_rewinds=-1, spike=0.0)) == [
        "guard.max_skips=-1 must not be negative.",
        "guard.max_rewinds=-1 must not be negative.",
        "guard.spike=0.0 must be above 0, or null for no limit.",
    ]


build_model = build.build_model
ONE_PASS = ["batch.micro_batch_size=8", "evaluate.every=99", "checkpoint.every=2", "train.num_steps=10"]


def test_a_run_returns_to_its_checkpoint_and_passes_by(
    train_run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps 5 and 6 are bad, one may be skipped: back to step 4, and on as if both had never been."""
    monkeypatch.setattr(build, "build_model", spoiling(build_model, frozenset({5, 6})))
    assert train_run(*ONE_PASS, "guard.max_skips=1") == 0
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    state = checkpoint.read_manifest(path)["state"]
    assert (state["step"], state["updates"], state["skipped_steps"]) == (10, 8, [5, 6])
    found = rows(tmp_path / "run", "train")
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 8, 9, 10]  # each once, none of the bad
    events = [row["message"] for row in rows(tmp_path / "run", "event")]
    assert "back to step-000004; steps 5, 6 are left out, 16 samples are not trained on" in events
    # skipped one by one, with nothing to rewind, the same weights come out
    other = f"run.dir={tmp_path / 'skipped'}"
    monkeypatch.setattr(build, "build_model", spoiling(build_model, frozenset({5, 6})))
    assert train_run(*ONE_PASS, other, "guard.max_skips=2") == 0
    expected = tensors(checkpoint.newest(tmp_path / "skipped"))
    assert all(torch.equal(value, expected[key]) for key, value in tensors(path).items())


def test_a_spike_in_a_run_is_skipped(train_run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data of step 20 with ten times the loss; without the setting it is trained on."""
    for spike, skipped in (("guard.spike=20", [20]), ("guard.spike=null", [])):
        monkeypatch.setattr(build, "build_model", spoiling(build_model, frozenset({20}), factor=10.0))
        run = tmp_path / str(len(skipped))
        assert train_run(*ONE_PASS, f"run.dir={run}", "train.num_steps=24", spike) == 0
        path = checkpoint.newest(run)
        assert path is not None
        assert checkpoint.read_manifest(path)["state"]["skipped_steps"] == skipped
    (told,) = [row["message"] for row in rows(tmp_path / "1", "event") if "skipped" in row["message"]]
    assert told.startswith("step 20 was skipped: loss ")
    assert told.endswith("its 8 samples are not trained on")


def test_no_checkpoint_to_return_to(
    train_run: Train, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "build_model", spoiling(build_model, frozenset({0})))
    assert train_run(*ONE_PASS, "guard.max_skips=0") == 1
    assert "Steps 0 .. 0 were refused" in capsys.readouterr().err


def test_the_guards_memory_is_in_the_checkpoint(train_run: Train, tmp_path: Path) -> None:
    assert train_run("train.num_steps=3", "evaluate.every=99") == 0
    assert train_run("evaluate.every=99") == 0
    path = checkpoint.newest(tmp_path / "run")
    assert path is not None
    losses = [row["loss"] for row in rows(tmp_path / "run", "train")]
    assert checkpoint.read_manifest(path)["state"]["losses"] == losses
