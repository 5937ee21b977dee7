"""Preparing data: the same bytes whoever makes them, all of the text, or nothing and one clear message."""

import fcntl
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import prepare_documents as documents
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mdlm_scale.config import TokenizerConfig
from mdlm_scale.data import cache, shards
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, Records

TOOL = Path(__file__).resolve().parents[2] / "tools" / "prepare_data.py"
LENGTH, SHARD_BYTES = 16, 1034  # 20 rows and a header of 226 bytes fill a shard to the last byte
BYTES = tokenizer_module.load(TokenizerConfig(name="bytes"))
TEXTS = [f"{number}: größer als 猫, " + "or longer " * (number * 7 % 11) for number in range(60)]
WAYS = {"stream": [], "padded": ["--padded"], "zstd": ["--zstd"]}
BYTES_16 = ("--tokenizer", "bytes", "--length", LENGTH)


def prepare(*arguments: object, block_bytes: int = 500) -> int:
    """The tool in this process; blocks are small, so that each worker gets some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_BYTES", block_bytes)
        return importlib.import_module("prepare_data").main([*map(str, arguments)])


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(folder: Path) -> Records:
    told = shards.read_folder(folder)
    data = [(np.fromfile(folder / file.name, np.uint8), file) for file in told.files]
    rows = [shards.rows_of(bytes_, file, told.record, file.name, verify=True) for bytes_, file in data]
    return np.concatenate([part.copy().view(told.record)[:, 0] for part in rows])


def manifest_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "texts.txt"
    path.write_text("".join(text + "\n" for text in TEXTS))
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, source: Path) -> dict[str, Path]:
    """The texts in each way, by two workers."""
    root = tmp_path_factory.mktemp("prepared")
    for way, flags in WAYS.items():
        settings = (*BYTES_16, "--workers", 2, "--shard-mb", SHARD_BYTES / 1e6, *flags)
        assert prepare("--input", source, "--output", root / way, *settings) == 0
    return {way: root / way for way in WAYS}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_number_of_workers_does_not_change_a_byte(
    prepared: dict[str, Path], source: Path, tmp_path: Path, way: str, workers: int
) -> None:
    settings = (*BYTES_16, "--workers", workers, "--shard-mb", SHARD_BYTES / 1e6, *WAYS[way])
    assert prepare("--input", source, "--output", tmp_path / "out", *settings) == 0
    assert contents(tmp_path / "out") == contents(prepared[way])


def test_stream_is_every_document_once_and_in_order(prepared: dict[str, Path]) -> None:
    rows = rows_of(prepared["stream"])
    stream = [int(i) for row, n in zip(rows[TOKENS], rows[NUM_TOKENS], strict=True) for i in row[1 : n - 1]]
    assert BYTES.decode(stream) == "".join(text + "[EOS]" for text in TEXTS)


def test_padded_rows_are_every_document_once_and_in_order(prepared: dict[str, Path]) -> None:
    ids = rows_of(prepared["padded"])[TOKENS].flatten()
    assert BYTES.decode(ids[ids < 256].tolist()) == "".join(TEXTS)


def test_last_documents_are_for_validation(source: Path, tmp_path: Path) -> None:
    prepare("--input", source, "--output", tmp_path / "out", *BYTES_16, "--validation-documents", 7, "--padded")
    found = [rows_of(tmp_path / "out" / split)[TOKENS].flatten() for split in ("train", "validation")]
    texts = [BYTES.decode(ids[ids < 256].tolist()) for ids in found]
    assert texts == ["".join(TEXTS[:-7]), "".join(TEXTS[-7:])]


@pytest.mark.parametrize("way", ["stream", "zstd"])
def test_streaming_reads_the_rows(
    prepared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    cache._streaming()
    from streaming.base import StreamingDataset

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # it leaves files there
    dataset = StreamingDataset(remote=str(prepared[way]), local=str(tmp_path / "local"), batch_size=1)
    records = [dataset[i] for i in range(len(dataset))]
    rows = rows_of(prepared["stream"])
    assert [record[TOKENS].tolist() for record in records] == rows[TOKENS].tolist()
    assert [int(record[NUM_TOKENS]) for record in records] == rows[NUM_TOKENS].tolist()


@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, SHARD_BYTES - 1], ids=["to the last byte", "a byte too few"])
def test_shards_and_index_are_those_of_streamings_own_writer(source: Path, tmp_path: Path, shard_bytes: int) -> None:
    cache._streaming()
    from streaming.base import MDSWriter

    prepare("--input", source, "--output", tmp_path / "ours", *BYTES_16, "--shard-mb", shard_bytes / 1e6)
    columns = {TOKENS: f"ndarray:uint16:{LENGTH}", NUM_TOKENS: "uint32"}
    settings = {"columns": columns, "hashes": ["sha256", "xxh64"], "size_limit": shard_bytes}
    with MDSWriter(out=str(tmp_path / "theirs"), **settings) as writer:
        for row in rows_of(tmp_path / "ours"):
            writer.write({TOKENS: row[TOKENS], NUM_TOKENS: int(row[NUM_TOKENS])})
    (tmp_path / "ours" / "manifest.json").unlink()
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_manifest_tells_how_the_rows_were_made(prepared: dict[str, Path], source: Path) -> None:
    told = manifest_of(prepared["padded"])
    made_from = {
        "source": [{"file": str(source), "bytes": source.stat().st_size}],
        "records": [0, None],
        "length": LENGTH,
        "wrapping": {"padded": True, "document_end": True, "row_ends": True},
        "column": "text",
        "detokenizer": "none",
        "compress": False,
    }
    assert {key: told[key] for key in made_from} == made_from


def test_manifest_tells_the_tokenizer(prepared: dict[str, Path]) -> None:
    ids = {"mask_id": 259, "pad_id": 258, "bos_id": 256, "eos_id": 257, "vocab_size": 260}
    told = manifest_of(prepared["stream"])["tokenizer"]
    assert told == {"name": "bytes", "fingerprint": BYTES.fingerprint, **ids}


def test_manifest_counts_what_is_there(prepared: dict[str, Path]) -> None:
    told, rows = manifest_of(prepared["stream"]), rows_of(prepared["stream"])
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    counted = {"documents": len(TEXTS), "empty_documents": 0, "replaced_characters": 0, "text_bytes": num_bytes}
    counted |= {"text_tokens": num_bytes, "rows": len(rows), "tokens": int(rows[NUM_TOKENS].sum())}
    assert {key: told[key] for key in counted} == counted


@pytest.mark.parametrize("way", WAYS)
def test_manifest_names_the_hash_of_each_shard(prepared: dict[str, Path], way: str) -> None:
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in prepared[way].glob("shard.*")}
    assert len(files) > 1
    assert {shard["file"]: shard["sha256"] for shard in manifest_of(prepared[way])["shards"]} == files


def test_prepared_data_is_found_and_left_alone(prepared: dict[str, Path], source: Path) -> None:
    folder = prepared["stream"]
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    assert prepare("--input", source, "--output", folder, *BYTES_16, "--shard-mb", SHARD_BYTES / 1e6) == 0
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (["--length", 32], "length"),
        (["--tokenizer", "text8"], "tokenizer"),
        (["--input", __file__], "source"),
        (["--no-row-ends"], "wrapping"),
        (["--detokenizer", "lm1b"], "detokenizer"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_output_with_other_shards_is_refused(
    prepared: dict[str, Path], source: Path, capsys: pytest.CaptureFixture[str], other: list[object], name: str
) -> None:
    before = contents(prepared["stream"].parent)
    settings = ("--input", source, *BYTES_16, "--shard-mb", SHARD_BYTES / 1e6, *other)
    assert prepare("--output", prepared["stream"], *settings) == 2
    assert f"holds other shards, made with another {name}." in capsys.readouterr().err
    assert contents(prepared["stream"].parent) == before


def test_output_that_is_being_written_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "shard.00000.mds").write_bytes(b"theirs")
    lock = os.open(tmp_path / "out.tmp", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)  # theirs would be exclusive; ours must be refused by either
    assert prepare("--input", source, "--output", tmp_path / "out", *BYTES_16) == 2
    os.close(lock)
    assert "another process is writing" in capsys.readouterr().err
    assert contents(tmp_path) == {"out.tmp/shard.00000.mds": b"theirs"}


def test_verify_accepts_what_was_prepared(prepared: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare("--verify", prepared["zstd"]) == 0
    assert "as they were made" in capsys.readouterr().out


def test_verify_finds_the_splits_of_a_folder(
    prepared: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "validation"):
        shutil.copytree(prepared["stream"], tmp_path / "mine" / split)
    assert prepare("--verify", tmp_path / "mine", prepared["zstd"]) == 0
    assert capsys.readouterr().out.count("as they were made") == 3


@pytest.mark.parametrize(
    ("way", "flipped", "truncated"),
    [("stream", [1], []), ("zstd", [1], []), ("stream", [], [1]), ("stream", [0, 2], []), ("stream", [0], [2])],
    ids=["flipped", "flipped zstd", "truncated", "two flipped", "flipped and truncated"],
)
def test_verify_names_every_shard_that_is_damaged(
    prepared: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    way: str,
    flipped: list[int],
    truncated: list[int],
) -> None:
    shutil.copytree(prepared[way], tmp_path, dirs_exist_ok=True)
    paths = sorted(tmp_path.glob("shard.*"))
    for number in flipped:
        data = paths[number].read_bytes()
        paths[number].write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    for number in truncated:
        paths[number].write_bytes(paths[number].read_bytes()[:-1])
    assert prepare("--verify", tmp_path) == 2
    told = capsys.readouterr().err
    assert [i for i, path in enumerate(paths) if path.name in told] == sorted(flipped + truncated)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with files of every sort."""
    files = {
        "good.txt": b"one\ntwo\n", "empty.txt": b"", "blank.txt": b"\n \n", "zero.txt": b"one\nt\0wo\n",
        "latin.txt": b"one\nt\xe9\n", "body.jsonl": b'{"body": "one"}\n', "no.parquet": b"PAR1",
        "notes/todo.txt": b"mine\n",
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "void").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


