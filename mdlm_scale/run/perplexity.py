"""`mdlm_scale.evaluate`: the figures of checkpoints, and the protocol by which others find the same.

Every rank holds a whole model, for there are no gradients, and takes blocks of rows in turn. All that can be known to
be wrong is told at once, before weights are read.
"""

import json
import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale import log as log_module
from mdlm_scale.config import Config, DataConfig, Precision
from mdlm_scale.data import source as source_module
from mdlm_scale.data import texts
from mdlm_scale.data.rows import Wrapping
from mdlm_scale.data.shards import MANIFEST
from mdlm_scale.data.source import Source
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import objective, schedule
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.errors import EXIT_FAILURE, CheckpointError, ConfigError, DataError, FetchError, UserError
from mdlm_scale.layout import Layout
from mdlm_scale.log import log
from mdlm_scale.model.dit import DiT
from mdlm_scale.parallel.groups import Groups, world
from mdlm_scale.run import build
from mdlm_scale.run.evaluate import (
    BLOCK,
    MAX_DRAWS,
    MAX_ROWS,
    Estimator,
    Forward,
    Plan,
    Scores,
    difference,
    estimate,
    frozen,
    score,
)  # fmt: skip
from mdlm_scale.run.metrics import json_faults, json_safe, write_json
from mdlm_scale.run.sample import Trained, find_trained, load_model

INF = "inf"  # steps of continuous time
MIN_ROWS = 2 * BLOCK  # for a standard error
FEW_BLOCKS = 16  # below, the error is itself uncertain: of 8 blocks it held the truth in nine of ten cases
Figures = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """What is evaluated on, and what is known of it."""

    source: Source
    num_rows: int
    bytes_per_token: float | None  # of text, in the whole folder
    protocol: Figures


def main(asked: Namespace) -> int:
    """`python -m mdlm_scale.evaluate`: returns the exit code."""
    ranks = world()
    log_module.start(ranks.rank)
    if not torch.cuda.is_available():
        kernels.tune_cpu(ranks.local_size)
    with Groups(ranks) as groups:
        found = measure(asked, groups)
        if ranks.rank == 0:
            print(text(found))
            if asked.json:
                write_json(asked.json, json.dumps(found, indent=1, allow_nan=False) + "\n")
    judged = [found["difference"]] if found["difference"] else found["results"]
    if asked.until_se is None or all(figures["se_mc"] <= asked.until_se for figures in judged):
        return 0
    log.warning(
        f"--until-se {asked.until_se} was not reached with {found['num_draws']} draws of each row; more than "
        f"{MAX_DRAWS} are not made. More rows would lower both parts of the error."
    )
    return EXIT_FAILURE


def measure(asked: Namespace, groups: Groups) -> Figures:
    """What goes into the JSON file: the first result's figures, all `results`, and the `difference` of two."""
    subjects, rows = checked(asked)
    ranks, config = groups.ranks, subjects[0].config
    device = build.device_of(Config(), ranks)
    if ranks.size > 1:
        groups.open(device, config.parallel.start_minutes)
    groups.agree("The ranks differ", vars(asked) | rows.protocol | {"weights": [s.manifest["files"] for s in subjects]})
    precision = Precision(asked.precision or (config.train.precision if device.type == "cuda" else "float32"))
    models = [load_model(subject, device, asked.raw, build.DTYPES[precision]) for subject in subjects]
    results, compared = [], None
    for num_times in asked.num_times or [""]:  # the checkpoint's own
        plans = [_plan(asked, subject, num_times, rows.num_rows) for subject in subjects]
        work = [(partial(forward, model), plan) for model, plan in zip(models, plans, strict=True)]
        scores = _scores(asked, work, rows.source, Layout(ranks.size, ranks.rank), groups)
        for subject, plan, each in zip(subjects, plans, scores, strict=True):
            results.append(_figures(subject, plan, each, rows, asked.raw, precision))
        if len(scores) == 2:
            found = asdict(difference(*scores))
            compared = {key: found[key] for key in ("nelbo", "nelbo_se", "se_mc", "se_data")}
    return json_safe({**results[0], "results": results, "difference": compared})


