"""Documents out of files: each kind gives its texts in order, however it is cut, and a fault names file and line."""

import ast
import gzip
import inspect
import json
from pathlib import Path
from pydoc_data.topics import topics

import prepare_documents as documents
import pyarrow
import pyarrow.parquet
import pytest
from prepare_documents import Texts

from mdlm_scale.errors import DataError

TEXTS = [
    "the first",
    "größer als 猫",
    "a tab\tand  spaces ",
    "4",
    '"quoted", {braced}',
    "a longer one, number six",
    "7",
]
NAMES = ("a.txt", "a.txt.gz", "a.txt.zst", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")
LINES = ("a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.zst")


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, codec="zstd", asbytes=True)


def write(path: Path, texts: list[str]) -> Path:
    """The texts as a file of the kind that its name says."""
    if path.suffix == ".parquet":
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, path, row_group_size=3)
        return path
    records = [json.dumps({"id": i, "text": text}) for i, text in enumerate(texts)] if ".jsonl" in path.name else texts
    data = "".join(record + "\n" for record in records).encode()
    path.write_bytes({".gz": gzip.compress, ".zst": zstd}.get(path.suffix, bytes)(data))
    return path


def read(
    *inputs: Path | str, start: int = 0, stop: int | None = None, strict: bool = False, whole_files: bool = False
) -> Texts:
    """All documents of the inputs, or those of the records start .. stop-1."""
    blocks = documents.part(documents.blocks(documents.find([*map(str, inputs)], whole_files=whole_files)), start, stop)
    found = [documents.read(block, "text", strict=strict) for block in blocks]
    return Texts(
        [text for part in found for text in part.texts],
        sum(part.num_empty for part in found),
        sum(part.num_replaced for part in found),
    )