MISTAKES = {
    "missing input": ("--input nowhere.txt", "there is no file or folder 'nowhere.txt'"),
    "empty input": ("--input empty.txt", "there is no text in empty.txt"),
    "blank input": ("--input blank.txt", "there is no text in blank.txt (2 empty records)"),
    "not text": ("--input zero.txt", "'zero.txt', line 2: a zero byte"),
    "strict": ("--input good.txt latin.txt --strict", "'latin.txt', line 2"),
    "no field": ("--input body.jsonl", "'body.jsonl', line 1: no field 'text'; it has body."),
    "no Parquet": ("--input no.parquet", "'no.parquet' is not a Parquet file"),
    "length": ("--input good.txt --length 2", "--length 2 must be at least 3"),
    "tokenizer": ("--input good.txt --tokenizer no/such/folder", "'no/such/folder' is no folder here"),
    "tokenizer folder": ("--input good.txt --tokenizer void", "'void' is a folder without a Hugging Face tokenizer"),
    "output is a file": ("--input good.txt --output empty.txt", "--output empty.txt is a file"),
    "output is below a file": ("--input good.txt --output empty.txt/out", "--output empty.txt/out cannot be written"),
    "output is in use": ("--input good.txt --output notes", "--output notes holds other files"),
    "validation": ("--input good.txt --validation-documents 2", "--validation-documents 2 must be less than the 2"),
    "late fault": ("--input good.txt zero.txt --output new/out", "'zero.txt', line 2: a zero byte"),
    "no shards": ("--verify notes", "'notes' is no folder of prepared rows"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_gets_one_message_and_nothing_is_written(
    place: Path, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    arguments, message = MISTAKES[mistake]
    before = sorted(place.rglob("*"))
    assert prepare("--output", "out", *BYTES_16, *arguments.split()) == 2
    told = capsys.readouterr().err
    assert (told.count("Error: "), message in told) == (1, True), told
    assert sorted(place.rglob("*")) == before


def test_output_that_has_no_name_is_refused(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "void")
    assert prepare("--input", "../good.txt", "--output", ".", *BYTES_16) == 2
    assert "--output ." in capsys.readouterr().err


@pytest.mark.parametrize("name", ["todo.txt", "folder/todo.txt"])
def test_folder_beside_the_output_that_is_not_ours_is_not_emptied(place: Path, name: str) -> None:
    (place / "out.tmp" / name).parent.mkdir(parents=True)
    (place / "out.tmp" / name).write_text("mine")
    assert prepare("--input", "good.txt", "--output", "out", *BYTES_16) == 2
    assert (place / "out.tmp" / name).read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--input good.txt --tokenizer bytes --length 16", "--output DIR is needed"),
        ("--output out --tokenizer bytes --length 16", "--input PATH or --recipe NAME is needed"),
        ("--output out --input good.txt --tokenizer bytes", "--tokenizer and --length are needed"),
        ("--output out --recipe python --workers 0", "--workers 0 must be at least 1"),
        ("--output out --recipe python --shard-mb 0", "--shard-mb 0.0 must lie between"),
        ("--output out --recipe nothing", "invalid choice: 'nothing'"),
    ],
    ids=["output", "input", "length", "workers", "shard size", "recipe"],
)
def test_call_that_lacks_something_is_told(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        prepare(*arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 65,540 words, its own mask in the middle of them."""
    words = ["[UNK]", "[EOS]", "[MASK]", *(f"w{number}" for number in range(3, 65_540))]
    theirs = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    theirs.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path_factory.mktemp("large")
    specials = {"unk_token": "[UNK]", "eos_token": "[EOS]", "mask_token": "[MASK]"}
    PreTrainedTokenizerFast(tokenizer_object=theirs, **specials).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def large_rows(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Records:
    folder = tmp_path_factory.mktemp("large_rows")
    (folder / "text.txt").write_text("w65539 the[MASK] w4\n")
    prepare("--input", folder / "text.txt", "--output", folder / "out", "--tokenizer", large, "--length", 8)
    return rows_of(folder / "out")


def test_large_vocabulary_takes_four_bytes_a_token(large_rows: Records) -> None:
    assert (large_rows[TOKENS].dtype, large_rows[TOKENS][0, 1]) == (np.uint32, 65_539)


def test_text_that_spells_the_mask_does_not_give_its_id(large_rows: Records) -> None:
    assert 2 not in large_rows[TOKENS]


def test_type_too_small_for_the_vocabulary_is_refused(
    large: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("--tokenizer", large, "--length", 16, "--dtype", "uint16")
    assert prepare("--input", source, "--output", tmp_path / "out", *settings) == 2
    assert "--dtype uint16 holds ids up to 65535" in capsys.readouterr().err
    assert contents(tmp_path) == {}


def test_help_is_given_without_heavy_imports() -> None:
    code = f"""
import runpy, sys
sys.argv = ["prepare_data.py", "--help"]
sys.path.insert(0, {str(TOOL.parent)!r})
try:
    runpy.run_path({str(TOOL)!r}, run_name="__main__")
finally:
    print("imported:", *(name for name in ("torch", "transformers", "pyarrow", "streaming") if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported:")


@pytest.fixture(scope="module")
def long_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 2 MB; with its detokeniser and hundreds of shards a second of work behind the first shard."""
    path = tmp_path_factory.mktemp("long") / "texts.txt"
    path.write_text(
        "".join(f'line {i} of " many " ( or , say , 1 @,@ 000 ) lines .' + " etc" * 9 + "\n" for i in range(24_000))
    )
    return path


def command(source: Path, output: Path) -> list[str]:
    settings = ("--detokenizer", "wikitext+lm1b", "--workers", 2, "--shard-mb", 0.02)
    return [str(a) for a in ("--input", source, "--output", output, "--tokenizer", "bytes", "--length", 64, *settings)]


def running(session: int) -> list[str]:
    """The processes of a session; one that ended and that nobody asked after is none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its_session = path.read_text().rpartition(")")[2].split()[:4]
            found += [path.parent.name] if int(its_session) == session and state != "Z" else []
    return found


def stopped(source: Path, output: Path, number: signal.Signals) -> tuple[int, list[str]]:
    """Exit code of a run that gets a signal when its first shard is there, and the processes that it leaves."""
    process = subprocess.Popen(
        [sys.executable, str(TOOL), *command(source, output)],
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    try:
        end = time.monotonic() + 60
        while not output.with_suffix(".tmp").joinpath("shard.00000.mds").exists() and time.monotonic() < end:
            time.sleep(0.002)
        (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)  # Ctrl-C goes to all of them
        code = process.wait(60)
        end = time.monotonic() + 10  # they need milliseconds
        while (left := running(process.pid)) and time.monotonic() < end:
            time.sleep(0.02)
        return code, left
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)  # all but the one that tidies up behind them


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_neither_files_nor_processes(
    long_source: Path, tmp_path: Path, number: signal.Signals
) -> None:
    code, left = stopped(long_source, tmp_path / "out", number)
    assert (code, list(tmp_path.iterdir()), left) == (130, [], [])


@pytest.fixture(scope="module")
def killed(long_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[str]]:
    """Where a killed run was writing `out`, its exit code, and the processes that it left."""
    folder = tmp_path_factory.mktemp("killed")
    return folder, *stopped(long_source, folder / "out", signal.SIGKILL)


def test_killed_run_leaves_no_processes(killed: tuple[Path, int, list[str]]) -> None:
    assert killed[2] == []


def test_killed_run_is_made_anew_by_the_next(long_source: Path, killed: tuple[Path, int, list[str]]) -> None:
    folder, code, _ = killed
    assert (code, [path.name for path in folder.iterdir()]) == (-signal.SIGKILL, ["out.tmp"])
    (folder / "out.tmp" / "shard.99999.mds").write_bytes(b"of an attempt with smaller shards")
    for name in ("out", "whole"):
        assert prepare(*command(long_source, folder / name), block_bytes=documents.BLOCK_BYTES) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["out", "whole"]
    assert contents(folder / "out") == contents(folder / "whole")


def test_full_disk_is_told_and_leaves_nothing(long_source: Path, tmp_path: Path) -> None:
    """A limit on the size of a file stands for the disk: a write fails half-way through a shard."""
    done = subprocess.run(
        [sys.executable, str(TOOL), *command(long_source, tmp_path / "out"), "--shard-mb", "1"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert f"DataError: --output {tmp_path / 'out'} cannot be written" in done.stderr
    assert (list(tmp_path.iterdir()), "Traceback" in done.stderr) == ([], False)
