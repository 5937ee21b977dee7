"""A new run that begins with the averaged weights of a checkpoint: those weights, and nothing else of that run."""

import json
import shutil
from pathlib import Path
from typing import Any

import convert_ckpt
import pytest
import torch
from conftest import Train
from runs import SECONDS, ByHand, arguments, rows, tensors

from mdlm_scale.run import checkpoint

ONE = ("train.num_steps=1", "evaluate.every=1", "checkpoint.every=1")  # whose learning rate is 0: a look at the start


@pytest.fixture
def trained(train_run: Train, tmp_path: Path) -> Path:
    run = tmp_path / "trained"
    assert train_run(f"run.dir={run}", "optimizer.lr=0.05", "optimizer.warmup_steps=1", "ema.decay=0.5") == 0
    return run


def assert_begins_with(run: Path, trained: Path) -> None:
    """Weights and average; the moments are those of one gradient, the counters of one step."""
    before, after = tensors(checkpoint.newest(trained)), tensors(checkpoint.newest(run))
    for key in (key.removeprefix("ema/") for key in before if key.startswith("ema/")):
        assert torch.equal(after[f"model/{key}"], before[f"ema/{key}"].to(after[f"model/{key}"].dtype)), key
        assert torch.equal(after[f"ema/{key}"], after[f"model/{key}"]), key
        # Adam's first step: means of g and of g^2, times 0.1 and 0.001, from zero; the decays are not exact in binary
        mean, square = after[f"exp_avg/{key}"] / 0.1, after[f"exp_avg_sq/{key}"] / 1e-3
        torch.testing.assert_close(mean.square(), square, rtol=1e-5, atol=0)
    path = checkpoint.newest(run)
    assert path is not None
    state = checkpoint.read_manifest(path)["state"]
    assert (state["step"], state["updates"], len(state["losses"])) == (1, 1, 1)


@pytest.mark.parametrize("converted", [False, True])
def test_a_run_begins_with_the_average(converted: bool, trained: Path, train_run: Train, tmp_path: Path) -> None:
    source = trained
    if converted:
        source = tmp_path / "native"
        assert convert_ckpt.main([str(trained), str(source), "--to", "native"]) == 0
    assert train_run(f"run.init_from={source}", "run.seed=7", "model.dropout=0", *ONE) == 0
    assert_begins_with(tmp_path / "run", trained)
    said = [row["message"] for row in rows(tmp_path / "run", "event")]
    assert any(message.startswith("began with the averaged weights of") for message in said)


@pytest.mark.parametrize("engine", ["fsdp", "deepspeed"])
def test_shards_begin_with_their_part(
    engine: str, trained: Path, corpus: Path, by_hand: ByHand, tmp_path: Path
) -> None:
    """In float32, where DeepSpeed is."""
    given = [f"run.init_from={trained}", f"parallel.engine={engine}", "train.precision=float32", *ONE]
    for _ in range(2):
        by_hand.start(2, arguments(tmp_path / "run", corpus, *given))
    assert [rank.code for rank in by_hand.ended(SECONDS)] == [0, 0]
    assert_begins_with(tmp_path / "run", trained)


def test_a_resume_goes_on_from_its_own_checkpoint(trained: Path, train_run: Train, tmp_path: Path) -> None:
    """And does not need the other any more."""
    begun = (f"run.init_from={trained}", "optimizer.warmup_steps=1")
    assert train_run(*begun, "train.num_steps=4", f"run.dir={tmp_path / 'whole'}") == 0
    assert train_run(*begun, "train.num_steps=2") == 0
    shutil.rmtree(trained)
    assert train_run(*begun, "train.num_steps=4") == 0
    whole, resumed = (tensors(checkpoint.newest(tmp_path / name)) for name in ("whole", "run"))
    assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []


def flipped(path: Path) -> None:
    newest = checkpoint.newest(path)
    assert newest is not None
    file = newest / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("overrides", "faults"),
    [
        (["model.hidden_size=64"], ["hidden_size is 32 there, 64 here"]),
        (["model.num_heads=2", "model.time_conditioning=true"], ["num_heads is 4", "time_conditioning is False"]),
        (["tokenizer.name=text8"], ["vocabulary is 260 there, 35 here"]),
        (["run.init_from=nowhere"], ["run.init_from=nowhere is no checkpoint of ours, nor a run directory"]),
        ([], ["rank-00000.safetensors does not have the sha256"]),
    ],
)
@pytest.mark.parametrize("check", [True, False])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    overrides: list[str], faults: list[str], check: bool, trained: Path, train_run: Any, tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if not overrides:
        flipped(trained)
    capfd.readouterr()
    assert train_run(f"run.init_from={trained}", *overrides, *(["--check"] if check else [])) == 2
    said = capfd.readouterr().err
    assert [fault for fault in faults if fault not in said] == []
    assert not (tmp_path / "run").exists()


def test_another_vocabulary_of_the_same_size_is_refused(
    trained: Path, train_run: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = checkpoint.newest(trained)
    assert newest is not None
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["fingerprints"]["tokenizer"] = "another"
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert train_run(f"run.init_from={trained}") == 2
    assert "tokenizer is another there" in capfd.readouterr().err


def test_weights_alone_are_no_checkpoint_of_a_run(trained: Path, train_run: Train, tmp_path: Path, capfd: Any) -> None:
    """A converted checkpoint put into a run's place has no moments, and that is said."""
    newest = checkpoint.newest(trained)
    assert newest is not None
    shutil.move(trained / "checkpoints", tmp_path / "kept")
    assert convert_ckpt.main([str(tmp_path / "kept" / newest.name), str(newest), "--to", "native"]) == 0
    (trained / "done").unlink()
    told = ("optimizer.lr=0.05", "optimizer.warmup_steps=1", "ema.decay=0.5")
    assert train_run(f"run.dir={trained}", *told) == 2
    assert "has no moments: begin a new run with run.init_from=" in capfd.readouterr().err