def _scores(
    asked: Namespace, work: Sequence[tuple[Forward, Plan]], source: Source, layout: Layout, groups: Groups
) -> list[Scores]:
    """Of each model, with as many draws as are asked for, or as the wanted error (of a difference, where there is one)
    needs; none is made twice."""
    found: list[Scores] = []
    draws = range(asked.samples_per_row if asked.until_se is None else max(2, asked.samples_per_row))
    while True:
        more = [score(forward, source, plan, draws, layout, groups, asked.batch) for forward, plan in work]
        for path, scores in zip(asked.checkpoints, more, strict=True):
            if num_wrong := int((~np.isfinite(scores.nats)).any(0).sum()):
                raise CheckpointError(
                    f"{path}: its network gives numbers that are not finite, for {num_wrong} of {scores.tokens.size} "
                    f"rows. Take a checkpoint from before that."
                )
        found = [one + other for one, other in zip(found, more, strict=True)] if found else more
        judged = [difference(*found)] if len(found) == 2 else [estimate(scores) for scores in found]
        if asked.until_se is None or all((each.se_mc or 0.0) <= asked.until_se for each in judged):
            return found
        draws = range(draws.stop, 2 * draws.stop)
        if draws.stop > MAX_DRAWS:
            return found


def forward(model: DiT, batch: Batch) -> Tensor:
    with torch.inference_mode():
        return model(batch.to(model.embed.weight.device))[1]


def _plan(asked: Namespace, subject: Trained, num_times: str, num_rows: int) -> Plan:
    diffusion = frozen(subject.config.diffusion)
    if num_times:
        diffusion = replace(diffusion, num_times=None if num_times == INF else int(num_times))
    tokenizer, estimator = subject.tokenizer, Estimator(asked.estimator)
    return Plan(diffusion, asked.seed, num_rows, tokenizer.mask_id, tokenizer.vocab_size, estimator)


def _figures(subject: Trained, plan: Plan, scores: Scores, rows: Rows, raw: bool, precision: Precision) -> Figures:
    """All that is said of one checkpoint; null is unknown.

    Published figures leave out the prior and the reconstruction term; `complete` has them, and takes the stretch of t
    below t_min to be as the rest is on average. Masks by count leave nothing out.
    """
    found, by_count = estimate(scores), plan.estimator is Estimator.by_count
    diffusion, shape = plan.diffusion, schedule.from_config(plan.diffusion)
    prior = 0.0 if by_count else objective.prior(shape, plan.vocab_size)
    # text masked at t = 0 already would need the network there
    reconstruction = 0.0 if by_count or objective.reconstruction_weight(shape) == 0 else None
    byte = None if rows.bytes_per_token is None else math.log(2) * rows.bytes_per_token
    return {
        **asdict(found),
        "bits_per_token": found.nelbo / math.log(2),
        "bits_per_token_se": found.nelbo_se / math.log(2),
        "bits_per_byte": None if byte is None else found.nelbo / byte,
        "bits_per_byte_se": None if byte is None else found.nelbo_se / byte,
        "prior": prior,
        "reconstruction": reconstruction,
        "complete": None if reconstruction is None else found.nelbo + prior + reconstruction,
        "protocol": {
            "checkpoint": str(subject.folder),
            "checkpoint_fingerprint": subject.fingerprint,
            "step": subject.step,
            "weights": subject.weights(raw),
            "precision": str(precision),
            "estimator": str(plan.estimator),
            "num_times": INF if by_count else diffusion.num_times or INF,
            "t_min": None if by_count or diffusion.num_times else diffusion.t_min,
            "schedule": None if by_count else asdict(shape) | {"name": str(shape.name)},
            "seed": plan.seed,
            "samples_per_row": found.num_draws,
            "tokenizer": subject.config.tokenizer.name,
            "tokenizer_fingerprint": subject.tokenizer.fingerprint,
            **rows.protocol,
            "trained_length": subject.config.data.length,
        },
    }


def checked(asked: Namespace) -> tuple[list[Trained], Rows]:
    """Everything that can be asked before weights are read; all faults at once."""
    errors: list[UserError] = [ConfigError(fault) for fault in _faults(asked)]
    subjects: list[Trained] = []
    rows = None
    for path in asked.checkpoints:
        try:
            subjects.append(find_trained(Path(path)))
            check_estimator(asked.estimator, path, subjects[-1])
            rows = _rows(asked, subjects[-1].config.data, subjects[-1].tokenizer)
        except FetchError:
            raise
        except UserError as error:
            errors.append(error)
    if len({subject.tokenizer.fingerprint for subject in subjects}) > 1:
        names = " and ".join(subject.config.tokenizer.name for subject in subjects)
        errors.append(ConfigError(f"--compare: the tokenizers differ ({names}), and so do their tokens."))
    if errors or rows is None:
        raise type(errors[0])(*dict.fromkeys(fault for error in errors for fault in error.faults))
    return subjects, rows


def check_estimator(estimator: str, path: str, subject: Trained) -> None:
    if estimator == Estimator.by_count and subject.config.model.time_conditioning:
        raise ConfigError(
            f"--estimator count has no time to tell a network, and {path} has model.time_conditioning=true. "
            f"Use --estimator paper."
        )


