"""What a run says of itself: metrics.jsonl, which is the truth; a progress line; and Weights & Biases, its only door.

A row of metrics.jsonl is one JSON object: `kind` (train, eval or event), `step` (steps done), then the figures.
"""

import json
import math
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from mdlm_scale import config as config_module
from mdlm_scale import log as log_module
from mdlm_scale.config import Config, WandbMode
from mdlm_scale.errors import ConfigError
from mdlm_scale.log import log
from mdlm_scale.model.sizes import Sizes
from mdlm_scale.parallel.engine import Update
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.evaluate import Evaluation
from mdlm_scale.run.saver import Saved
from mdlm_scale.run.step import Report


class Metrics:
    def __init__(self, config: Config, sizes: Sizes, gemm_rate: float, state: State, rank: int = 0) -> None:
        """Open the files of the run directory; rows past `state.step` belong to steps that will be done again.

        `gemm_rate` is that of all ranks together. Rank 0 speaks for all: the others write nothing.
        """
        self.folder = Path(config.run.dir)
        self.every = config.logging.every
        self.num_steps = config.train.num_steps
        self.sizes = sizes
        self.gemm_rate = gemm_rate
        self.first_step = state.step
        self.started = self.row_time = time.monotonic()
        self.since_row = (0, 0)  # tokens and masked tokens since the last row
        self.row_waited = 0.0  # seconds waited for data until the last row
        self.file: TextIO | None = None
        self.wandb: Any = None
        if rank == 0:
            self.rewind(state.step)
            self.wandb = _start_wandb(config, self.folder)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close on every way out of the run; a crash is told to Weights & Biases."""
        log_module.end_live()
        if self.file is not None:
            self.file.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=0 if kind is None else 1)

    def train(self, state: State, report: Report, update: Update, lr: float, waited_seconds: float) -> None:
        """After each step: refresh the progress line; every n steps and at the end, a row."""
        tokens, masked = self.since_row = (self.since_row[0] + report.num_tokens, self.since_row[1] + report.num_masked)
        now = time.monotonic()
        seconds = now - self.row_time
        row = {
            "loss": report.loss,
            "nelbo": report.nelbo,
            "ppl": perplexity(report.nelbo),
            "grad_norm": update.grad_norm,
            "lr": lr,
            "updates": state.updates,
            "applied": update.applied,
            "masked_share": report.num_masked / report.num_tokens,
            "nll_by_t": report.bucket_nll,
            "tokens_per_second": tokens / seconds,
            "gemm_share": self.sizes.step_flops(tokens, masked) / seconds / self.gemm_rate,
            "data_wait_share": (waited_seconds - self.row_waited) / seconds,
            "seconds": now - self.started,
        }
        last = state.step == self.num_steps
        if last or state.step % self.every == 0:
            self.write("train", state.step, row)
            self.row_time, self.since_row, self.row_waited = now, (0, 0), waited_seconds
        log_module.live(self._progress(state.step, row), last)

    def evaluated(self, step: int, evaluation: Evaluation, unigram_ppl: float) -> None:
        self.write("eval", step, {**vars(evaluation), "unigram_ppl": unigram_ppl})
        log.info(
            f"step {step}: validation nelbo {evaluation.nelbo:.4f} +- {evaluation.nelbo_se:.4f}, "
            f"ppl {evaluation.ppl:.3f} +- {evaluation.ppl_se:.3f} "
            f"(EMA weights, {evaluation.num_rows} rows; unigram ppl {unigram_ppl:.2f})"
        )

    def saved(self, saved: Saved | None) -> None:
        """Whether a checkpoint was completed, and which."""
        if saved is not None:
            figures = {"stall_seconds": saved.stall_seconds, "seconds": saved.seconds, "bytes": saved.num_bytes}
            self.write("event", saved.step, {"message": f"saved {saved.path.name}", **figures})

    def event(self, step: int, message: str) -> None:
        self.write("event", step, {"message": message})
        log.info(f"step {step}: {message}")

    def rewind(self, step: int) -> None:
        """Drop the rows of steps past this one, which are done again; on rank 0."""
        path = self.folder / "metrics.jsonl"
        if self.file is not None:
            self.file.close()
        _forget_after(path, step)
        self.file = path.open("a", encoding="utf-8")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For work that is not training: it does not count in tokens per second."""
        start = time.monotonic()
        yield
        self.row_time += time.monotonic() - start

    def write(self, kind: str, step: int, figures: dict[str, Any]) -> None:
        """One row, handed to the system before the call returns: the process may die, the row stays."""
        if self.file is not None:
            self.file.write(json.dumps({"kind": kind, "step": step, **json_safe(figures)}) + "\n")
            self.file.flush()
        if self.wandb is not None:
            self.wandb.log({f"{kind}/{key}": value for key, value in figures.items()}, step=step)

    def _progress(self, step: int, row: dict[str, Any]) -> str:
        per_step = (time.monotonic() - self.started) / max(1, step - self.first_step)
        return (
            f"step {step}/{self.num_steps} {step / self.num_steps:4.0%} | "
            f"eta {log_module.duration((self.num_steps - step) * per_step)} | "
            f"nelbo {row['nelbo']:.4f} ppl {row['ppl']:.2f} | "
            f"grad {row['grad_norm']:.2f} lr {row['lr']:.1e} | "
            f"{log_module.short(row['tokens_per_second'])} tok/s {row['gemm_share']:.0%} of GEMM peak"
        )


