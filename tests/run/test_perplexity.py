"""`mdlm_scale.evaluate`, as a user calls it: figures, their protocol, and one clear message for what cannot be."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import DEBUG, ROOT
from parity.ranks import free_port, run_ranks
from runs import SMALL

from mdlm_scale import evaluate, train
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import perplexity

ROWS = 56  # seven blocks of the small corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A small run in float64 with checkpoints at steps 3 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    data = [f"run.dir={folder}", f"data.train={corpus}", f"data.validation={corpus}", "train.precision=float64"]
    assert train.main(["--config", DEBUG, *SMALL, *data, f"evaluate.rows={ROWS}", "optimizer.warmup_steps=2"]) == 0
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return folder


@pytest.fixture
def measured(run: Path, corpus: Path, tmp_path: Path) -> Any:
    """`measured("--rows", "20", ...)`: what the JSON file holds after a call that went well."""

    def call(*options: str, which: tuple[str, ...] = ("--checkpoint", str(run)), data: object = corpus) -> Any:
        file = tmp_path / "figures.json"
        arguments = [*which, "--data", str(data), "--precision", "float64", "--rows", str(ROWS), "--json", str(file)]
        assert evaluate.main([*arguments, *options]) == 0
        return json.loads(file.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))

    return call


def test_the_figure_of_training_again(measured: Any, run: Path) -> None:
    """One core, one noise, the averaged weights: what the run wrote down at its last step."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (written,) = (line for line in lines if line["kind"] == "eval" and line["step"] == 6)
    found = measured()
    for key in ("nelbo", "nelbo_se", "ppl", "ppl_se"):
        assert found[key] == pytest.approx(written[key], rel=1e-12)  # float64, in batches of other sizes
    assert (found["num_rows"], found["num_tokens"], found["num_blocks"]) == (ROWS, ROWS * 32, 7)


