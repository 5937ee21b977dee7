"""One small run on any layout, and everything about it that must not depend on the layout.

The model is small but whole: two blocks, time conditioning, dropout, a mask id in the middle of the vocabulary, weights
without zeros (a fresh model passes no gradient on), rows with padding. Clipping is always active. On its way the run
refuses a step and evaluates with averaged weights, neither of which may leave a trace.
"""

import hashlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mdlm_scale.config import (
    BatchConfig,
    BlockName,
    Config,
    DataConfig,
    EmaConfig,
    EngineName,
    EvaluateConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Precision,
    TrainConfig,
)
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type
from mdlm_scale.data.source import Source, in_memory
from mdlm_scale.diffusion.corrupt import Batch
from mdlm_scale.layout import Layout
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.init import Fill, init_range
from mdlm_scale.parallel.engine import Engine
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run.build import build_engine, build_model, layout_of
from mdlm_scale.run.checkpoint import KINDS
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.evaluate import evaluate
from mdlm_scale.run.optimizer import lr_at
from mdlm_scale.run.step import forward_backward

LENGTH, VOCAB, MASK_ID, NUM_ROWS = 16, 61, 7, 48
CPU = torch.device("cpu")
EVALUATED, REFUSED = 1, 2  # steps

Bug = Callable[[Groups], None]


@dataclass(frozen=True)
class Trial:
    """A layout to try. `precision` is that of weights and masters."""

    parallel: ParallelConfig
    world_size: int = 1
    precision: Precision = Precision.float64
    global_batch_size: int = 8
    micro_batch_size: int = 2
    steps: int = 100
    padded: bool = True
    time_conditioning: bool = True
    block: BlockName = BlockName.paper
    vocab_size: int = VOCAB
    prefetch: int = 2
    evaluated: bool = True  # with averaged weights, after step 1
    refused: bool = True  # step 2
    poison: str | None = None  # what is not finite in step 2 on the last rank, the reason to refuse it: loss or norm


def config_of(trial: Trial) -> Config:
    return Config(
        data=DataConfig(length=LENGTH, prefetch=trial.prefetch),
        model=ModelConfig(
            hidden_size=32, num_layers=2, num_heads=4, cond_size=16, dropout=0.1,
            time_conditioning=trial.time_conditioning, block=trial.block,
            num_kv_heads=2 if trial.block is BlockName.modern else None,
        ),
        batch=BatchConfig(trial.global_batch_size, trial.micro_batch_size),
        optimizer=OptimizerConfig(lr=1e-3, weight_decay=0.1, warmup_steps=10, max_grad_norm=0.05),
        ema=EmaConfig(decay=0.9),
        parallel=trial.parallel,
        train=TrainConfig(num_steps=trial.steps, precision=trial.precision, device="cpu"),
        evaluate=EvaluateConfig(rows=24),
    )  # fmt: skip


def source(padded: bool, vocab_size: int = VOCAB) -> Source:
    rows = np.empty(NUM_ROWS, record_type(LENGTH, np.dtype("<u2")))
    tokens = (np.arange(NUM_ROWS * LENGTH) * 37) % (vocab_size - 1)
    rows[TOKENS] = (tokens + (tokens >= MASK_ID)).reshape(NUM_ROWS, LENGTH)
    rows[NUM_TOKENS] = LENGTH - np.arange(NUM_ROWS) % 5 if padded else LENGTH
    return Source([in_memory(rows)])


def initial(name: str, start: int, numel: int) -> Tensor:
    """Weights without zeros; norms around one."""
    values = init_range(0, name, Fill(bound=0.2), start, numel)
    return values + 1 if "norm" in name else values


