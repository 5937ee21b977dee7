"""`mdlm_scale.evaluate`: the figures of one or two checkpoints, and the protocol by which others find the same.

Every rank holds a whole model, for there are no gradients, and takes blocks of rows in turn. All that can be known to
be wrong is told at once, before weights are read.
"""

import json
import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mdlm_scale import kernels
from mdlm_scale import log as log_module
from mdlm_scale.config import Config, DataConfig, DiffusionConfig, Precision
from mdlm_scale.data import source as source_module
from mdlm_scale.data import texts
from mdlm_scale.data.rows import Wrapping
from mdlm_scale.data.shards import MANIFEST
from mdlm_scale.data.source import Source
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import objective, schedule
from mdlm_scale.errors import EXIT_FAILURE, ConfigError, FetchError, UserError, raise_if_any
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
    Evaluation,
    Forward,
    Plan,
    Scores,
    difference,
    estimate,
    frozen,
    score,
)
from mdlm_scale.run.sample import Trained, find_trained, load_model

INF = "inf"  # as --num-times: continuous time
Figures = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    checkpoints: Sequence[str]  # one, or two to compare
    data: str
    estimator: str = "paper"
    num_times: Sequence[str] = ()  # none: the checkpoint's own
    samples_per_row: int = 1
    until_se: float | None = None
    rows: int | None = None
    seed: int = 1
    batch: int = 16
    raw: bool = False
    precision: str | None = None
    json: str | None = None


@dataclass(frozen=True)
class Rows:
    """What is evaluated on, and what is known of it."""

    source: Source
    num_rows: int
    bytes_per_token: float | None  # of text, over the whole folder
    protocol: Figures


def main(request: Request) -> int:
    """`python -m mdlm_scale.evaluate`: returns the exit code."""
    ranks = world()
    log_module.start(ranks.rank)
    if not torch.cuda.is_available():
        kernels.tune_cpu(ranks.local_size)
    with Groups(ranks) as groups:
        found = measure(request, groups)
        if ranks.rank == 0:
            print(text(found))
            if request.json:
                _write(Path(request.json), json.dumps(found, indent=1, allow_nan=False) + "\n")
    if all(figures["until_se_reached"] is not False for figures in _all(found)):
        return 0
    num_draws = _all(found)[-1]["num_draws"]
    log.warning(
        f"--until-se {request.until_se} was not reached with {num_draws} draws of each row, {MAX_DRAWS} at most."
    )
    return EXIT_FAILURE


def measure(request: Request, groups: Groups) -> Figures:
    """The figures as they go into the JSON file: flat for one; `a`, `b` and `difference`; or a `table` over T."""
    subjects, rows = _checked(request)
    ranks, config = groups.ranks, subjects[0].config
    device = build.device_of(Config(), ranks)
    if ranks.size > 1:
        groups.open(device, config.parallel.start_minutes)
    told = {f"checkpoint {s.folder}": s.manifest["files"] for s in subjects}
    groups.agree("The ranks differ", asdict(request) | rows.protocol | told)
    precision = Precision(request.precision or (config.train.precision if device.type == "cuda" else "float32"))
    models = [load_model(subject, device, request.raw, build.DTYPES[precision]) for subject in subjects]
    layout = Layout(ranks.size, ranks.rank)
    found = []
    times: list[str | None] = [*request.num_times] or [None]
    for num_times in times:
        plans = [_plan(request, subject, num_times, rows.num_rows) for subject in subjects]
        work = list(zip(map(_forward, models), plans, strict=True))
        scores = _scores(request, work, rows.source, layout, groups)
        figures = [
            _figures(request, subject, plan, each, rows, precision)
            for subject, plan, each in zip(subjects, plans, scores, strict=True)
        ]
        if len(figures) == 1:
            found.append(figures[0])
            continue
        compared = difference(*scores)
        keys = {"nelbo": compared.nelbo, "nelbo_se": compared.nelbo_se, "ppl_ratio": math.exp(compared.nelbo)}
        parts = {"se_mc": compared.se_mc, "se_data": compared.se_data}
        found.append({"a": figures[0], "b": figures[1], "difference": keys | parts})
    return found[0] if len(found) == 1 else {"table": found}