def perplexity(nelbo: float) -> float:
    return math.exp(min(nelbo, 700.0)) if math.isfinite(nelbo) else nelbo


def _forget_after(path: Path, step: int) -> None:
    """Drop rows of later steps, and a half-written last line, that an earlier attempt left."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except (ValueError, KeyError):
            continue
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(kept), encoding="utf-8")
    os.replace(aside, path)


def _start_wandb(config: Config, folder: Path) -> Any:
    """The run at Weights & Biases, with an id that a resumed run finds again; None if off."""
    if config.logging.wandb is WandbMode.off:
        return None
    import wandb

    id_file = folder / "wandb_id"
    if not id_file.exists():
        id_file.write_text(uuid.uuid4().hex[:8])
    try:
        return wandb.init(
            project=config.logging.project,
            id=id_file.read_text().strip(),
            resume="allow",
            dir=str(folder),
            mode="online" if config.logging.wandb is WandbMode.online else "offline",
            config=config_module.to_tree(config),
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
    except wandb.errors.Error as error:
        raise ConfigError(f"Weights & Biases did not start: {error}. Log in, or set logging.wandb=offline.") from error


def json_faults(file: str | Path | None) -> list[str]:
    """Why `--json FILE` could not be written, told before the work."""
    try:
        if file and Path(file).is_dir():
            raise IsADirectoryError("it is a folder")
        if file and not _is_pipe(file):
            tempfile.TemporaryFile(dir=Path(file).resolve().parent).close()
    except OSError as error:
        folder = Path(file).resolve().parent if file else Path()
        reason = error.strerror or error if folder.is_dir() else f"there is no folder {folder}; make it first"
        return [f"--json {file} cannot be written: {reason}."]
    return []


def write_json(file: str | Path, content: str) -> None:
    """Complete or not at all. A pipe or a device, as /dev/stdout may be, takes it as it comes."""
    path = Path(file).resolve()  # a link stays one
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if _is_pipe(file):
            Path(file).write_text(content, encoding="utf-8")
            return
        aside.write_text(content, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise ConfigError(f"--json {file} cannot be written: {error}.") from error


def _is_pipe(file: str | Path) -> bool:
    return Path(file).exists() and not Path(file).is_file()


def json_safe(value: Any) -> Any:
    """NaN and infinity are no JSON: they become null."""
    if isinstance(value, dict):
        return {k: json_safe(v) for k, v in value.items()}
    if isinstance(value, list):
        return [json_safe(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
