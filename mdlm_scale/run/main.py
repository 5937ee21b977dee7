"""From a config file to a running run: check everything, build everything, train, and say how it ended.

Nothing is written before every fault that can be found has been found.
"""

import hashlib
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mdlm_scale
from mdlm_scale import config as config_module
from mdlm_scale import kernels, layout
from mdlm_scale import log as log_module
from mdlm_scale.config import Config, Device, EngineName, outside
from mdlm_scale.data import loader as loader_module
from mdlm_scale.data import source as source_module
from mdlm_scale.data import tokenizer as tokenizer_module
from mdlm_scale.data.loader import Loader
from mdlm_scale.data.source import Source
from mdlm_scale.data.tokenizer import Tokenizer
from mdlm_scale.diffusion import schedule
from mdlm_scale.errors import EXIT_RUN_AGAIN, CheckpointError, ConfigError, DataError, raise_if_any
from mdlm_scale.layout import Layout
from mdlm_scale.log import log
from mdlm_scale.model import dit, init
from mdlm_scale.model.sizes import Sizes, gemm_rate, sizes
from mdlm_scale.parallel.groups import Groups, Over, World, world
from mdlm_scale.run import build, checkpoint, evaluate, guard, optimizer, saver, self_test
from mdlm_scale.run.attempt import Attempt
from mdlm_scale.run.checkpoint import State
from mdlm_scale.run.ema import Ema
from mdlm_scale.run.loop import Run, train
from mdlm_scale.run.metrics import Metrics
from mdlm_scale.run.preempt import Stop
from mdlm_scale.run.saver import Saver


def main(config_path: str, overrides: list[str], check_only: bool, num_ranks: int | None, started: float) -> int:
    """`python -m mdlm_scale.train`, begun at `started`: the exit code. A check may be for more ranks than run."""
    ranks = world() if num_ranks is None else World()
    log_module.start(ranks.rank)
    if not torch.cuda.is_available():
        kernels.tune_cpu(ranks.local_size)
    with Groups(ranks) as groups:
        planned = replace(ranks, size=num_ranks or ranks.size)
        config = build.with_engine(config_module.load(config_path, overrides), planned.size)
        raise_if_any(faults(config, planned))
        device = build.device_of(config, ranks)
        if ranks.size > 1 or (num_ranks is None and config.parallel.engine is not EngineName.plain):
            groups.open(device, config.parallel.start_minutes, config.parallel.tp_size)
        groups.agree("The ranks differ", _identity(config))
        data = _read_data(config)
        _check_init_from(config, data, groups)
        newest = _resume_point(config)
        notes = [] if newest is None else _compare_data(newest, data)
        if check_only:
            if ranks.rank == 0:
                _print_plan(config, data, planned)
            return 0
        groups.agree("The ranks see other files", data.fingerprints() | {"resume from": str(newest)})
        if newest is not None and (Path(config.run.dir) / "done").exists():
            step = checkpoint.read_manifest(newest)["state"]["step"]
            if step >= config.train.num_steps:
                log.info(f"run {config.run.dir} is done: {step} steps, {newest}; a higher train.num_steps would go on")
                return 0
        return _train(config, groups, device, data, notes, started)


def faults(config: Config, ranks: World) -> list[str]:
    """Everything wrong with a configuration that can be told without reading data."""
    found = outside("train", config.train, ["num_steps"]) + outside("logging", config.logging, ["every"])
    found += outside("run", config.run, ["seed"], lambda n: 0 <= n < 2**64, "lie in 0 .. 2^64 - 1")
    if not torch.cuda.is_available():
        if config.train.device == Device.cuda:
            found.append("train.device=cuda, but PyTorch sees no GPU here. Use train.device=auto or cpu.")
        if config.train.device == Device.auto and ranks.gpus_of_slurm:
            found.append(
                f"Slurm gave this job {ranks.gpus_of_slurm} GPUs a node, but PyTorch {torch.__version__} sees none. "
                f"See whether nvidia-smi does, and install a PyTorch that is built for them; or use train.device=cpu."
            )
    found += source_module.faults(config.data)
    found += dit.faults(config.model)
    found += schedule.faults(config.diffusion, config.model.time_conditioning)
    laid_out = layout.faults(config.parallel, config.batch, ranks.size)
    found += laid_out + build.faults(config, None if laid_out else build.layout_of(config, ranks))
    found += optimizer.faults(config.optimizer, config.ema)
    found += evaluate.faults(config.evaluate)
    found += saver.faults(config.checkpoint)
    found += guard.faults(config.guard)
    return found


@dataclass(frozen=True)
class Data:
    tokenizer: Tokenizer
    train: Source
    validation: Source

    def fingerprints(self) -> dict[str, str]:
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "data.train": self.train.fingerprint(),
            "data.validation": self.validation.fingerprint(),
        }