def _scores(
    request: Request, work: list[tuple[Forward, Plan]], source: Source, layout: Layout, groups: Groups
) -> list[Scores]:
    """Of each model, with as many draws as are asked for, or as the wanted error needs."""
    num_draws = request.samples_per_row if request.until_se is None else max(2, request.samples_per_row)
    found: list[Scores] = []
    while True:
        draws = range(found[0].nats.shape[0] if found else 0, num_draws)
        more = [score(forward, source, plan, draws, layout, groups, request.batch) for forward, plan in work]
        found = [before + after for before, after in zip(found, more, strict=True)] if found else more
        if all(_reached(request, estimate(scores)) for scores in found) or 2 * num_draws > MAX_DRAWS:
            return found
        num_draws *= 2


def _reached(request: Request, evaluation: Evaluation) -> bool:
    return request.until_se is None or (evaluation.se_mc is not None and evaluation.se_mc <= request.until_se)


def _forward(model: DiT) -> Forward:
    device = model.embed.weight.device

    def forward(batch: Any) -> torch.Tensor:
        with torch.inference_mode():
            return model(batch.to(device))[1]

    return forward


def _plan(request: Request, subject: Trained, num_times: str | None, num_rows: int) -> Plan:
    diffusion = _diffusion(subject.config, num_times)
    mask_id, vocab_size = subject.tokenizer.mask_id, subject.tokenizer.vocab_size
    return Plan(diffusion, request.seed, num_rows, mask_id, vocab_size, Estimator(request.estimator))


def _diffusion(config: Config, num_times: str | None) -> DiffusionConfig:
    if num_times is None:
        return frozen(config.diffusion)
    return replace(frozen(config.diffusion), num_times=None if num_times == INF else int(num_times))


def _figures(
    request: Request, subject: Trained, plan: Plan, scores: Scores, rows: Rows, precision: Precision
) -> Figures:
    """All that is said of one checkpoint; null is unknown.

    Published figures leave out the prior and the reconstruction term; `complete` has them. The stretch of t below t_min
    is taken to be as the rest is on average. Masks by count leave nothing out.
    """
    evaluation = estimate(scores)
    exact, shape = plan.estimator is Estimator.by_count, schedule.from_config(plan.diffusion)
    prior = 0.0 if exact else objective.prior(shape, plan.vocab_size)
    is_free = exact or objective.reconstruction_weight(shape) == 0  # else it needs the network at t = 0
    scales = {"bits_per_token": 1 / math.log(2), "bits_per_byte": None}
    if rows.bytes_per_token is not None:
        scales["bits_per_byte"] = 1 / math.log(2) / rows.bytes_per_token
    bits = {
        f"{name}{suffix}": None if scale is None else scale * nats
        for name, scale in scales.items()
        for suffix, nats in (("", evaluation.nelbo), ("_se", evaluation.nelbo_se))
    }
    config, time = subject.config, plan.diffusion
    return {
        **asdict(evaluation),
        **bits,
        "prior": prior,
        "reconstruction": 0.0 if is_free else None,
        "complete": evaluation.nelbo + prior if is_free else None,
        "until_se_reached": None if request.until_se is None else _reached(request, evaluation),
        "protocol": {
            "checkpoint": str(subject.folder),
            "step": subject.manifest["state"]["step"],
            "weights": "raw" if request.raw else "EMA",
            "estimator": str(plan.estimator),
            "num_times": INF if exact else time.num_times or INF,
            "t_min": None if exact or time.num_times else time.t_min,
            "schedule": None if exact else {"name": str(time.schedule), **_ends(shape)},
            "seed": plan.seed,
            "samples_per_row": evaluation.num_draws,
            "precision": str(precision),
            "tokenizer": config.tokenizer.name,
            "tokenizer_fingerprint": subject.tokenizer.fingerprint,
            **rows.protocol,
            "trained_length": config.data.length,
        },
    }


