"""Turn text into shards of rows to train on.

    python tools/prepare_data.py --input texts/ more.jsonl.gz --output data/mine --tokenizer gpt2 --length 1024
    python tools/prepare_data.py --recipe openwebtext --output data/openwebtext       fetched from the Hugging Face hub
    python tools/prepare_data.py --recipe lm1b --input downloads/lm1b --output data/lm1b          from local files
    python tools/prepare_data.py --verify data/mine                                   read every shard, check its hash

Files are .txt (one document a line), .jsonl and .parquet (a field of each record), also with .gz or .zst; a folder is
all such files in it. The output is the same for any number of workers: no document is dropped or repeated.
`--output DIR` then holds index.json, shard.*.mds and manifest.json; with a validation split, DIR/train and
DIR/validation do. `data.train=DIR` trains on it.
"""

import argparse
import os
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import prepare_documents as documents
import shard_writer
from prepare_documents import File
from prepare_recipes import DETOKENIZERS, RECIPES, Recipe
from prepare_workers import Documents, Settings, Workers, prepare
from shard_writer import SHARD_BYTES

from mdlm_scale import log as log_module
from mdlm_scale.data import shards
from mdlm_scale.data.rows import Wrapping
from mdlm_scale.errors import DataError, UserError, raise_if_any
from mdlm_scale.log import log

SPLIT = re.compile("(?<![a-z])(train|test|valid(?:ation)?)(?![a-z])")  # the last in a path is the file's own
PLAIN = Recipe("", {}, tokenizer="")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help="files and folders; `python` is Python's own documentation")
    add("--recipe", choices=RECIPES, help="a public dataset: its field, splits, tokenizer, length and wrapping")
    add("--output", type=Path, metavar="DIR", help="a new folder")
    add("--tokenizer", metavar="NAME", help="bytes, text8, a Hugging Face name, or a folder that holds a tokenizer")
    add("--length", type=int, metavar="L", help="tokens a row")
    add("--workers", type=int, metavar="W", help="processes (one for each core)")
    add("--split", nargs="+", choices=("train", "validation"), help="only these splits of a recipe")
    add("--validation-documents", type=int, metavar="N", help="the last N lines or records are for validation")
    add("--field", metavar="NAME", help="of a JSON object or a Parquet column that holds the text (text)")
    add("--whole-files", action="store_true", help="a text file is one document")
    add("--detokenizer", choices=DETOKENIZERS, help="undo a corpus's way of writing punctuation (none)")
    add("--padded", action="store_true", help="each document in rows of its own, padded")
    add("--no-document-end", action="store_true", help="no end-of-text token between documents")
    add("--no-row-ends", action="store_true", help="no BOS and EOS around a row")
    add("--strict", action="store_true", help="refuse bytes that are not UTF-8 (else they are replaced and counted)")
    add("--dtype", choices=("uint16", "uint32"), help="of a token (uint16 if the vocabulary fits)")
    add("--zstd", action="store_true", help="compress the shards")
    add("--shard-mb", type=float, default=SHARD_BYTES / 1e6, metavar="MB", help="size of a shard (67)")
    add("--verify", nargs="+", type=Path, metavar="DIR", help="only check the hashes of prepared shards")
    args = parser.parse_args(argv)
    if args.verify is None:
        if args.output is None:
            parser.error("--output DIR is needed")
        if args.recipe is None and args.input is None:
            parser.error("--input PATH or --recipe NAME is needed")
        if args.recipe is None and not (args.tokenizer and args.length):
            parser.error("--tokenizer and --length are needed (a recipe has its own)")
        if args.split and args.recipe is None:
            parser.error("--split chooses among the splits of a --recipe")
        if args.workers is not None and args.workers < 1:
            parser.error(f"--workers {args.workers} must be at least 1")
        if not 0.001 <= args.shard_mb <= 4000:
            parser.error(f"--shard-mb {args.shard_mb} must lie between 0.001 and 4000")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    log_module.start()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing half-written stays
    try:
        if args.verify is not None:
            return verify(args.verify)
        recipe = RECIPES.get(args.recipe, PLAIN)
        settings = make_settings(args, recipe)
        found = sources(args, recipe)
        with Workers(settings, args.workers or len(os.sched_getaffinity(0))) as workers:
            for split, source in found.items():
                _report(args.output / split, prepare(source, args.output / split, settings, workers))
    except UserError as error:
        log_module.end_live()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        log_module.end_live()
        print("interrupted: nothing half-written is left; the same command goes on", file=sys.stderr)
        return 130
    return 0