def _read_data(config: Config) -> Data:
    tokenizer = tokenizer_module.load(config.tokenizer)
    wanted = {
        "train": (config.data.train, config.batch.global_batch_size, "one global batch"),
        "validation": (config.data.validation, 2 * evaluate.BLOCK, "two blocks, for a standard error"),
    }
    cache = source_module.open_cache(config.data)
    sources: dict[str, Source] = {}
    found: list[str] = []
    for split, (where, least, reason) in wanted.items():
        try:
            source = sources[split] = source_module.load(where, split, config.data, tokenizer, cache)
        except DataError as error:
            found += error.faults
            continue
        if source.num_rows < least:
            found.append(
                f"data.{split}='{where}' is too short: {source.num_rows} rows of {config.data.length} tokens, at least "
                f"{least} are needed ({reason}). Give more text or shorter rows (data.length)."
            )
    raise_if_any(found, DataError)
    return Data(tokenizer, **sources)


def _identity(config: Config) -> dict[str, Any]:
    """What all ranks must share: every setting, the code, and the packages that compute."""
    package = Path(mdlm_scale.__file__).parent
    files = sorted(package.rglob("*.py"))
    code = hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()
    return config_module.settings(config) | {"code of mdlm_scale": code[:16], "version of torch": torch.__version__}


def _print_plan(config: Config, data: Data, ranks: World) -> None:
    """What `--check` shows: the resolved config, parameters and memory. Nothing is written."""
    print(config_module.to_yaml(config), end="")
    own_layout, vocab_size = build.layout_of(config, ranks), data.tokenizer.vocab_size
    size = sizes(config.model, vocab_size, config.data.length)
    places = build.places_of(config, vocab_size, own_layout)
    here = replace(size, num_parameters=sum(place.shape.numel() for place in places.values()))
    weight_bytes = build.DTYPES[config.train.precision].itemsize
    state = here.state_bytes(config.parallel, own_layout.shard_size, weight_bytes)
    print(f"# train: {data.train.describe()}; validation: {data.validation.describe()}")
    print(f"# {own_layout.describe()}; engine {_engine_text(config)}")
    parts = ", ".join(f"{part} {number / 1e6:,.1f}" for part, number in state.items() if number)
    share = f", {here.num_parameters:,} of them on a tensor-parallel rank" if own_layout.tp_size > 1 else ""
    print(f"# {size.num_parameters:,} parameters{share}; {sum(state.values()) / 1e6:,.1f} MB of state a rank: {parts}")
    if note := build.crossing_note(config, vocab_size, own_layout, ranks.local_size):
        print(f"# {note}")
    print(f"# writes to: {config.run.dir}")


def _resume_point(config: Config) -> Path | None:
    """The checkpoint this run goes on from, None for a new one; a directory with another run in it is refused."""
    folder = Path(config.run.dir)
    if not folder.exists() or not any(folder.iterdir()):
        return None
    written = folder / "config.yaml"
    if not written.is_file():
        raise CheckpointError(f"run.dir={folder} holds files but no run (no config.yaml). Choose another run.dir.")
    differences = config_module.changes_of_meaning(config_module.load(written), config)
    if differences:
        raise CheckpointError(
            f"run.dir={folder} belongs to another run. Differing: {'; '.join(differences)}. "
            f"Choose another run.dir, or undo the changes to resume."
        )
    return checkpoint.newest(folder)


def _check_init_from(config: Config, data: Data, groups: Groups) -> None:
    """The checkpoint that a new run is to begin from is sound, and of a model like this one."""
    if config.run.init_from is None or checkpoint.newest(Path(config.run.dir)) is not None:
        return
    if (path := checkpoint.newest(Path(config.run.init_from))) is None:
        raise CheckpointError(
            f"run.init_from={config.run.init_from} is no checkpoint of ours, nor a run directory with one. Of another "
            f"format: python tools/convert_ckpt.py {config.run.init_from} DST --to native makes one."
        )
    manifest, now = checkpoint.read_manifest(path), config_module.to_tree(config)["model"]
    groups.agree("The ranks see other files", {"run.init_from": manifest["files"]})
    now |= {"vocabulary": data.tokenizer.vocab_size, "tokenizer": data.tokenizer.fingerprint}
    before = now | manifest["config"]["model"] | manifest["fingerprints"] | {"dropout": now["dropout"]}
    before["vocabulary"] = manifest["tensors"].get("ema/embed.weight", {"shape": [None]})["shape"][0]
    found = [f"{key} is {before[key]} there, {now[key]} here" for key in now if before[key] != now[key]]
    found += checkpoint.damage(path, groups)
    raise_if_any((f"run.init_from={path}: {fault}." for fault in found), CheckpointError)