@pytest.fixture(params=[1, 20, 64])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a block a line to several lines a block; the texts take some 100 bytes, and 250 as JSON."""
    monkeypatch.setattr(documents, "BLOCK_BYTES", request.param)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_gives_its_texts_in_order(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, TEXTS)).texts == TEXTS


def test_only_a_newline_ends_a_document(tmp_path: Path) -> None:
    text = "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g\rh"
    assert read(write(tmp_path / "a.txt", [text, "b"])).texts == [text, "b"]


def test_carriage_return_before_a_newline_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\r\ntwo\r\n")
    assert read(tmp_path / "a.txt").texts == ["one", "two"]


def test_last_line_needs_no_newline(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo")
    assert read(tmp_path / "a.txt").texts == ["one", "two"]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_records_without_text_are_counted_and_no_documents(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, ["", "one", " \t", "two", ""])) == Texts(["one", "two"], 3, 0)


def test_blank_line_between_json_records_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two"}\n')
    assert read(tmp_path / "a.jsonl").texts == ["one", "two"]


def test_folder_is_its_files_in_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "c/d/e.parquet", "a/b.txt.zst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / name, [name])
    assert read(tmp_path).texts == ["a/b.txt.zst", "a/z.jsonl.gz", "b.txt", "c/d/e.parquet"]


def test_folder_gives_only_files_of_known_kinds(tmp_path: Path) -> None:
    for name in ("a.txt", "README", "b.csv", "c.gz", "d.txt.bak"):
        (tmp_path / name).write_text(name + "\n")
    assert read(tmp_path).texts == ["a.txt"]


def test_file_of_unknown_kind_that_is_named_is_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "enwik8", TEXTS)).texts == TEXTS


def test_inputs_come_in_the_order_given(tmp_path: Path) -> None:
    first, second = write(tmp_path / "z.txt", ["one"]), write(tmp_path / "a.txt", ["two"])
    assert read(first, second).texts == ["one", "two"]


def test_whole_file_is_one_document(tmp_path: Path) -> None:
    names = ("a.txt", "b.txt.gz")
    for name in names:
        write(tmp_path / name, ["one", "", "two"])
    assert read(tmp_path, whole_files=True).texts == ["one\n\ntwo\n"] * 2


def test_python_is_its_help_topics_and_the_doc_strings_of_its_library() -> None:
    found = read(documents.PYTHON).texts
    assert topics["assert"] in found
    assert sum(str(inspect.getdoc(ast.get_docstring)) in text for text in found) == 1


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", LINES)
def test_blocks_of_any_size_give_the_same_documents(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / name, TEXTS)).texts == TEXTS


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", NAMES)
def test_every_record_lies_in_one_block(tmp_path: Path, name: str) -> None:
    blocks = list(documents.blocks(documents.find([str(write(tmp_path / name, TEXTS))])))
    assert len(blocks) > 1
    assert [i for block in blocks for i in range(block.first, block.first + block.num_records)] == [*range(len(TEXTS))]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("cut", range(len(TEXTS) + 1))
@pytest.mark.parametrize("name", NAMES)
def test_parts_are_the_whole_wherever_it_is_cut(tmp_path: Path, name: str, cut: int) -> None:
    path = write(tmp_path / name, TEXTS)
    assert (read(path, stop=cut).texts, read(path, start=cut).texts) == (TEXTS[:cut], TEXTS[cut:])


def test_part_may_begin_and_end_in_different_files(tmp_path: Path) -> None:
    for name in ("a.txt", "b.parquet", "c.jsonl"):
        write(tmp_path / name, TEXTS)
    assert read(tmp_path, start=5, stop=16).texts == (TEXTS * 3)[5:16]


def test_bytes_that_are_no_text_are_replaced_and_counted(tmp_path: Path) -> None:
    """The second line holds a replacement character of its own, which is text."""
    (tmp_path / "a.txt").write_bytes(b"one\xff\n\xef\xbf\xbd\n\xc3 and \xfe\n")
    assert read(tmp_path / "a.txt") == Texts(["one\ufffd", "\ufffd", "\ufffd and \ufffd"], 0, 3)


@pytest.mark.parametrize("cut", range(4))
def test_bytes_that_are_replaced_are_counted_where_they_are(tmp_path: Path, cut: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\n\xff\n\xff\n")
    parts = read(tmp_path / "a.txt", stop=cut), read(tmp_path / "a.txt", start=cut)
    assert [part.num_replaced for part in parts] == [cut, 3 - cut]


def test_half_a_surrogate_pair_is_replaced_and_counted(tmp_path: Path) -> None:
    """JSON can spell it, and json.dumps does; UTF-8 and tokenizers cannot."""
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d"}\n{"text": "\\ud83d\\ude00"}\n')
    assert read(tmp_path / "a.jsonl") == Texts(["a\ufffd", "😀"], 0, 1)


FAULTS = {
    "zero byte": ("a.txt", b"one\ntwo\nth\0ree\n", ["a.txt', line 3: a zero byte"]),
    "not UTF-8": ("a.txt", b"one\ntwo\n\xff\n", ["a.txt', line 3: invalid start byte", "--strict"]),
    "no UTF-8 in JSON": ("a.jsonl", b'{"text": "one"}\n{"text": "\xff"}\n', ["a.jsonl', line 2: invalid start byte"]),
    "half a pair": ("a.jsonl", b'{"text": "one"}\n{"text": "\\ud83d"}\n', ["a.jsonl', line 2"]),
    "no field": (
        "a.jsonl",
        b'{"text": "one"}\n\n{"id": 3, "body": "x"}\n',
        ["a.jsonl', line 3: no field 'text'; it has id, body", "--field"],
    ),
    "no object": ("a.jsonl", b'["text"]\n', ["line 1: no field 'text'", "['text']"]),
    "no JSON": ("a.jsonl", b'{"text": "one"}\n{"text": "tw\n', ["a.jsonl', line 2: not JSON"]),
    "too deep": ("a.jsonl", b'{"text": "one"}\n' + b"[" * 100_000 + b"\n", ["a.jsonl', line 2: not JSON"]),
    "no text": ("a.jsonl", b'{"text": 7}\n', ["a.jsonl', line 1: field 'text' is not text but 7"]),
    "several": ("a.jsonl", b'{"text": null}\n{"text": "x"}\n{}\n[\n', ["3 faults", "line 1:", "line 3:", "line 4:"]),
    "truncated gzip": ("a.txt.gz", gzip.compress(b"one\n" * 99)[:-9], ["a.txt.gz' cannot be read"]),
    "corrupt gzip": ("a.txt.gz", gzip.compress(b"one\n")[:10] + b"\xff" * 20, ["a.txt.gz' cannot be read"]),
    "no gzip": ("a.txt.gz", b"one\n", ["a.txt.gz' cannot be read"]),
    "truncated zstd": ("a.txt.zst", zstd(b"one\n" * 99)[:-3], ["a.txt.zst' cannot be read"]),
    "no Parquet": ("a.parquet", b"one\n", ["a.parquet' is not a Parquet file"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_names_file_and_line(tmp_path: Path, fault: str) -> None:
    name, data, complaints = FAULTS[fault]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as caught:
        read(tmp_path / name, strict=True)
    assert [complaint for complaint in complaints if complaint not in str(caught.value)] == []


@pytest.mark.parametrize("start", [0, 1, 5])
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("a.txt", b"text\n", b"te\0xt\n"),
        ("a.txt", b"text\n", b"te\xffxt\n"),
        ("a.jsonl", b'{"text": "a"}\n', b'{"body": "b"}\n'),
    ],
    ids=["zero byte", "not UTF-8", "no field"],
)
def test_lines_are_counted_from_the_start_of_the_file(
    tmp_path: Path, name: str, good: bytes, bad: bytes, start: int
) -> None:
    (tmp_path / name).write_bytes(good * 8 + bad + good)
    with pytest.raises(DataError, match="line 9:"):
        read(tmp_path / name, start=start, strict=True)


@pytest.mark.parametrize(
    ("columns", "complaints"),
    [
        ({"id": [1], "body": ["x"]}, ["has no column 'text'; it has id, body", "--field"]),
        ({"text": ["a", "b", "c", "d", None]}, ["row 4: text is NoneType, not text"]),
        ({"text": [1, 2]}, ["2 faults", "row 0: text is int", "row 1: text is int"]),
    ],
    ids=["no column", "null", "numbers"],
)
def test_column_that_is_no_text_is_told(
    tmp_path: Path, columns: dict[str, list[object]], complaints: list[str]
) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=3)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "a.parquet")
    assert [complaint for complaint in complaints if complaint not in str(caught.value)] == []


def test_all_inputs_that_are_not_there_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        read(tmp_path / "missing.txt", tmp_path / "empty", tmp_path / "away")
    complaints = ["3 faults", "no file or folder '" + str(tmp_path / "missing.txt"), "empty' holds no .txt", "away'"]
    assert [complaint for complaint in complaints if complaint not in str(caught.value)] == []