def run_trial(groups: Groups, trial: Trial, bug: Bug | None = None) -> dict[str, Any]:
    """Train, and return what is compared; called on every rank. `bug` breaks something first, on purpose."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    if trial.parallel.engine is EngineName.deepspeed and trial.precision is Precision.float64:
        from parity.float64 import widen_deepspeed  # seconds to import, where it is not yet

        widen_deepspeed()
    if bug is not None:
        bug(groups)
    config = config_of(trial)
    layout = layout_of(config, groups.ranks)
    model = build_model(config, trial.vocab_size, MASK_ID)
    names = [name for name, _ in model.named_parameters()]
    now = {"step": 0}
    if trial.poison and groups.ranks.rank == trial.world_size - 1:
        poison(model, trial.poison, now)
    engine = build_engine(config, model, initial, CPU, layout, groups)
    ema = Ema(engine, config.ema.decay)
    loader = make_loader(
        config, layout, source(trial.padded, trial.vocab_size), model.num_dropout_sites, trial.vocab_size
    )
    result: dict[str, Any] = {"loss": [], "norm": [], "noise": [], "traces": []}
    updates = 0
    for now["step"] in range(trial.steps):
        step = now["step"]
        batches = loader.at(step)
        result["noise"].append(digest(batches))
        report = forward_backward(engine, batches, groups)
        if step == 0:
            result["gradients"] = {name: engine.full_gradient(name).clone() for name in names}
        refuse = trial.refused and trial.poison is None and step == REFUSED
        refuse |= not math.isfinite(report.loss)
        before = state(engine, ema)
        lr = lr_at(config.optimizer, step + 5)  # that of step 0 would be 0
        update = engine.step(lambda norm, refuse=refuse: math.isfinite(norm) and not refuse, lr)
        assert update.applied is not (trial.refused and step == REFUSED), update
        if not update.applied:
            result["traces"] += changed(before, state(engine, ema))
        else:
            updates += 1
            ema.update(engine, updates)
        result["loss"].append(report.loss)
        result["norm"].append(update.grad_norm)
        if step == 0:
            result["parameters 0"] = parameters(engine, names)
        if trial.evaluated and step == EVALUATED:
            before = state(engine, ema)
            with ema.swapped(engine):
                result["ema"] = parameters(engine, names)
                found = evaluate(engine, loader.source, config.evaluate, config.diffusion, layout, groups,
                                 trial.micro_batch_size, MASK_ID, trial.vocab_size)  # fmt: skip
                result["evaluation"] = found.nelbo
            result["traces"] += changed(before, state(engine, ema))
    loader.close()
    result["parameters"] = parameters(engine, names)
    return result


def poison(model: DiT, what: str, now: dict[str, int]) -> None:
    """In the step to be refused a block's output is not a number, or only the gradient that comes back to it."""

    def spoil(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        if now["step"] != REFUSED or not output.requires_grad:
            return output
        if what == "loss":
            return output * math.nan
        output.register_hook(lambda gradient: gradient * math.inf)
        return output

    model.blocks[0].register_forward_hook(spoil)


def make_loader(config: Config, layout: Layout, rows: Source, dropout_sites: int, vocab_size: int = VOCAB) -> Loader:
    return Loader(
        rows, layout, config.batch, config.diffusion, config.run.seed, mask_id=MASK_ID, vocab_size=vocab_size,
        dropout_sites=dropout_sites, prefetch=config.data.prefetch,
    )  # fmt: skip


def digest(batches: list[Batch]) -> list[str]:
    """Of every slot of this rank: its tokens, time, mask and dropout keys."""
    found = []
    for batch in batches:
        assert batch.dropout_keys is not None
        for i in range(len(batch.t_B)):
            parts = (batch.x_BL[i], batch.z_BL[i], batch.t_B[i], batch.is_token_BL[i], batch.dropout_keys[:, i])
            found.append(hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest())
    return found


def state(engine: Engine, ema: Ema) -> dict[str, Tensor]:
    """A copy of all that a refused step must leave as it was, as this rank sees it."""
    found: dict[str, Tensor] = {}
    for name, shard in engine.shards().items():
        parts = (shard.master, shard.exp_avg, shard.exp_avg_sq, ema.flats[name])
        found |= {f"{kind}/{name}": part.clone() for kind, part in zip(KINDS, parts, strict=True)}
    return found


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def parameters(engine: Engine, names: list[str]) -> dict[str, Tensor]:
    return {name: engine.full_parameter(name).clone() for name in names}
