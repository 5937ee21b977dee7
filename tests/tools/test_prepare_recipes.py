"""Recipes: detokenisers give ordinary writing, and every dataset of the table is prepared from local copies."""

import importlib
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from prepare_recipes import RECIPES, detokenizer

from mdlm_scale.data.texts import PYTHON_VALIDATION, python_documents

NUM_DOCUMENTS = {"train": 5, "validation": 3, "test": 4}  # of the files as the hub has them
HUB: dict[str, tuple[str, str, dict[str, int]]] = {  # folder and field there, and how many documents are ours
    "openwebtext": ("", "text", {"train": 3, "validation": 2}),
    "lm1b": ("", "text", {"train": 5, "validation": 4}),
    "text8": ("", "text", {"train": 5, "validation": 3}),
    "wikitext": ("wikitext-103-raw-v1", "text", {"train": 5, "validation": 3}),
    "ptb": ("", "sentence", {"train": 5, "validation": 3}),
    "lambada": ("default", "text", {"validation": 4}),
    "ag_news": ("", "text", {"train": 5, "validation": 4}),
    "scientific_papers_arxiv": ("arxiv", "article", {"train": 5, "validation": 3}),
    "scientific_papers_pubmed": ("pubmed", "article", {"train": 5, "validation": 3}),
}


def prepare(output: Path, *arguments: object) -> int:
    settings = ("--output", output, "--tokenizer", "bytes", "--length", 16, "--workers", 1)
    return importlib.import_module("prepare_data").main([*map(str, (*arguments, *settings))])


def manifests(output: Path) -> dict[str, dict]:
    """Split to manifest."""
    return {path.parent.name: json.loads(path.read_text()) for path in output.glob("*/manifest.json")}


