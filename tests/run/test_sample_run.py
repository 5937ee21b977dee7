"""`mdlm_scale.sample` as a user calls it: what is given stays, a sample is its number's, mistakes are told at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from conftest import ROOT
from runs import arguments

from mdlm_scale import sample, train
from mdlm_scale.run import checkpoint

BOS, EOS, MASK, LENGTH = 256, 257, 259, 32
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Callable[..., Path]]:
    """A run directory of a few steps, one for each setting of `time_conditioning`."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    made: dict[str, Path] = {}

    def run(time_conditioning: str = "false") -> Path:
        if time_conditioning not in made:
            folder = made[time_conditioning] = tmp_path_factory.mktemp("trained") / "run"
            settings = ["train.precision=float64", f"model.time_conditioning={time_conditioning}", "ema.decay=0.5"]
            assert (
                train.main(arguments(folder, corpus, *settings, "optimizer.lr=1e-2", "optimizer.warmup_steps=0")) == 0
            )
        return made[time_conditioning]

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def sampled(trained: Callable[..., Path], tmp_path: Path) -> Callable[..., Lines]:
    def run(*options: str) -> Lines:
        file = tmp_path / "samples.jsonl"
        assert sample.main(["--checkpoint", str(trained()), "--steps", "6", "--json", str(file), *options]) == 0
        return [json.loads(line) for line in file.read_text().splitlines()]

    return run


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_a_sample_depends_on_its_seed_and_number_alone(sampled: Callable[..., Lines], sampler: str) -> None:
    common = ["--sampler", sampler, "--length", "40", "--stride", "20"]
    found = sampled(*common, "--num", "5", "--batch", "3")
    assert [line["ids"] for line in found] == [line["ids"] for line in sampled(*common, "--num", "7", "--batch", "7")][
        :5
    ]
    assert found != sampled(*common, "--num", "5", "--seed", "1")
    assert found != sampled(*common, "--num", "5", "--raw")
    assert all(len(line["ids"]) == 40 and MASK not in line["ids"] for line in found)


