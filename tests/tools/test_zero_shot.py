"""The zero-shot suite: rows by the paper's protocol, prepared once for each tokenizer, evaluated like any others."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import TEXT, Train
from prepare_recipes import RECIPES

from mdlm_scale import evaluate
from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import shards, source, tokenizer

PAPER = {  # zero-shot perplexities as they are published
    "ptb": 95.26, "wikitext": 32.83, "lm1b": 67.01, "lambada": 47.52, "ag_news": 61.15, "pubmed": 41.89, "arxiv": 37.37,
}  # fmt: skip
NUM_LINES = 190  # some eighteen rows of 1024 bytes


@pytest.fixture
def suite() -> ModuleType:
    return importlib.import_module("zero_shot")


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Local copies: a folder as on the hub, and a file that is the split; what is made goes to another folder."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "inputs"
    (folder / "ptb").mkdir(parents=True)
    for split, first in {"train": "never read", "validation": "it is n't <unk>"}.items():
        lines = [first, *(TEXT.format(number) for number in range(NUM_LINES - 1))]
        text = "".join(json.dumps({"sentence": line}) + "\n" for line in lines)
        (folder / "ptb" / f"{split}-00000-of-00001.jsonl").write_text(text)
    lines = ["Well , he said .", "Who ?", *(TEXT.format(number) for number in range(NUM_LINES - 2))]
    (folder / "lm1b.txt").write_text("".join(line + "\n" for line in lines))
    return folder


def text_of(folder: Path) -> str:
    """All rows of bytes as one text."""
    rows = source.Source([source.mapped(shards.read_folder(folder))])
    x_BL, is_token_BL = rows.rows(np.arange(rows.num_rows))
    decode = tokenizer.load(TokenizerConfig(name="bytes")).decode
    inner = [x_L[is_token_L][1:-1].tolist() for x_L, is_token_L in zip(x_BL, is_token_BL, strict=True)]
    return "".join(map(decode, inner))


def ask(suite: ModuleType, *arguments: object) -> int:
    return suite.main([*map(str, arguments)])


def made(key: str) -> Path:
    [folder] = Path("data/zero_shot", key).iterdir()
    return folder


def test_the_table_and_how_its_rows_were_made(
    train_run: Train, suite: ModuleType, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_run() == 0
    capsys.readouterr()
    assert ask(suite, "--checkpoint", "run", "--input", inputs, "--only", "ptb", "lm1b", "--json", "table.json") == 0
    said = capsys.readouterr()
    assert "was trained on rows of 32 tokens, not of 1024" in said.err
    told = json.loads(Path("table.json").read_text())["data_sets"]
    assert [row["name"] for row in told] == ["PTB", "LM1B"]
    for row, key in zip(told, ("ptb", "lm1b"), strict=True):
        manifest = shards.read_folder(made(key)).manifest
        assert manifest["documents"] == NUM_LINES
        assert (manifest["length"], manifest["detokenizer"], manifest["tokenizer"]["name"]) == (1024, key, "bytes")
        assert manifest["wrapping"] == {"padded": False, "document_end": False, "row_ends": True}
        assert (row["rows"], row["tokens"]) == (manifest["rows"], manifest["tokens"])
        assert row["paper_ppl"] == PAPER[key]
        table = f"{row['ppl']:.2f} +- {row['ppl_se']:.2f}"
        assert any(table in line and line.endswith(str(PAPER[key])) for line in said.out.splitlines())
        # the same protocol as by hand
        assert evaluate.main(["--checkpoint", "run", "--data", str(made(key)), "--json", "one.json"]) == 0
        assert json.loads(Path("one.json").read_text())["nelbo"] == row["nelbo"]
    assert "weights, per token of bytes" in said.out
    assert "per token of GPT-2; published, not measured here" in said.out
    assert text_of(made("ptb")).startswith("it isn't ?" + TEXT.format(0) + TEXT.format(1))
    assert text_of(made("lm1b")).startswith("Well, he said.Who?" + TEXT.format(0))


def test_rows_that_are_there_are_used_and_others_refused(
    train_run: Train, suite: ModuleType, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_run() == 0
    asked = ("--checkpoint", "run", "--only", "lm1b")
    assert ask(suite, *asked, "--input", inputs) == 0
    table = capsys.readouterr().out
    before = (made("lm1b") / shards.MANIFEST).stat().st_mtime_ns
    moved = inputs.rename(inputs.with_name("elsewhere"))
    assert ask(suite, *asked) == 0  # nothing is read from the hub
    assert ask(suite, *asked, "--input", moved) == 0
    assert capsys.readouterr().out == table * 2
    assert (made("lm1b") / shards.MANIFEST).stat().st_mtime_ns == before
    (moved / "lm1b.txt").write_text("another text\n" * 1000)
    assert ask(suite, *asked, "--input", moved) == 2
    assert "holds rows of LM1B that were made with another source. Remove it" in capsys.readouterr().err


def test_what_is_missing_is_fetched_and_only_its_split_prepared(
    suite: ModuleType, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub itself is not asked here: its files as it would leave them on this machine are."""
    asked = []
    monkeypatch.setattr("prepare_data.fetched", lambda recipe: asked.append(recipe.hub) or str(inputs / "ptb"))
    job = suite.job_of("ptb", None, tokenizer.load(TokenizerConfig(name="bytes")))
    job.prepare()
    assert asked == ["ptb-text-only/ptb_text_only"]
    assert text_of(job.folder).startswith("it isn't ?")