def write(path: Path, column: str, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"label": [0] * len(texts), column: texts}), path)
    else:
        path.write_text("".join(json.dumps({"label": 0, column: text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each recipe, with files named as on the hub, and with those of another configuration if it has."""
    root = tmp_path_factory.mktemp("copies")
    for number, (name, (config, field, _)) in enumerate(HUB.items()):
        suffix = ("parquet", "jsonl")[number % 2]
        for split in ("train",) if name == "openwebtext" else NUM_DOCUMENTS:
            texts = [f"{split} {i}" for i in range(NUM_DOCUMENTS[split])]
            if config:
                write(root / name / config / split / f"0000.{suffix}", field, texts)
                write(root / name / "other" / split / f"0000.{suffix}", field, texts)
            else:
                write(root / name / f"{split}-00000-of-00001.{suffix}", field, texts)
    return root


@pytest.mark.parametrize(
    ("name", "written", "meant"),
    [
        ("none", "as ( it ) is , .", "as ( it ) is , ."),
        ("wikitext", 'a 1 @,@ 000 foot @-@ high hill " is " ( big ) .', 'a 1,000 foot-high hill "is" (big) .'),
        ("wikitext", "rain , then ; sun : yes ! no ? so . it is", "rain, then; sun: yes! no? so. it is"),
        ("wikitext", "2 @.@ 5 ° C in [ a ] { b } \n next", "2.5°C in [a] {b}\nnext"),
        ("wikitext", " = = Plot = = \n = = = End = = = \n", " == Plot ==\n=== End ===\n"),
        ("wikitext", "the boys ' hats", "the boys' hats"),
        ("wikitext", "Tom 's N hats", "Tom's 1 hats"),
        ("wikitext", "the ' old ' hat", "the 'old' hat"),
        ("ptb", "it 's the traders ' view they do n't", "it's the traders' view they don't"),
        ("ptb", "pay $ N or # N and N N <unk> 1\\/2", "pay $1 or #1 and 1 1 ? 1/2"),
        ("ptb", "one \n two", "one\ntwo"),
        ("lm1b", "see http : / / a.b and https : / / c", "see http://a.b and https://c"),
        ("lm1b", "he 's here . So , and / or ( no ) [ x ] !", "he's here. So, and/or (no) [x]!"),
        ("lm1b", "why ? well : so ; oh ! it ended .", "why? well: so; oh! it ended."),
        ("lm1b", "\" yes \" or ' no ' for $ 5 and £ 6 ?", "\"yes\" or 'no' for $5 and £6?"),
        ("lambada", "  “ Hi , ” she said \n", '\n" Hi , " she said'),
    ],
)
def test_detokenizer_gives_ordinary_writing(name: str, written: str, meant: str) -> None:
    assert detokenizer(name)(written) == meant


def test_wikitext_comes_before_lm1b_where_both_are_asked_for() -> None:
    """The first takes the space before a colon, so that the second knows no address any more."""
    written = "at http : / / x 2 @-@ 3 ?"
    found = detokenizer("wikitext+lm1b")(written)
    assert found == "at http:// x 2-3?"
    assert found != detokenizer("wikitext")(detokenizer("lm1b")(written))


@pytest.mark.parametrize("name", HUB)
def test_recipe_is_prepared_from_local_copies(copies: Path, tmp_path: Path, name: str) -> None:
    """Through the field and split names of the dataset; of openwebtext two documents are for validation."""
    last = ["--validation-documents", 2] if name == "openwebtext" else []
    assert prepare(tmp_path / "out", "--recipe", name, "--input", copies / name, *last) == 0
    assert {split: told["documents"] for split, told in manifests(tmp_path / "out").items()} == HUB[name][2]


def test_python_needs_no_files(tmp_path: Path) -> None:
    assert prepare(tmp_path / "out", "--recipe", "python") == 0
    num_train = len(python_documents()) - PYTHON_VALIDATION
    found = {split: told["documents"] for split, told in manifests(tmp_path / "out").items()}
    assert found == {"train": num_train, "validation": PYTHON_VALIDATION}


def test_every_recipe_is_tested() -> None:
    assert {*HUB, "python"} == {*RECIPES}


def test_recipe_brings_its_detokenizer_and_wrapping(copies: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "out", "--recipe", "lm1b", "--input", copies / "lm1b", "--split", "validation")
    told = manifests(tmp_path / "out")["validation"]
    assert (told["detokenizer"], told["wrapping"]["padded"]) == ("lm1b", True)


def test_only_the_splits_that_are_chosen_are_written(copies: Path, tmp_path: Path) -> None:
    prepare(tmp_path / "out", "--recipe", "ag_news", "--input", copies / "ag_news", "--split", "train")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["train"]


def test_folders_above_the_input_do_not_name_a_split(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write(tmp_path / "train" / "ag_news" / f"{split}.jsonl", "text", [split] * NUM_DOCUMENTS[split])
    prepare(tmp_path / "out", "--recipe", "ag_news", "--input", tmp_path / "train" / "ag_news")
    found = {split: told["documents"] for split, told in manifests(tmp_path / "out").items()}
    assert found == {"train": 5, "validation": 4}


def test_configuration_is_found_from_within_its_parent(
    copies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copies / "scientific_papers_arxiv")
    prepare(tmp_path / "out", "--recipe", "scientific_papers_arxiv", "--input", ".", "--split", "train")
    assert manifests(tmp_path / "out")["train"]["documents"] == 5


@pytest.mark.parametrize(
    ("name", "split", "complaint"),
    [
        ("wikitext", [], "--recipe wikitext: no file for validation ('valid(ation)?' in its name)"),
        ("lambada", ["--split", "train"], "--recipe lambada"),
    ],
    ids=["no such file", "no such split"],
)
def test_missing_split_is_named(
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    name: str,
    split: list[str],
    complaint: str,
) -> None:
    root = tmp_path_factory.mktemp("missing")
    write(root / "train.jsonl", "text", ["one"])
    assert prepare(root / "out", "--recipe", name, "--input", root / "train.jsonl", *split) == 2
    assert complaint in capsys.readouterr().err


def test_dataset_that_cannot_be_fetched_asks_for_local_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert prepare(tmp_path / "out", "--recipe", "openwebtext") == 2
    assert "'Skylion007/openwebtext' could not be fetched" in capsys.readouterr().err