def test_time_conditioned_models_draw_too(trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--steps", "4"], ["--sampler", "first-hitting"]):
        assert sample.main(["--checkpoint", str(trained("true")), "--num", "2", *options]) == 0
        assert capsys.readouterr().out.count("--- sample") == 2


def test_prompt_and_infilled_text_stay(sampled: Callable[..., Lines]) -> None:
    for line in sampled("--prompt", "the quick", "--num", "3"):
        assert line["ids"][:10] == [BOS, *b"the quick"]
        assert line["text"].startswith("[BOS]the quick")
    for line in sampled("--infill", "the___fox ___", "--gap", "3", "--num", "3"):
        ids = line["ids"]
        assert (ids[:4], ids[7:11]) == ([BOS, *b"the"], [*b"fox "])
        assert len(ids) == LENGTH


def test_departures_from_the_law_are_told(sampled: Callable[..., Lines], capsys: pytest.CaptureFixture[str]) -> None:
    assert {tuple(line["departures"]) for line in sampled()} == {()}
    assert "not the model's law" not in capsys.readouterr().out
    lines = sampled("--sampler", "confidence", "--temperature", "0.5", "--top-p", "0.9")
    assert lines[0]["departures"] == ["order by confidence", "temperature 0.5", "top-p 0.9"]
    assert "(not the model's law: order by confidence, temperature 0.5, top-p 0.9)" in capsys.readouterr().out


def test_stopping_cuts_after_the_first_end(sampled: Callable[..., Lines]) -> None:
    """An untrained model draws one EOS in 260 tokens: of 40 samples of 60 some have one."""
    common = ["--num", "40", "--length", "60", "--steps", "3"]
    whole, cut = sampled(*common), sampled(*common, "--stop-at-eos")
    assert any(len(line["ids"]) < 60 for line in cut)
    for one, other in zip(whole, cut, strict=True):
        assert one["ids"][: len(other["ids"])] == other["ids"]
        assert len(other["ids"]) == 60 or other["ids"][-1] == EOS


def test_what_it_took_is_told(trained: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    command = ["--checkpoint", str(trained()), "--num", "2", "--sampler", "first-hitting", "--prompt", "the"]
    assert sample.main(command) == 0
    told = capfd.readouterr().err
    assert "first-hitting: 2 samples, 56 tokens in " in told
    assert "28 network calls, 56 rows in them, 56 rows through the head" in told


def test_all_mistakes_at_once(trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num", "0", "--sampler", "first-hitting", "--steps", "3", "--temperature", "-1", "--top-p", "1.5"]
    options += [
        "--stride",
        "32",
        "--prompt",
        f"[MASK]{'a' * 40}",
        "--seed",
        "-1",
        "--json",
        str(tmp_path / "no" / "file"),
    ]
    options += ["--judge", str(tmp_path)]
    assert sample.main(["--checkpoint", str(trained()), *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    for fault in (
        "10 faults",
        "--num 0 must be at least 1",
        "--steps 3 is of ancestral and confidence",
        "--temperature -1.0 must",
        "--top-p 1.5 must lie in (0, 1]",
        "--seed -1 must lie",
        "file cannot be written",
        "--stride 32 must lie in 1 .. 31",
        "holds the mask token [MASK]",
        "takes 47 tokens with BOS and gaps; a sample has 32. Shorten it, or raise --length.",
        f"--judge {tmp_path} cannot",
    ):
        assert fault in err


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--steps", "0"], "--steps 0 must be at least 1."),
        (["--length", "0"], "--length 0 must be at least 1."),
        (["--infill", "no gap"], "--infill has no gap: write ___ for one, or use --prompt."),
        (["--prompt", "a" * 31], "takes 32 tokens with BOS and gaps; a sample has 32"),
        (["--json", "."], "--json . cannot be written: it is a folder"),
        (["--prompt", "caf\udce9"], "The text given is not UTF-8."),
        (["--judge", "no/such/model"], "--judge no/such/model cannot be loaded"),
    ],
)
def test_mistake(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    assert sample.main(["--checkpoint", str(trained()), *options]) == 2
    assert fault in capsys.readouterr().err


def test_confidence_is_not_for_a_time_conditioned_model(
    trained: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main(["--checkpoint", str(trained("true")), "--sampler", "confidence"]) == 2
    assert (
        "--sampler confidence has no time to tell this network (model.time_conditioning=true)"
        in capsys.readouterr().err
    )


def test_a_vocabulary_of_another_size_is_refused(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint.newest(trained())
    assert folder is not None
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"]["ema/embed.weight"]["shape"][0] = 300
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert sample.main(["--checkpoint", str(tmp_path)]) == 2
    assert f"tokenizer.name=bytes (V 260) is not that of {tmp_path} (V 300)." in capsys.readouterr().err


def test_tensors_that_are_not_the_models_are_named(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint.newest(trained())
    assert folder is not None
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["tensors"]["ema/norm.weight"]
    manifest["tensors"]["ema/head.bias"]["shape"] = [259]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert sample.main(["--checkpoint", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has no ema/norm.weight" in said
    assert "ema/head.bias has shape [259], not [260]" in said


def test_a_launchers_variables_do_no_harm(trained: Callable[..., Path]) -> None:
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7"}
    command = [sys.executable, "mdlm_scale/sample.py", "--checkpoint", str(trained()), "--num", "1", "--steps", "2"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | slurm, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--- sample 0") == 1


def test_the_report_is_of_the_samples(sampled: Callable[..., Lines], capsys: pytest.CaptureFixture[str]) -> None:
    *samples, last = sampled("--num", "3", "--report")
    found = last["report"]
    tokens = torch.tensor([line["ids"] for line in samples])
    assert found["distinct_1"] == len(tokens.unique()) / tokens.numel()
    assert found["judge"] is None
    assert f"entropy         {found['entropy']}" in capsys.readouterr().out


def test_a_line_tells_what_it_was_drawn_from(sampled: Callable[..., Lines], trained: Callable[..., Path]) -> None:
    line = sampled("--prompt", "the", "--temperature", "0.5", "--raw")[0]
    told = {key: line[key] for key in line if key not in ("sample", "text", "ids", "departures")}
    assert told == {
        "checkpoint": str(checkpoint.newest(trained())), "weights": "raw", "seed": 0, "sampler": "ancestral",
        "steps": 6, "temperature": 0.5, "top_p": 1.0, "prompt": "the", "infill": None,
    }  # fmt: skip


def test_weights_without_numbers_end_in_a_line(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is whole; the network is not."""
    newest = checkpoint.newest(trained())
    assert newest is not None
    shutil.copytree(newest, tmp_path / newest.name)
    manifest = json.loads((newest / "manifest.json").read_text())
    box = manifest["tensors"]["ema/head.bias"]["boxes"][0]
    file = tmp_path / newest.name / box["file"]
    data = safetensors.torch.load_file(file)
    data[box["entry"]].fill_(torch.nan)
    safetensors.torch.save_file(data, file)
    manifest["files"][file.name] = {"bytes": file.stat().st_size, "sha256": checkpoint.sha256(file)}
    (tmp_path / newest.name / "manifest.json").write_text(json.dumps(manifest))
    assert sample.main(["--checkpoint", str(tmp_path / newest.name), "--json", str(tmp_path / "samples.jsonl")]) == 1
    assert "TrainingError: The network gives no numbers (NaN)" in capsys.readouterr().err
    assert not (tmp_path / "samples.jsonl").exists()


def test_an_interrupt_is_one_line(trained: Callable[..., Path], tmp_path: Path) -> None:
    command = [sys.executable, "mdlm_scale/sample.py", "--checkpoint", str(trained()), "--num", "100000"]
    command += ["--batch", "1", "--json", str(tmp_path / "samples.jsonl")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith("--- sample 0")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.endswith("interrupted: a --json file is written when all samples are there\n")
    assert "Traceback" not in err
    assert not (tmp_path / "samples.jsonl").exists()
