"""The paper's zero-shot table for a checkpoint: its perplexity on seven data sets that it was not trained on.

    python tools/zero_shot.py --checkpoint runs/owt_small                         fetched from the Hugging Face hub
    python tools/zero_shot.py --checkpoint runs/owt_small --input downloads       from local copies
    python tools/zero_shot.py --checkpoint runs/owt_small --only ptb lm1b --json zero_shot.json

A file of configs/eval is a data set: detokenised as its recipe says, tokenised with the checkpoint's own tokenizer,
wrapped into rows of 1024 without EOS between documents, and evaluated like any other (python -m mdlm_scale.evaluate).
Rows are prepared once for each tokenizer, into OUTPUT/HASH (of its vocabulary), and found there the next time.

--input FOLDER has for each data set, by the name of its file in configs/eval, a folder NAME/ with files named as on the
hub, of which those of the split are taken, or one file NAME.txt, NAME.jsonl or NAME.parquet (also .gz, .zst), which is
the split. Beside our figure stands the paper's, for its own model after 1M steps on OpenWebText. One process does all
this; to share an evaluation among several: torchrun ... -m mdlm_scale.evaluate --data OUTPUT/HASH.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FILES = {path.stem: path for path in sorted((ROOT / "configs" / "eval").glob("*.yaml"))}
PAPER = "the paper's model after 1M steps on OpenWebText"
KINDS, COMPRESSIONS = (".txt", ".jsonl", ".parquet"), (".gz", ".zst")  # of a file that is a whole data set
MIN_ROWS, FEW_ROWS = 16, 128  # two blocks, for a standard error; fewer make one that is itself uncertain
FIGURES = ("nelbo", "nelbo_se", "ppl", "ppl_se", "bits_per_byte", "bits_per_byte_se")
Row = dict[str, Any]


@dataclass(frozen=True)
class DataSet:
    """A file of configs/eval."""

    key: str  # its name
    name: str
    recipe: str
    split: str
    length: int
    document_end: bool
    output: str
    paper: float | None = None


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a run directory or a step-... directory")
    add("--input", type=Path, metavar="FOLDER", help="local copies; else what is missing is fetched")
    add("--only", nargs="+", default=list(FILES), choices=FILES, metavar="NAME", help=f"among {', '.join(FILES)}")
    add("--rows", type=int, metavar="N", help="at most the first N rows of each (all)")
    add("--samples-per-row", type=int, default=1, metavar="K", help="independent draws of the noise (1)")
    add("--estimator", default="paper", choices=("paper", "count"), help="of the bound (paper)")
    add("--batch", type=int, default=16, metavar="B", help="rows a pass; free to change (16)")
    add("--raw", action="store_true", help="the weights themselves, not their average (EMA)")
    add("--json", type=Path, metavar="FILE", help="write the table here too")
    args = parser.parse_args(argv)
    for name, least in {"rows": MIN_ROWS, "samples_per_row": 1, "batch": 1}.items():
        if (given := getattr(args, name)) is not None and given < least:
            parser.error(f"--{name.replace('_', '-')} {given} must be at least {least}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)

    from mdlm_scale import log as log_module
    from mdlm_scale.errors import UserError

    log_module.start()
    try:
        return measure(args)
    except UserError as error:
        log_module.end_live()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        log_module.end_live()
        print("interrupted: what is prepared stays; the same command goes on", file=sys.stderr)
        return 130


def measure(args: argparse.Namespace) -> int:
    from mdlm_scale.errors import DataError, raise_if_any
    from mdlm_scale.log import log
    from mdlm_scale.run.metrics import write_json

    jobs = planned(args)
    for number, job in enumerate(jobs, 1):
        log.info(f"{number}/{len(jobs)} {job.data.name}: rows in {job.folder}")
        job.prepare()
    short = [job for job in jobs if job.manifest["rows"] < MIN_ROWS]
    need = f"a standard error needs {MIN_ROWS}. Give more text, or choose data sets with --only."
    raise_if_any((f"{job.folder} has {job.manifest['rows']} row(s); {need}" for job in short), DataError)
    rows: list[Row] = []
    print(f"{'':12s}{'rows':>8s}{'tokens':>13s}{'PPL':>22s}{'paper':>10s}", flush=True)
    for number, job in enumerate(jobs, 1):
        log.info(f"{number}/{len(jobs)} {job.data.name}: evaluating")
        code, row = evaluated(job, args)
        if code:
            return code
        rows.append(row)
        ppl = f"{row['ppl']:.2f} +- {row['ppl_se']:.2f}"
        paper = "-" if row["paper_ppl"] is None else f"{row['paper_ppl']:.2f}"
        print(f"{row['name']:12s}{row['rows']:8,}{row['tokens']:13,}{ppl:>22s}{paper:>10s}", flush=True)
    protocol = rows[0]["protocol"]
    # tokens of other tokenizers are longer or shorter, and so are their perplexities higher or lower
    print(f"PPL: {protocol['checkpoint']}, {protocol['weights']} weights, per token of {protocol['tokenizer']}")
    print(f"paper: {PAPER}, per token of GPT-2; published, not measured here")
    if few := [row["name"] for row in rows if row["rows"] < FEW_ROWS]:
        print(f"errors of fewer than {FEW_ROWS} rows are themselves uncertain: {', '.join(few)}")
    if args.json:
        write_json(args.json, json.dumps({"paper": PAPER, "data_sets": rows}, indent=1) + "\n")
    return 0


def evaluated(job: "Job", args: argparse.Namespace) -> tuple[int, Row]:
    """A line of the table, by mdlm_scale.evaluate, whose own text is left out; or its exit code."""
    from mdlm_scale import evaluate

    num_rows = min(args.rows or job.manifest["rows"], job.manifest["rows"])
    asked = {
        "--checkpoint": args.checkpoint, "--data": job.folder, "--rows": num_rows, "--batch": args.batch,
        "--samples-per-row": args.samples_per_row, "--estimator": args.estimator,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder) / "figures.json"
        given = [str(part) for pair in asked.items() for part in pair] + ["--raw"] * args.raw
        if code := evaluate.main([*given, "--json", str(file)]):
            return code, {}
        figures = json.loads(file.read_text())
    return 0, {
        "name": job.data.name,
        "rows": figures["num_rows"],
        "tokens": figures["num_tokens"],
        **{key: figures[key] for key in FIGURES},
        "paper_ppl": job.data.paper,
        "protocol": figures["protocol"],
    }


# --- what there is, and what must be made


@dataclass
class Job:
    """A data set for one tokenizer."""

    data: DataSet
    recipe: Any
    settings: Any  # of tools/prepare_workers.py
    folder: Path
    source: Any = None  # its documents; None if the rows are there, or the hub has to be asked
    manifest: Row = field(default_factory=dict)  # of its rows; empty as long as they are missing

    def prepare(self) -> None:
        """Make the rows if they are missing."""
        import prepare_data

        if not self.manifest:
            source = self.source or documents(self, prepare_data.fetched(self.recipe))
            with prepare_data.Workers(self.settings, len(os.sched_getaffinity(0))) as workers:
                self.manifest = prepare_data.prepare(source, self.folder, self.settings, workers)


def planned(args: argparse.Namespace) -> list[Job]:
    """Everything that can be wrong is told here, before anything is fetched or written."""
    from mdlm_scale.errors import ConfigError, UserError
    from mdlm_scale.log import log
    from mdlm_scale.run.evaluate import MAX_DRAWS
    from mdlm_scale.run.metrics import json_faults
    from mdlm_scale.run.perplexity import check_estimator
    from mdlm_scale.run.sample import find_trained

    errors: list[UserError] = [ConfigError(fault) for fault in json_faults(args.json)]
    if args.input is not None and not args.input.is_dir():
        errors.append(ConfigError(f"--input {args.input} is no folder. Leave it out to fetch what is missing."))
    if args.samples_per_row > MAX_DRAWS:
        errors.append(ConfigError(f"--samples-per-row {args.samples_per_row} must be at most {MAX_DRAWS}."))
    jobs: list[Job] = []
    try:
        trained = find_trained(Path(args.checkpoint))
        check_estimator(args.estimator, args.checkpoint, trained)
    except UserError as error:
        errors.append(error)
    else:
        for key in dict.fromkeys(args.only):
            try:
                jobs.append(job_of(key, args.input, trained.tokenizer))
            except UserError as error:
                errors.append(error)
        length = trained.config.data.length
        if other := {job.data.length for job in jobs} - {length}:
            log.warning(f"{trained.folder} was trained on rows of {length} tokens, not of {other.pop()}")
    if errors:
        raise type(errors[0])(*(fault for error in errors for fault in error.faults))
    return jobs


def job_of(key: str, given: Path | None, tokenizer: Any) -> Job:
    """A data set with its rows, or its local documents, or neither: then it is to be fetched."""
    import yaml
    from prepare_recipes import RECIPES
    from prepare_workers import Settings

    from mdlm_scale.data.rows import Wrapping
    from mdlm_scale.errors import DataError

    try:
        data = DataSet(key, **yaml.safe_load(FILES[key].read_text()))
        recipe = RECIPES[data.recipe]
    except (TypeError, KeyError, OSError, yaml.YAMLError) as error:
        raise DataError(f"{FILES[key]} does not describe a data set ({type(error).__name__}: {error}).") from error
    wrapping = Wrapping(document_end=data.document_end)
    settings = Settings(tokenizer.name, data.length, wrapping, recipe.column, recipe.detokenizer)
    job = Job(data, recipe, settings, Path(data.output) / tokenizer.fingerprint[:12])
    if given is not None:
        places = [given / key, *(given / f"{key}{kind}{packed}" for kind in KINDS for packed in ("", *COMPRESSIONS))]
        if place := next((place for place in places if place.exists()), None):
            job.source = documents(job, str(place))
    job.manifest = prepared(job)
    if given is not None and job.source is None and not job.manifest:
        raise DataError(
            f"--input {given} holds nothing for {data.name}: neither a folder {key}/ nor a file {key}{KINDS[0]}, "
            f"{' or '.join(key + kind for kind in KINDS[1:])}. Add it, or choose data sets with --only."
        )
    return job


def documents(job: Job, place: str) -> Any:
    """Those of a folder's files that are the split, or of one file, whatever its name."""
    import prepare_data

    recipe = job.recipe if Path(place).is_dir() else replace(job.recipe, splits={})
    names = ["--recipe", job.data.recipe, "--split", job.data.split]
    asked = prepare_data.arguments(["--input", place, "--output", str(job.folder), *names])
    [source] = prepare_data.sources(asked, recipe).values()
    return source


def prepared(job: Job) -> Row:
    """The manifest of the rows that are there, empty if there are none; others than are asked for are refused."""
    from mdlm_scale.data import shards
    from mdlm_scale.errors import DataError

    if not job.folder.exists():
        return {}
    manifest = shards.read_folder(job.folder).manifest
    wanted = {key: vars(job.settings)[key] for key in ("length", "column", "detokenizer")}
    wanted["wrapping"] = vars(job.settings.wrapping)
    if job.source is not None:  # wherever they lie now
        wanted["source"] = [(Path(file.path).name, file.num_bytes) for file in job.source.files]
    there = manifest | {"source": [(Path(file["file"]).name, file["bytes"]) for file in manifest["source"]]}
    if differing := [key for key in wanted if there.get(key) != wanted[key]]:
        raise DataError(
            f"{job.folder} holds rows of {job.data.name} that were made with another {', '.join(differing)}. Remove "
            f"it, and they are made anew."
        )
    return manifest


if __name__ == "__main__":
    sys.exit(main())