def test_all_faults_are_told_before_anything_is_made(
    train_run: Train, suite: ModuleType, inputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(suite, "--checkpoint", "nowhere", "--input", inputs, "--json", "no/where.json") == 2
    said = capsys.readouterr().err
    assert "--json no/where.json cannot be written" in said
    assert "nowhere does not exist. Give the run.dir of a run" in said
    assert train_run() == 0
    assert ask(suite, "--checkpoint", "run", "--input", "elsewhere", "--samples-per-row", "9999") == 2
    said = capsys.readouterr().err
    assert "--input elsewhere is no folder. Leave it out to fetch what is missing." in said
    assert "--samples-per-row 9999 must be at most 1024." in said
    (inputs / "ptb" / "validation-00000-of-00001.jsonl").unlink()
    assert ask(suite, "--checkpoint", "run", "--input", inputs) == 2
    said = capsys.readouterr().err
    assert "no file for validation" in said
    for name in ("AG News", "arXiv", "LAMBADA", "PubMed", "WikiText"):
        assert f"holds nothing for {name}: neither a folder" in said
    (inputs / "ag_news.txt").write_text("too short\n")
    assert not Path("data").exists()
    assert ask(suite, "--checkpoint", "run", "--input", inputs, "--only", "ag_news", "lm1b") == 2
    said = capsys.readouterr()
    assert "has 1 row(s); a standard error needs 16" in said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "enwik8"), "invalid choice: 'enwik8'"),
        (("--rows", "8"), "--rows 8 must be at least 16"),
        (("--batch", "0"), "--batch 0 must be at least 1"),
        (("--samples-per-row", "0"), "--samples-per-row 0 must be at least 1"),
    ],
)
def test_bad_arguments_are_told(
    suite: ModuleType, given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        ask(suite, "--checkpoint", "run", *given)
    assert message in capsys.readouterr().err


def test_each_tokenizer_has_rows_of_its_own(suite: ModuleType, inputs: Path) -> None:
    folders = {
        suite.job_of("lm1b", inputs, tokenizer.load(TokenizerConfig(name=name))).folder for name in ("bytes", "text8")
    }
    assert len(folders) == 2


def test_every_data_set_is_the_papers(suite: ModuleType) -> None:
    own: Any = tokenizer.load(TokenizerConfig(name="bytes"))
    jobs = {key: suite.job_of(key, None, own) for key in suite.FILES}
    assert {key: job.data.paper for key, job in jobs.items()} == PAPER
    assert {job.data.length for job in jobs.values()} == {1024}
    assert all(job.data.split in RECIPES[job.data.recipe].splits for job in jobs.values())
    assert all(job.settings.detokenizer != "none" for job in jobs.values())