def _faults(asked: Namespace) -> list[str]:
    """What is wrong with the request itself."""
    found, times = [], " ".join(asked.num_times)
    if not all(t == INF or (t.isdecimal() and int(t) >= 1) for t in asked.num_times):
        found.append(f"--num-times {times}: each must be at least 1, or {INF} for continuous time.")
    if times and asked.estimator == Estimator.by_count:
        found.append(f"--num-times {times} is for --estimator paper: masks by count are the bound of continuous time.")
    if len(asked.num_times) > 1 and len(asked.checkpoints) > 1:
        found.append(f"--compare takes one --num-times, not {times}.")
    if not 1 <= asked.samples_per_row <= MAX_DRAWS:
        found.append(f"--samples-per-row {asked.samples_per_row} must lie in 1 .. {MAX_DRAWS}.")
    if asked.until_se is not None and not 0 < asked.until_se < math.inf:
        found.append(f"--until-se {asked.until_se} must be a number above 0 (nats a token).")
    if asked.batch < 1:
        found.append(f"--batch {asked.batch} must be at least 1.")
    if not 0 <= asked.seed < 2**64:
        found.append(f"--seed {asked.seed} must lie in 0 .. 2^64 - 1.")
    return found + json_faults(asked.json)


def _rows(asked: Namespace, config: DataConfig, tokenizer: Tokenizer) -> Rows:
    """Open the data, at its own length."""
    where, inside = asked.data, Path(asked.data) / "validation"
    if not (Path(where) / MANIFEST).exists() and (inside / MANIFEST).is_file():
        where = str(inside)
    try:
        description = source_module.described(where)
        config = config if description is None else replace(config, length=description.length)
        source = source_module.load(where, "validation", config, tokenizer, source_module.open_cache(config))
    except FetchError:
        raise
    except UserError as error:
        faults = (fault.removeprefix("data.validation: ") for fault in error.faults)
        raise type(error)(*(f"--data: {fault}" for fault in faults)) from error
    num_rows, most = source.num_rows if asked.rows is None else asked.rows, min(source.num_rows, MAX_ROWS)
    if source.num_rows < MIN_ROWS:
        raise DataError(
            f"--data {where} has {source.num_rows} rows of {config.length} tokens, and {MIN_ROWS} are needed (two "
            f"blocks, for a standard error). Give more text."
        )
    if not MIN_ROWS <= num_rows <= most:
        raise ConfigError(f"--rows {num_rows} must lie in {MIN_ROWS} .. {most} for --data {where}.")
    manifest = _made(source, where) if description is None else description.manifest
    text_bytes = manifest.get("text_bytes")
    protocol = {"data": where, "data_fingerprint": source.fingerprint(), "length": config.length}
    told = {key: manifest.get(key) for key in ("wrapping", "detokenizer")}
    return Rows(source, num_rows, text_bytes / manifest["tokens"] if text_bytes else None, protocol | told)


def _made(source: Source, where: str) -> Figures:
    """What a manifest would say of rows that were made of a little text."""
    text_bytes = sum(len(document.encode()) for document in texts.documents(where, "validation"))
    tokens = int(source.rows(np.arange(source.num_rows))[1].sum())
    return {"text_bytes": text_bytes, "tokens": tokens, "wrapping": asdict(Wrapping()), "detokenizer": "none"}


def text(found: Figures) -> str:
    """The same for reading: a line a result, then what decided them; where results differ in that, all of it."""

    def cell(figures: Figures, key: str) -> str:
        value, se = figures[key], figures.get(f"{key}_se")
        return "unknown" if value is None else f"{value:.4f}" if se is None else f"{value:.4f} +- {se:.4f}"

    keys = ("nelbo", "se_mc", "se_data", "ppl", "bits_per_token", "bits_per_byte", "complete")
    table: list[tuple[str, ...]] = [("T", *keys)]
    table += [(str(f["protocol"]["num_times"]), *(cell(f, key) for key in keys)) for f in found["results"]]
    if found["difference"]:
        table.append(("b - a", *(cell(found["difference"], key) for key in keys[:3]), "", "", "", ""))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{part:{n}}" for part, n in zip(line, widths, strict=True)).rstrip() for line in table]
    few = " (few: the errors are themselves uncertain; take more rows)" if found["num_blocks"] < FEW_BLOCKS else ""
    lines.append(f"{found['num_rows']:,} rows, {found['num_tokens']:,} tokens, {found['num_blocks']:,} blocks{few}")
    for key in found["protocol"]:
        values = dict.fromkeys(str(figures["protocol"][key]) for figures in found["results"])
        lines.append(f"  {key:22} {' | '.join(values)}")
    return "\n".join(lines)