def verify(folders: list[Path]) -> int:
    """Read every shard of the folders, and of the splits in them."""
    faults: list[str] = []
    for folder in folders:
        for own in sorted(path.parent for path in folder.glob(f"*/{shards.MANIFEST}")) or [folder]:
            try:
                checked = shard_writer.verify(own)
            except DataError as error:
                faults += error.faults
            else:
                print(f"{own}: {len(checked.files)} shard(s), {checked.manifest['rows']:,} rows, as they were made")
    raise_if_any(faults, DataError)
    return 0


def make_settings(args: argparse.Namespace, recipe: Recipe) -> Settings:
    """The recipe's, where the command line does not say otherwise."""
    wrapping = recipe.wrapping
    return Settings(
        tokenizer=args.tokenizer or recipe.tokenizer,
        length=args.length if args.length is not None else recipe.length,
        wrapping=Wrapping(
            padded=wrapping.padded or args.padded,
            document_end=wrapping.document_end and not args.no_document_end,
            row_ends=wrapping.row_ends and not args.no_row_ends,
        ),
        column=args.field or recipe.column,
        detokenizer=args.detokenizer or recipe.detokenizer,
        strict=args.strict,
        dtype=args.dtype,
        shard_bytes=round(args.shard_mb * 1e6),
        compress=args.zstd,
    )


def sources(args: argparse.Namespace, recipe: Recipe) -> dict[str, Documents]:
    """Split to documents; without splits the one is ''."""
    inputs = args.input or [documents.PYTHON if args.recipe == documents.PYTHON else fetched(recipe)]
    files = documents.find(inputs, whole_files=args.whole_files)
    num_validation = recipe.validation_documents if args.validation_documents is None else args.validation_documents
    if num_validation:
        if len(recipe.splits) > 1:
            raise DataError(f"--recipe {args.recipe} has its own validation split; leave out --validation-documents.")
        log.info("counting documents")
        total = sum(block.num_records for block in documents.blocks(files))
        if not 0 < num_validation < total:
            raise DataError(
                f"--validation-documents {num_validation} must be less than the {total} records, and not negative."
            )
        cut = total - num_validation
        found = {"train": Documents(files, 0, cut), "validation": Documents(files, cut, total)}
    elif recipe.splits:
        found = {split: Documents(files_of(files, word, recipe)) for split, word in recipe.splits.items()}
    else:
        return {"": Documents(files)}
    unknown = [split for split in args.split or () if split not in found]
    if unknown:
        raise DataError(f"--recipe {args.recipe} has no split {', '.join(unknown)}; it has {', '.join(found)}.")
    found = {split: source for split, source in found.items() if split in (args.split or found)}
    empty = [split for split, source in found.items() if not source.files]
    if empty:
        words = ", ".join(f"{split} ('{recipe.splits[split]}' in its name)" for split in empty)
        raise DataError(
            f"--recipe {args.recipe}: no file for {words} among {', '.join(inputs)}. Give them, or choose with --split."
        )
    return found


def files_of(files: list[File], word: str, recipe: Recipe) -> list[File]:
    """The files of a split, as the hub names them: `train-00000-of-00002.parquet`, `arxiv/test/0000.parquet`."""
    own = [file for file in files if f"/{recipe.config}/" in f"/{file.path}"] if recipe.config else []
    named = [(file, SPLIT.findall(file.path.lower())) for file in own or files]
    return [file for file, words in named if words and re.fullmatch(word, words[-1])]


def fetched(recipe: Recipe) -> str:
    """A recipe's files from the Hugging Face hub, as a local folder."""
    from huggingface_hub import snapshot_download

    log.info(f"fetching {recipe.hub} from the Hugging Face hub")
    inside = f"{recipe.config}/*" if recipe.config else "*"
    try:
        return snapshot_download(
            recipe.hub, repo_type="dataset", revision=recipe.revision,
            allow_patterns=[inside + ".parquet", inside + ".jsonl*"],
        )  # fmt: skip
    except Exception as error:  # its own kinds, requests' and httpx's
        raise DataError(
            f"'{recipe.hub}' could not be fetched ({type(error).__name__}: {error}). Give local copies of its files "
            f"with --input."
        ) from error


def _report(output: Path, manifest: dict) -> None:
    log_module.live(
        f"{output}: {manifest['documents']:,} documents, {manifest['rows']:,} rows of {manifest['length']} tokens, "
        f"{manifest['tokens']:,} tokens in {len(manifest['shards'])} shard(s)",
        last=True,
    )
    for key in ("empty_documents", "replaced_characters"):
        if manifest[key]:
            log.info(f"  {key.replace('_', ' ')}: {manifest[key]:,}")


if __name__ == "__main__":
    sys.exit(main())