def test_figures_follow_from_each_other(measured: Any, corpus: Path) -> None:
    found = measured("--samples-per-row", "2")
    assert found["ppl"] == pytest.approx(math.exp(found["nelbo"]))
    assert found["ppl_se"] == pytest.approx(found["ppl"] * found["nelbo_se"])
    assert found["bits_per_token"] == pytest.approx(found["nelbo"] / math.log(2))
    rest = found["nelbo_se"] ** 2 - found["se_mc"] ** 2
    assert found["se_data"] == pytest.approx(math.sqrt(max(0.0, rest)))
    lines = corpus.read_text().splitlines()
    num_bytes = sum(map(len, lines))
    # a document adds an end, a row of 30 of them two ends more
    num_tokens = num_bytes + len(lines) + 2 * -(-(num_bytes + len(lines)) // 30)
    assert found["bits_per_byte"] == pytest.approx(found["bits_per_token"] * num_tokens / num_bytes)
    assert found["prior"] == pytest.approx(1e-3 * math.log(259))
    assert found["complete"] == pytest.approx(found["nelbo"] + found["prior"])


def test_the_protocol_is_told(measured: Any, run: Path, corpus: Path) -> None:
    told = measured("--seed", "7")["protocol"]
    assert told["checkpoint"] == str(run / "checkpoints" / "step-000006")
    expected = {
        "step": 6, "weights": "EMA", "precision": "float64", "estimator": "paper", "num_times": "inf", "t_min": 1e-3,
        "seed": 7, "samples_per_row": 1, "tokenizer": "bytes", "data": str(corpus), "length": 32, "trained_length": 32,
        "detokenizer": "none", "wrapping": {"padded": False, "document_end": True, "row_ends": True},
    }  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    assert told["schedule"]["name"] == "loglinear"
    assert all(len(told[key]) == 64 for key in ("tokenizer_fingerprint", "data_fingerprint"))


def test_it_is_printed_with_its_errors(run: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--checkpoint", str(run), "--data", str(corpus), "--rows", "20"]) == 0
    said = capsys.readouterr().out
    assert "nelbo" in said
    assert " +- " in said
    assert f"20 rows, {20 * 32} tokens, 3 blocks" in said
    assert len(said.splitlines()) <= 24  # one screen


@pytest.mark.parametrize("estimator", ["paper", "count"])
def test_batches_do_not_matter(measured: Any, estimator: str) -> None:
    whole = measured("--estimator", estimator, "--samples-per-row", "2", "--batch", "1000")
    for batch in ("1", "7"):
        found = measured("--estimator", estimator, "--samples-per-row", "2", "--batch", batch)
        assert found["nelbo"] == pytest.approx(whole["nelbo"], rel=1e-12)


def of_a_rank(groups: Groups, arguments: list[str]) -> Any:
    return perplexity.measure(evaluate.parsed(arguments), groups)


@pytest.mark.parametrize("estimator", ["paper", "count"])
def test_ranks_do_not_matter(measured: Any, run: Path, corpus: Path, estimator: str) -> None:
    alone = measured("--estimator", estimator, "--samples-per-row", "2")
    asked = ["--checkpoint", str(run), "--data", str(corpus), "--precision", "float64", "--rows", str(ROWS)]
    asked += ["--estimator", estimator, "--samples-per-row", "2", "--batch", "3"]
    for num_ranks in (2, 4):
        for found in run_ranks(of_a_rank, num_ranks, asked):
            assert found["nelbo"] == pytest.approx(alone["nelbo"], rel=1e-12)
            assert found["nelbo_se"] == pytest.approx(alone["nelbo_se"], rel=1e-9)  # of differences of such sums
            assert found["num_tokens"] == alone["num_tokens"]


def test_a_checkpoint_differs_from_itself_by_nothing(measured: Any, run: Path) -> None:
    found = measured("--samples-per-row", "2", which=("--compare", str(run), str(run)))
    assert set(found["difference"].values()) == {0.0}


def test_two_checkpoints_are_compared_row_by_row(measured: Any, run: Path) -> None:
    first = str(run / "checkpoints" / "step-000003")
    found = measured(which=("--compare", first, str(run)))
    one, other = found["results"]
    assert [one["protocol"]["step"], other["protocol"]["step"]] == [3, 6]
    assert found["difference"]["nelbo"] == pytest.approx(other["nelbo"] - one["nelbo"], rel=1e-9)
    assert 0 < found["difference"]["nelbo_se"] < 0.5 * math.hypot(one["nelbo_se"], other["nelbo_se"])


def test_raw_weights_are_not_the_average(measured: Any) -> None:
    raw = measured("--raw")
    assert raw["protocol"]["weights"] == "raw"
    assert raw["nelbo"] != measured()["nelbo"]


def test_draws_are_doubled_until_the_error_is_small(measured: Any) -> None:
    few = measured("--samples-per-row", "2")
    found = measured("--until-se", str(few["se_mc"] / 2))
    assert found["se_mc"] <= few["se_mc"] / 2
    num_draws = found["protocol"]["samples_per_row"]
    assert num_draws in (4, 8, 16, 32)
    assert found["nelbo"] == measured("--samples-per-row", str(num_draws))["nelbo"]  # the same draws
    assert measured("--samples-per-row", str(num_draws // 2))["se_mc"] > few["se_mc"] / 2


def test_an_error_that_is_not_reached_is_told(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "MAX_DRAWS", 4)
    asked = ["--checkpoint", str(run), "--data", str(corpus), "--rows", "20", "--until-se", "1e-9"]
    assert evaluate.main([*asked, "--json", str(tmp_path / "out.json")]) == 1
    assert "--until-se 1e-09 was not reached with 4 draws of each row" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())["num_draws"] == 4  # the figures are there all the same


def test_a_network_without_numbers_is_told(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = perplexity.forward
    monkeypatch.setattr(perplexity, "forward", lambda *given: forward(*given) * math.nan)
    asked = ["--checkpoint", str(run), "--data", str(corpus), "--rows", "20", "--until-se", "0.1"]
    assert evaluate.main(asked) == 2
    assert "its network gives numbers that are not finite, for 20 of 20 rows." in capsys.readouterr().err


def test_the_error_asked_for_is_that_of_a_difference(measured: Any, run: Path) -> None:
    """Of a checkpoint to itself there is none, so one pair of draws is enough."""
    found = measured("--until-se", "1e-9", "--rows", "20", which=("--compare", str(run), str(run)))
    assert found["num_draws"] == 2
    assert found["difference"]["se_mc"] == 0


def test_few_blocks_are_said_to_be_few(measured: Any) -> None:
    assert "16 rows, " in (said := perplexity.text(measured("--rows", "16")))
    assert "2 blocks (few: the errors are themselves uncertain; take more rows)" in said
    assert "few" not in perplexity.text(measured("--rows", "128"))


def test_a_newer_checkpoint_that_cannot_be_read_is_told(
    run: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = shutil.copytree(run, tmp_path / "copied")
    newer = copied / "checkpoints" / "step-999999"
    newer.mkdir()
    (newer / "manifest.json").write_text('{"format": ')
    assert evaluate.main(["--checkpoint", str(copied), "--data", str(corpus), "--rows", "20"]) == 0
    assert f"{newer} is passed over: its manifest cannot be read" in capsys.readouterr().err


def test_ctrl_c_ends_with_one_line(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(perplexity, "forward", interrupted)
    assert evaluate.main(["--checkpoint", str(run), "--data", str(corpus), "--rows", "20"]) == 130
    assert capsys.readouterr().err.endswith("interrupted: nothing was written\n")


def test_a_table_over_the_number_of_steps(measured: Any) -> None:
    found = measured("--num-times", "1", "10", "1000", "inf")
    assert [row["protocol"]["num_times"] for row in found["results"]] == [1, 10, 1000, "inf"]
    assert found["nelbo"] == found["results"][0]["nelbo"]
    assert found["results"][3]["nelbo"] == measured()["nelbo"]
    assert all(math.isfinite(row["nelbo"]) for row in found["results"])
    assert [row["protocol"]["t_min"] for row in found["results"]] == [None, None, None, 1e-3]


def test_rows_of_another_length_are_taken_as_they_are(measured: Any, tmp_path: Path, corpus: Path) -> None:
    from prepare_data import main as prepare

    asked = ["--input", str(corpus), "--output", str(tmp_path / "rows"), "--tokenizer", "bytes", "--length", "48"]
    assert prepare([*asked, "--workers", "1", "--validation-documents", "60"]) == 0
    found = measured(data=tmp_path / "rows")  # the folder that has the split, or the split
    assert found == measured(data=tmp_path / "rows" / "validation")
    assert (found["protocol"]["length"], found["protocol"]["trained_length"]) == (48, 32)
    manifest = json.loads((tmp_path / "rows" / "validation" / "manifest.json").read_text())
    assert found["bits_per_byte"] == pytest.approx(
        found["bits_per_token"] * manifest["tokens"] / manifest["text_bytes"]
    )
    assert found["protocol"]["detokenizer"] == manifest["detokenizer"]


MISTAKES = {
    "no checkpoint": (["--checkpoint", "/tmp"], "/tmp is neither a checkpoint (step-...) nor a run directory"),
    "no data": (["--data", "nowhere"], "--data: 'nowhere' does not exist"),
    "no rows": (["--rows", "0"], "--rows 0 must lie in 16 .. "),
    "one block and a part": (["--rows", "15"], "--rows 15 must lie in 16 .. "),
    "more rows": (["--rows", "100000"], "--rows 100000 must lie in 16 .. "),
    "T": (["--num-times", "0"], "--num-times 0: each must be at least 1"),
    "negative T": (["--num-times=-5"], "--num-times -5: each must be at least 1"),
    "T in words": (["--num-times", "10", "many"], "--num-times 10 many: each must be at least 1"),
    "T of counts": (["--estimator", "count", "--num-times", "5"], "--num-times 5 is for --estimator paper"),
    "draws": (["--samples-per-row", "0"], "--samples-per-row 0 must lie in 1 .. 1024"),
    "too many draws": (["--samples-per-row", "1025"], "--samples-per-row 1025 must lie in 1 .. 1024"),
    "error": (["--until-se", "0"], "--until-se 0.0 must be a number above 0"),
    "error nan": (["--until-se", "nan"], "--until-se nan must be a number above 0"),
    "batch": (["--batch", "0"], "--batch 0 must be at least 1"),
    "seed": (["--seed", "-1"], "--seed -1 must lie in 0 .. 2^64 - 1"),
    "json": (
        ["--json", "/nowhere/out.json"],
        "--json /nowhere/out.json cannot be written: there is no folder /nowhere; make it",
    ),
    "json folder": (["--json", "/tmp"], "--json /tmp cannot be written: it is a folder"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake(
    run: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    monkeypatch.setattr(perplexity, "load_model", lambda *_: pytest.fail("work has begun"))
    options, expected = MISTAKES[mistake]
    assert evaluate.main(["--checkpoint", str(run), "--data", str(corpus), *options]) == 2
    message = capsys.readouterr().err
    assert expected in message
    assert "Traceback" not in message
    assert "faults" not in message


def test_all_mistakes_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--checkpoint", str(run), "--data", "nowhere", "--num-times", "0", "--until-se", "-1", "--batch", "0"]
    assert evaluate.main(asked) == 2
    message = capsys.readouterr().err
    assert all(part in message for part in ("4 faults", "'nowhere' does not exist", "--num-times", "--until-se"))


def test_masks_by_count_are_not_for_a_network_that_is_told_the_time(
    tmp_path: Path, corpus: Path, train_run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_run("model.time_conditioning=true", "train.num_steps=1") == 0
    asked = ["--checkpoint", str(tmp_path / "run"), "--data", str(corpus), "--estimator", "count"]
    assert evaluate.main(asked) == 2
    assert "model.time_conditioning=true. Use --estimator paper." in capsys.readouterr().err
    assert evaluate.main(asked[:-2]) == 0


def test_shards_of_another_tokenizer(
    run: Path, tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from prepare_data import main as prepare

    asked = ["--input", str(corpus), "--output", str(tmp_path / "rows"), "--tokenizer", "text8", "--length", "32"]
    assert prepare([*asked, "--workers", "1"]) == 0
    assert evaluate.main(["--checkpoint", str(run), "--data", str(tmp_path / "rows")]) == 2
    assert "was tokenised with 'text8' (35 entries)" in capsys.readouterr().err


def test_a_failed_write_leaves_what_was_there(run: Path, corpus: Path, tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    file.write_text("before")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        assert (
            evaluate.main(["--checkpoint", str(run), "--data", str(corpus), "--rows", "20", "--json", str(file)]) == 2
        )
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert file.read_text() == "before"


def test_a_pipe_takes_the_figures_and_a_link_stays(run: Path, corpus: Path, tmp_path: Path) -> None:
    """Of a process that can write into the folder of the pipe, as root can into /dev: what is there must stay."""
    receive, send = os.pipe()
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "file"
    pipe.symlink_to(f"/proc/self/fd/{send}")  # as /dev/stdout is
    link.symlink_to(file)
    asked = ["--checkpoint", str(run), "--data", str(corpus), "--rows", "20", "--json"]
    assert [evaluate.main([*asked, str(place)]) for place in (pipe, link)] == [0, 0]
    os.close(send)
    with os.fdopen(receive) as read:
        assert json.loads(read.read()) == json.loads(file.read_text())
    assert pipe.is_symlink()
    assert link.is_symlink()


def started(rank: int, port: int, arguments: list[str]) -> subprocess.Popen[str]:
    """The script as a launcher of two processes would start it."""
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, str(ROOT / "mdlm_scale" / "evaluate.py"), f"--local_rank={rank}", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_ranks_of_a_launcher_and_their_end(run: Path, corpus: Path, tmp_path: Path) -> None:
    """Two that agree: one of them speaks. Then the second is asked for other rows: both end with that."""
    asked = ["--checkpoint", str(run), "--data", str(corpus), "--json", str(tmp_path / "out.json"), "--rows"]
    for others, codes in (("20", [0, 0]), ("21", [2, 2])):
        port = free_port()
        ranks = [started(rank, port, [*asked, rows]) for rank, rows in enumerate(("20", others))]
        said = [rank.communicate(timeout=120) for rank in ranks]
        assert [rank.returncode for rank in ranks] == codes, said
        if codes == [0, 0]:
            assert "20 rows" in said[0][0]
            assert said[1][0] == ""
            assert json.loads((tmp_path / "out.json").read_text())["num_rows"] == 20
        else:
            fault = "rows is 20 on rank 0 and 21 on rank 1"
            assert (said[0][1] + said[1][1]).count(fault) == 1, said  # by whoever was first to find it