def _ends(shape: schedule.Schedule) -> Figures:
    return {"e": shape.e, "sigma_min": shape.sigma_min, "sigma_max": shape.sigma_max}


def _checked(request: Request) -> tuple[list[Trained], Rows]:
    """Everything that can be asked before the weights are read; all faults at once."""
    errors: list[UserError] = [ConfigError(fault) for fault in _faults(request)]
    subjects: list[Trained] = []
    for path in request.checkpoints:
        try:
            subjects.append(find_trained(Path(path)))
        except UserError as error:
            errors.append(error)
    if request.estimator == Estimator.by_count:
        errors += [
            ConfigError(
                f"--estimator count leaves no time to tell a network, and {subject.folder} has "
                f"model.time_conditioning=true. Use --estimator paper."
            )
            for subject in subjects
            if subject.config.model.time_conditioning
        ]
    if len({subject.tokenizer.fingerprint for subject in subjects}) > 1:
        names = " and ".join(subject.config.tokenizer.name for subject in subjects)
        errors.append(ConfigError(f"--compare: the tokenizers differ ({names}): nats a token cannot be compared."))
    rows = None
    if subjects:
        try:
            rows = _rows(request, subjects[0].config.data, subjects[0].tokenizer)
        except FetchError:
            raise
        except UserError as error:
            errors.append(error)
    if errors:
        raise type(errors[0])(*(fault for error in errors for fault in error.faults))
    assert rows is not None, request
    return subjects, rows


def _faults(request: Request) -> list[str]:
    """What is wrong with the request itself."""
    found = [
        f"--num-times {t} must be at least 1, or {INF} for continuous time."
        for t in request.num_times
        if t != INF and not (t.isdecimal() and int(t) >= 1)
    ]
    if request.num_times and request.estimator == Estimator.by_count:
        found.append("--num-times is of --estimator paper: masks by count are the bound of continuous time.")
    if len(request.num_times) > 1 and len(request.checkpoints) > 1:
        found.append("--compare takes one --num-times.")
    if not 1 <= request.samples_per_row <= MAX_DRAWS:
        found.append(f"--samples-per-row {request.samples_per_row} must lie in 1 .. {MAX_DRAWS}.")
    if request.until_se is not None and not 0 < request.until_se < math.inf:
        found.append(f"--until-se {request.until_se} must be a number above 0, in nats a token.")
    if request.batch < 1:
        found.append(f"--batch {request.batch} must be at least 1.")
    if not 0 <= request.seed < 2**64:
        found.append(f"--seed {request.seed} must lie in 0 .. 2^64 - 1.")
    if request.json:
        try:
            if Path(request.json).is_dir():
                raise IsADirectoryError("it is a folder")
            tempfile.TemporaryFile(dir=Path(request.json).parent).close()
        except OSError as error:
            found.append(f"--json {request.json} cannot be written: {error}.")
    return found


def _rows(request: Request, config: DataConfig, tokenizer: Tokenizer) -> Rows:
    """Open the data, at its own length."""
    where, inside = request.data, Path(request.data) / "validation"
    if not (Path(where) / MANIFEST).exists() and (inside / MANIFEST).is_file():
        where = str(inside)
    description = source_module.described(where)
    length = config.length if description is None else description.length
    config = replace(config, length=length)
    try:
        source = source_module.load(where, "validation", config, tokenizer, source_module.open_cache(config))
    except FetchError:
        raise
    except UserError as error:
        raise type(error)(*(fault.replace("data.validation", "--data") for fault in error.faults)) from error
    num_rows = source.num_rows if request.rows is None else request.rows
    found = []
    if num_rows > min(source.num_rows, MAX_ROWS):
        found.append(f"--rows {num_rows} is more than the {min(source.num_rows, MAX_ROWS)} rows of {where}.")
    if num_rows <= BLOCK:
        what = f"--data {where} has {num_rows} rows" if request.rows is None else f"--rows {num_rows} is too few"
        found.append(f"{what}: a standard error needs two blocks of {BLOCK}, so at least {BLOCK + 1} rows.")
    raise_if_any(found)
    manifest = _made(source, where) if description is None else description.manifest
    text_bytes = manifest.get("text_bytes")
    protocol = {
        "data": where,
        "data_fingerprint": source.fingerprint(),
        "length": length,
        "wrapping": manifest.get("wrapping"),
        "detokenizer": manifest.get("detokenizer"),
    }
    return Rows(source, num_rows, text_bytes / manifest["tokens"] if text_bytes else None, protocol)


