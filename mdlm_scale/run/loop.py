"""A run from its first step to its last: the order in which things happen, and nothing else."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mdlm_scale.config import Config
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.source import Source
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.engine import Engine
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import checkpoint
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.evaluate import evaluate
from mdlm_scale.run.guard import Guard
from mdlm_scale.run.metrics import Metrics
from mdlm_scale.run.optimizer import lr_at
from mdlm_scale.run.preempt import Stop
from mdlm_scale.run.step import forward_backward


@dataclass
class Run:
    """The collaborators of a run, built by `run/main`."""

    config: Config
    layout: Layout
    groups: Groups
    loader: Loader
    validation: Source
    engine: Engine
    ema: Ema
    guard: Guard
    stop: Stop
    metrics: Metrics
    fingerprints: dict[str, str]  # of the data and the tokenizer, for the checkpoint
    last_checkpoint: Path | None = None


def train(run: Run, state: State) -> State:
    """Train until the last step or until asked to stop; what is returned has been saved."""
    config, engine = run.config, run.engine
    while state.step < config.train.num_steps and not run.stop.agreed():
        batches = run.loader.at(state.step)  # corrupted, micro-batched, counted
        report = forward_backward(engine, batches, run.groups)  # sums over the global batch
        loss_is_fine = run.guard.judge(report)
        lr = lr_at(config.optimizer, state.step)
        update = engine.step(partial(run.guard.judge_norm, loss_is_fine), lr)
        run.guard.settle(state.step, report, update, str(run.last_checkpoint) if run.last_checkpoint else None)
        state = state.after(update)
        if update.applied:
            run.ema.update(engine, state.updates)
        run.metrics.train(state, report, update, lr, run.loader.waited_seconds)
        if not update.applied:
            run.metrics.event(
                state.step, f"step {state.step - 1} was skipped: loss {report.loss}, norm {update.grad_norm}"
            )
        with run.metrics.paused():
            if _due(state.step, config.evaluate.every, config.train.num_steps):
                _evaluate(run, state)
            if _due(state.step, config.checkpoint.every, config.train.num_steps):
                _save(run, state)
    if run.last_checkpoint is None or run.last_checkpoint.name != f"step-{state.step:06d}":
        _save(run, state)
    return state


def _due(step: int, every: int, num_steps: int) -> bool:
    return step % every == 0 or step == num_steps


def _evaluate(run: Run, state: State) -> None:
    config = run.config
    with run.ema.swapped(run.engine):
        evaluation = evaluate(
            run.engine,
            run.validation,
            config.evaluate,
            config.diffusion,
            run.layout,
            run.groups,
            config.batch.micro_batch_size,
            run.loader.mask_id,
            run.loader.vocab_size,
        )
    if run.layout.rank == 0:
        run.metrics.evaluated(state.step, evaluation, run.validation.unigram_perplexity(evaluation.num_rows))


def _save(run: Run, state: State) -> None:
    folder = Path(run.config.run.dir) / "checkpoints"
    run.last_checkpoint = checkpoint.save(
        folder, state, run.engine, run.ema, run.config, run.layout, run.groups, run.fingerprints
    )
    if run.layout.rank == 0:
        checkpoint.keep_newest(folder, run.config.checkpoint.keep)
