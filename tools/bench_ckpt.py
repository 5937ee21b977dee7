"""How long does a run wait for its checkpoints, how long do they take, and what does a resume read?

    python tools/bench_ckpt.py                                   100 MB of state, one process
    python tools/bench_ckpt.py --mb 400 --rounds 10 --json ckpt.json

A small model with so much state (weights, moments, average) makes steps. Every fourth is followed by a save that the
loop waits for to its end (blocking), or by one that is written beside the loop (asynchronous), in turn. Printed are
medians: a step's time, what the loop waits for each kind of save, and the time of steps while files are written, over
that of steps in peace. The state is then read back into place, and the bytes of that are counted.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from bench_engines import CPU, LR, make_batch
from bench_step import initial

from mdlm_scale import kernels
from mdlm_scale.config import (
    BatchConfig,
    Config,
    DataConfig,
    EngineName,
    ModelConfig,
    ParallelConfig,
    Precision,
    RunConfig,
    TrainConfig,
)
from mdlm_scale.layout import Layout
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import checkpoint
from mdlm_scale.run.attempt import Attempt
from mdlm_scale.run.build import build_engine, build_model
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.saver import Saver

VOCAB, LENGTH, PEACE = 2048, 128, 4  # steps between saves


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=float, default=100.0, help="of weights, moments and average (100)")
    parser.add_argument("--tokens", type=int, default=4096, help="a step (4096)")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind (5)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    for name, least in {"mb": 1, "tokens": LENGTH, "rounds": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    kernels.tune_cpu()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(args, Path(folder))
    print(f"{result['state_mb']:.0f} MB of state, {args.tokens} tokens a step, {torch.get_num_threads()} threads")
    print(f"a step                                    {result['step_seconds']:8.3f} s")
    for kind in ("blocking", "asynchronous"):
        wait = result[kind]["wait_seconds"]
        print(f"the loop waits for a save, {kind:14} {wait:8.3f} s   {wait / result['step_seconds']:6.1%} of a step")
    print(f"until an asynchronous save is complete    {result['asynchronous']['seconds']:8.3f} s")
    print(f"a step meanwhile, over one in peace       {result['step_ratio_while_saving']:8.3f}")
    print(f"to read it back                           {result['restore_seconds']:8.3f} s, {result['read_mb']:.0f} MB")
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    num_rows = args.tokens // LENGTH
    config = Config(
        run=RunConfig(dir=str(folder)),
        data=DataConfig(length=LENGTH),
        model=_model(args.mb),
        batch=BatchConfig(num_rows, num_rows),
        parallel=ParallelConfig(engine=EngineName.plain),
        train=TrainConfig(precision=Precision.float32, device="cpu"),
    )
    groups, layout = Groups(), Layout()
    model = build_model(config, VOCAB, VOCAB - 1)
    engine = build_engine(config, model, initial, CPU, layout, groups)
    ema = Ema(engine, 0.9999)
    parts = checkpoint.parts(engine.shards(), ema)
    saver = Saver(config, layout, groups, parts, {}, Attempt.begin(folder), None)
    batch = make_batch(config, VOCAB, range(num_rows))

    def step() -> float:
        start = time.perf_counter()
        engine.forward_backward([batch], batch.num_tokens)
        engine.step(lambda norm: True, LR)
        ema.update(engine, 1)
        return time.perf_counter() - start

    in_peace: list[float] = []
    while_saving: list[float] = []
    waits: dict[str, list[float]] = {"blocking": [], "asynchronous": []}
    seconds: list[float] = []
    step()
    for number in range(1 + args.rounds):  # the first round makes the buffers
        for kind, wait in waits.items():
            in_peace += [step() for _ in range(PEACE)]
            start = time.perf_counter()
            saver.save(State(2 * number + (kind == "blocking")))
            if kind == "blocking":
                saver.wait()
            wait.append(time.perf_counter() - start)
            while saver.thread is not None and saver.thread.is_alive():
                while_saving.append(step())
            if (saved := saver.wait()) is not None:
                seconds.append(saved.seconds)
        if number == 0:
            in_peace, while_saving, seconds = [], [], []
            waits = {kind: [] for kind in waits}
    path = checkpoint.newest(folder)
    assert path is not None
    start = time.perf_counter()
    _, num_bytes = checkpoint.restore(path, engine, ema)
    restore_seconds = time.perf_counter() - start
    return {
        "state_mb": sum(part.flat.nbytes for part in parts.values()) / 1e6,
        "step_seconds": statistics.median(in_peace),
        "blocking": {"wait_seconds": statistics.median(waits["blocking"])},
        "asynchronous": {
            "wait_seconds": statistics.median(waits["asynchronous"]), "seconds": statistics.median(seconds)
        },
        "step_ratio_while_saving": statistics.median(while_saving) / statistics.median(in_peace),
        "restore_seconds": restore_seconds,
        "read_mb": num_bytes / 1e6,
    }  # fmt: skip


def _model(mb: float) -> ModelConfig:
    """Four layers, as wide as the state is large: four tensors of float32 a parameter."""
    width = 64
    while True:
        wider = replace(ModelConfig(hidden_size=width + 64, num_layers=4, num_heads=4), dropout=0.1)
        if 16e-6 * sizes(wider, VOCAB, LENGTH).num_parameters > mb:
            return replace(wider, hidden_size=width)
        width += 64


if __name__ == "__main__":
    sys.exit(main())