def _train(config: Config, groups: Groups, device: torch.device, data: Data, notes: list[str], started: float) -> int:
    rank, folder = groups.ranks.rank, Path(config.run.dir)
    if rank == 0:
        _open_folder(config)
    attempt = Attempt(folder, groups.gather(Attempt.begin(folder).number if rank == 0 else None)[0])
    attempt.meet(groups)
    resume_from = checkpoint.newest_sound(folder / "checkpoints", groups)
    dtype = build.DTYPES[config.train.precision]
    size = sizes(config.model, data.tokenizer.vocab_size, config.data.length)
    own_layout = build.layout_of(config, groups.ranks)
    _announce(config, data, size, device, own_layout, resume_from)
    model = build.build_model(config, data.tokenizer.vocab_size, data.tokenizer.mask_id)
    rules, seed = init.fills(model), config.run.seed

    def init_range(name: str, start: int, numel: int) -> torch.Tensor:
        return init.init_range(seed, name, rules[name], start, numel)

    engine = build.build_engine(config, model, init_range, device, own_layout, groups)
    if resume_from is None and config.run.init_from and (path := checkpoint.newest(Path(config.run.init_from))):
        checkpoint.restore(path, engine, None)
        notes = [f"began with the averaged weights of {path}", *notes]
    ema = Ema(engine, config.ema.decay)
    state = State()
    if resume_from is not None:
        state, num_bytes = checkpoint.restore(resume_from, engine, ema)
        notes = [f"resumed from {resume_from}, {num_bytes / 1e6:,.1f} MB read by rank 0", *notes]
    note = build.crossing_note(config, data.tokenizer.vocab_size, own_layout, groups.ranks.local_size)
    if note and rank == 0:
        log.warning(note)
    if note := loader_module.balance_note(own_layout, config.batch, config.diffusion):
        log.info(note)
    loader = Loader(
        data.train, own_layout, config.batch, config.diffusion, config.run.seed,
        mask_id=data.tokenizer.mask_id, vocab_size=data.tokenizer.vocab_size, dropout_sites=model.num_dropout_sites,
        prefetch=config.data.prefetch, pin_memory=device.type == "cuda",
    )  # fmt: skip
    total_rate = groups.sum([gemm_rate(device, dtype)], over=Over.all)[0]
    with Metrics(config, size, total_rate, state, rank) as metrics:
        for note in notes:
            metrics.event(state.step, note)
        run = Run(
            config, own_layout, groups, loader, data.validation, engine, ema,
            guard.Guard(config.guard, state.losses), Stop(groups, config.train.max_minutes), metrics,
            Saver(config, own_layout, groups, checkpoint.parts(engine.shards(), ema), data.fingerprints(), attempt,
                  resume_from), started,
        )  # fmt: skip
        groups.set_timeout(config.parallel.start_minutes)
        try:
            state = train(run, state)
        finally:
            loader.close()
            run.saver.close()
    return _conclude(config, state, rank, run.stop)


def _open_folder(config: Config) -> None:
    folder = Path(config.run.dir)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_module.to_yaml(config))
        (folder / "done").unlink(missing_ok=True)  # there again at the end; meanwhile scripts must not believe it
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be written: {error}.") from error
    log_module.also_to(folder / "log.txt")


def _conclude(config: Config, state: State, rank: int, stop: Stop) -> int:
    folder = Path(config.run.dir)
    if state.step < config.train.num_steps:
        done = f"stopped at step {state.step} of {config.train.num_steps}, saved{stop.since()}"
        log.info(f"{done}; the same command goes on from here")
        return EXIT_RUN_AGAIN
    if rank != 0:
        return 0
    (folder / "done").write_text(json.dumps({"step": state.step, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}) + "\n")
    log.info(
        f"done: {state.step} steps\n  checkpoint  {checkpoint.newest(folder)}\n  config      {folder / 'config.yaml'}\n"
        f"  metrics     {folder / 'metrics.jsonl'}\n  log         {folder / 'log.txt'}"
    )
    return 0


def _compare_data(path: Path, data: Data) -> list[str]:
    """Refuse to go on with other tokens than the run began with; other validation rows are worth a note."""
    manifest, now = checkpoint.read_manifest(path), data.fingerprints()
    if "converted" in manifest:
        raise CheckpointError(f"{path} was converted and has no moments: begin a new run with run.init_from={path}.")
    before = manifest["fingerprints"]
    differing = [key for key in now if before.get(key) != now[key]]
    if set(differing) - {"data.validation"}:
        raise CheckpointError(
            f"{path} was trained on other data: {' and '.join(differing)} changed (rows, shards, or a mixture's "
            f"weights or order). Undo that to resume, or choose another run.dir."
        )
    return ["data.validation changed: evaluations before and after this step do not compare"] if differing else []


def _engine_text(config: Config) -> str:
    stage = f" stage {config.parallel.zero_stage}" if config.parallel.engine is EngineName.deepspeed else ""
    return f"{config.parallel.engine}{stage}{', sequence parallel' * config.parallel.sequence_parallel}"


def _announce(
    config: Config, data: Data, size: Sizes, device: torch.device, own_layout: Layout, resume_from: Path | None
) -> None:
    parallel = config.parallel
    log.info(
        f"run {config.run.dir}: {'resuming ' + resume_from.name if resume_from else 'new'}, seed {config.run.seed}"
    )
    log.info(f"train {data.train.describe()}; validation {data.validation.describe()}")
    log.info(f"{own_layout.describe()}; engine {_engine_text(config)}")
    where = (device, build.DTYPES[config.train.precision], build.is_sharded(parallel))
    log.info(
        f"model {size.num_parameters:,} parameters, V {data.tokenizer.vocab_size}, mask id {data.tokenizer.mask_id}; "
        f"{config.train.precision} on {device}; {kernels.describe(*where)}"
    )
    for found in self_test.check(*where):
        log.info(found)