def _made(source: Source, where: str) -> Figures:
    """What a manifest would say of rows that were made of a little text."""
    text_bytes = sum(len(document.encode()) for document in texts.documents(where, "validation"))
    tokens = int(source.rows(np.arange(source.num_rows))[1].sum())
    return {"text_bytes": text_bytes, "tokens": tokens, "wrapping": asdict(Wrapping()), "detokenizer": "none"}


def text(found: Figures) -> str:
    """The same for reading."""
    if "table" in found:
        lines = [f"{'T':>8}   {'nelbo':18} perplexity"]
        for f in found["table"]:
            nelbo, ppl = (f"{f[key]:.4f} +- {f[key + '_se']:.4f}" for key in ("nelbo", "ppl"))
            lines.append(f"{f['protocol']['num_times']:>8}   {nelbo:18} {ppl}")
        last = found["table"][-1]
        return "\n".join([*lines, *_protocol(last, last["protocol"] | {"num_times": "as in the table"})])
    lines = [line for f in _all(found) for line in [*_result(f), *_protocol(f, f["protocol"]), ""]]
    if "difference" in found:
        d = found["difference"]
        lines.append(
            f"difference, b - a: nelbo {d['nelbo']:.5f} +- {d['nelbo_se']:.5f} nats a token{_parts(d)}; "
            f"perplexity times {d['ppl_ratio']:.5f}"
        )
    return "\n".join(lines).rstrip()


def _result(f: Figures) -> list[str]:
    shown = {
        "nelbo": f"{f['nelbo']:.4f} +- {f['nelbo_se']:.4f} nats a token{_parts(f)}",
        "perplexity": f"{f['ppl']:.3f} +- {f['ppl_se']:.3f}",
        "bits a token": f"{f['bits_per_token']:.4f} +- {f['bits_per_token_se']:.4f}",
        "bits a byte": "unknown",
        "complete": "unknown: the reconstruction term needs the network at t = 0",
    }
    if f["bits_per_byte"] is not None:
        shown["bits a byte"] = f"{f['bits_per_byte']:.4f} +- {f['bits_per_byte_se']:.4f}"
    if f["complete"] is not None:
        shown["complete"] = f"{f['complete']:.4f} nats a token with prior ({f['prior']:.4f}) and reconstruction (0)"
    return [f"{key:14} {value}" for key, value in shown.items()]


def _parts(f: Figures) -> str:
    """Of the standard error."""
    if f["se_mc"] is None:
        return ""
    return (
        f" (of the noise {f['se_mc']:.5f}, which more draws lower; of the rows {f['se_data']:.5f}, which they do not)"
    )


def _protocol(f: Figures, protocol: Figures) -> list[str]:
    draws = f"{f['num_draws']} draw{'s'[: f['num_draws'] > 1]} each"
    counts = f"{f['num_rows']:,} rows, {f['num_tokens']:,} tokens, {f['num_blocks']:,} blocks, {draws}"
    return [f"{'of':14} {counts}", *(f"{key.replace('_', ' '):21} {value}" for key, value in protocol.items())]


def _all(found: Figures) -> list[Figures]:
    return found["table"] if "table" in found else [found["a"], found["b"]] if "a" in found else [found]


def _write(path: Path, content: str) -> None:
    """Complete or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(content)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"--json {path} cannot be written: {error}.") from error
