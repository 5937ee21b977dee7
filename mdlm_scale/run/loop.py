"""A run from its first step to its last: the order in which things happen, and nothing else."""

import time
from dataclasses import dataclass, replace
from functools import partial

from mdlm_scale.config import Config
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.source import Source
from mdlm_scale.errors import TrainingError
from mdlm_scale.layout import Layout
from mdlm_scale.log import log
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
from mdlm_scale.run.saver import Saver
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
    saver: Saver
    started: float  # when this process began


def train(run: Run, state: State) -> State:
    """Train until the last step or until asked to stop; what is returned has been saved."""
    config, engine = run.config, run.engine
    first = True
    while (state := state.past_skipped(config.train.num_steps)).step < config.train.num_steps and not run.stop.agreed():
        batches = run.loader.at(state.step)  # corrupted, micro-batched, counted
        report = forward_backward(engine, batches, run.groups)  # sums over the global batch
        loss_is_fine = run.guard.judge(report)
        lr = lr_at(config.optimizer, state.step)
        update = engine.step(partial(run.guard.judge_norm, loss_is_fine), lr)
        if not update.applied:
            run.metrics.saved(run.saver.wait())  # which checkpoint is the last should be known now
        must_rewind = run.guard.settle(state.step, report, update, run.saver.last)
        state = state.after(update, run.guard.losses)
        if update.applied:
            run.ema.update(engine, state.updates)
        run.metrics.train(state, report, update, lr, run.loader.waited_seconds)
        if not update.applied:
            run.metrics.event(
                state.step,
                f"step {state.step - 1} was skipped: loss {report.loss}, norm {update.grad_norm}; its "
                f"{config.batch.global_batch_size} samples are not trained on",
            )
        if first:
            log.info(f"first step done {time.monotonic() - run.started:.1f} s after the start")
            run.groups.set_timeout(config.parallel.timeout_minutes)
            first = False
        if must_rewind:
            state = _rewind(run)
            continue
        with run.metrics.paused():
            if _due(state.step, config.evaluate.every, config.train.num_steps):
                _evaluate(run, state)
            # not among bad steps: the weights themselves may have gone bad
            if _due(state.step, config.checkpoint.every, config.train.num_steps) and update.applied:
                run.metrics.saved(run.saver.save(state))
        run.metrics.saved(run.saver.poll())
    run.metrics.saved(run.saver.finish())
    if run.saver.last is None or run.saver.last.name != f"step-{state.step:06d}":
        run.saver.save(state)
        run.metrics.saved(run.saver.finish())
    return state


def _due(step: int, every: int, num_steps: int) -> bool:
    return step % every == 0 or step == num_steps


def _rewind(run: Run) -> State:
    """Back to the last checkpoint, with the steps that were refused since left out."""
    run.metrics.saved(run.saver.finish())
    path = checkpoint.newest_sound(run.saver.folder, run.groups)
    refused = run.guard.refused
    if path is None:
        raise TrainingError(
            f"Steps {refused[0]} .. {refused[-1]} were refused (guard.max_skips={run.config.guard.max_skips}), and "
            f"there is no checkpoint yet to return to."
        )
    state, _ = checkpoint.restore(path, run.engine, run.ema)
    state = replace(state, skipped_steps=sorted({*state.skipped_steps, *refused}))
    run.guard.rewound(state.losses)
    if run.layout.rank == 0:
        run.metrics.rewind(state.step)
    samples = len(refused) * run.config.batch.global_batch_size
    run.metrics.event(
        state.step,
        f"back to {path.name}; steps {', '.join(map(str, refused))} are left out, {samples} samples are not trained on",
    )
    return state


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
