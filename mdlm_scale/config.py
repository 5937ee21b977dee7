"""Every setting of a run: typed dataclasses, one section a component; loaded, overridden, checked and written here.

Defaults < YAML file < `section.key=value` on the command line. `load` reports every unknown key and wrong type at
once. Rules about values belong to the component they concern: each offers `faults(...)`, gathered by `run/main`.
This is the only door to omegaconf, which parses and interpolates; the typing is ours, so that no fault hides another.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # omegaconf's own parser

from mdlm_scale.errors import ConfigError, raise_if_any

BlockName = StrEnum("BlockName", "paper modern")
ScheduleName = StrEnum("ScheduleName", "loglinear cosine cosine_squared linear geometric")
TimeSampling = StrEnum("TimeSampling", "lattice stratified iid")
LossWeight = StrEnum("LossWeight", "elbo flat")
LrSchedule = StrEnum("LrSchedule", "constant cosine")
Precision = StrEnum("Precision", "bf16 float32 float64")
Recompute = StrEnum("Recompute", "none selective full")
EngineName = StrEnum("EngineName", "auto plain deepspeed fsdp")
Device = StrEnum("Device", "auto cpu cuda")
WandbMode = StrEnum("WandbMode", "off offline online")


@dataclass(frozen=True)
class RunConfig:
    dir: str = "runs/unnamed"  # everything the run writes; given again, the run resumes there
    seed: int = 0  # of the data order, the noise, the dropout and the initial weights
    init_from: str | None = None  # a checkpoint whose averaged (EMA) weights a new run begins with, at step 0


@dataclass(frozen=True)
class TokenizerConfig:
    name: str = "bytes"  # `bytes`, `text8`, a Hugging Face name, or a folder that holds a Hugging Face tokenizer
    vocab_size: int | None = None  # what the recipe expects, the mask token included; another size is refused
    mask_id: int | None = None  # what the recipe expects; by default the tokenizer's own, else a new last id


@dataclass(frozen=True)
class DataConfig:
    # shards: a folder (tools/prepare_data.py makes it) or an address (s3://...); a small text file, one document a
    # line; or `python`, the documentation inside the standard library
    train: str | dict[str, float] = "python"  # one of these, or several with their weights: a mixture
    validation: str = "python"  # one of these; `python` keeps some of its documents for validation
    length: int = 128  # L, tokens a row
    prefetch: int = 2  # global batches prepared ahead of the step
    block_shards: int = 16  # shards whose rows are shuffled among each other
    cache_dir: str | None = None  # where fetched and unpacked shards lie; a folder of this machine's /tmp by default
    cache_mb: float = 50_000.0  # how large it may grow


@dataclass(frozen=True)
class ModelConfig:
    hidden_size: int = 768  # D, width of the residual stream
    num_layers: int = 12  # DiT blocks
    num_heads: int = 12  # H; the head width D / H must be even, for the rotary embedding
    cond_size: int = 128  # width of the conditioning vector of adaLN
    dropout: float = 0.1  # on the outputs of attention and MLP, before their gates
    time_conditioning: bool = False  # whether the network sees sigma(t); otherwise it sees 0
    # `paper`: LayerNorm, GELU, biases. `modern`, for a billion parameters and more: RMSNorm, SwiGLU, normed queries and
    # keys, grouped-query attention, smaller initial weights in deeper models, weight decay on matrices alone
    block: BlockName = BlockName.paper  # of which kind the blocks are; one switch for all of that
    num_kv_heads: int | None = None  # modern: heads of keys and values, each for a group of heads; default: num_heads


@dataclass(frozen=True)
class DiffusionConfig:
    schedule: ScheduleName = ScheduleName.loglinear  # how P(readable) falls from 1 to 0 as t goes from 0 to 1
    e: float = 1e-3  # P(readable) at t = 1 for loglinear, cosine and cosine_squared; 0 with loglinear is alpha = 1 - t
    sigma_min: float | None = None  # sigma(0) of linear (1e-3 by default) and geometric (1e-4)
    sigma_max: float | None = None  # sigma(1) of linear (7 by default) and geometric (20)
    num_times: int | None = None  # T of the discrete bound; by default continuous time
    t_min: float = 1e-3  # continuous time is drawn from [t_min, 1]
    time_sampling: TimeSampling = TimeSampling.lattice  # how the times of a global batch are spread
    weight: LossWeight = LossWeight.elbo  # of a masked token's cross entropy: the bound's, or 1


@dataclass(frozen=True)
class BatchConfig:
    global_batch_size: int = 512  # N, sequences a step over all ranks; part of the run's meaning
    micro_batch_size: int = 8  # sequences a rank computes at a time; free to change, also on resume


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = 3e-4  # the peak learning rate
    beta1: float = 0.9  # decay of Adam's mean of gradients
    beta2: float = 0.999  # decay of Adam's mean of squares
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.0  # decoupled, times the learning rate
    warmup_steps: int = 2500  # lr rises linearly from 0 at step 0
    schedule: LrSchedule = LrSchedule.constant  # after the warm-up
    cosine_steps: int | None = None  # for `cosine`: the step at which lr has fallen to a tenth
    max_grad_norm: float = 1.0  # gradients are scaled down to this global norm


@dataclass(frozen=True)
class EmaConfig:
    decay: float = 0.9999  # of the averaged weights; smaller in the first updates: min(decay, (1 + n) / (10 + n))


@dataclass(frozen=True)
class ParallelConfig:
    # who holds weights, gradients and optimizer: `plain` in one process, `deepspeed` or `fsdp` in any number of them
    engine: EngineName = EngineName.auto  # `auto` is plain in one process, deepspeed in several
    tp_size: int = 1  # ranks that share each weight matrix; they should be on one machine
    sequence_parallel: bool = False  # with tp_size > 1: norms, dropout and residuals on a slice of the positions
    zero_stage: int = 1  # deepspeed: 0 shards nothing, 1 the optimizer, 2 also the gradients, 3 also the weights
    deepspeed: dict[str, Any] = field(default_factory=dict)  # deepspeed: more of its JSON, e.g. offload, buckets
    replicate_size: int = 1  # fsdp: replicas of the model (HSDP); the other data-parallel ranks shard each of them
    reshard_after_forward: bool = True  # fsdp: free a block's gathered weights until its backward pass
    cpu_offload: bool = False  # fsdp: shards of weights, gradients and moments stay in the host's memory
    # blocks run again in the backward pass: `full` keeps only their input, `selective` (not with `compile`) also
    # products and attention
    recompute: Recompute = Recompute.none  # what is computed again instead of kept
    compile: bool = False  # compile each block with torch.compile
    timeout_minutes: float = 10.0  # how long a rank waits for the others before it ends with an error
    start_minutes: float = 30.0  # the same until the first step is done, which may compile or fetch a lot


@dataclass(frozen=True)
class TrainConfig:
    num_steps: int = 1_000_000  # steps of the whole run
    precision: Precision = Precision.bf16  # of weights and matrix products; master weights are at least float32
    device: Device = Device.auto  # `auto` is a GPU if there is one; a Slurm job that has GPUs must see them
    max_minutes: float | None = None  # save and stop with exit code 85 after this long


@dataclass(frozen=True)
class EvaluateConfig:
    every: int = 5000  # steps between evaluations on the validation rows; the last step always has one
    rows: int = 1024  # validation rows used, the first ones; 0 is all
    seed: int = 1  # of the frozen noise: the same for every step and every run


@dataclass(frozen=True)
class CheckpointConfig:
    every: int = 5000  # steps between checkpoints; the last step always has one
    keep: int = 2  # the newest ones that stay
    keep_every: int | None = None  # steps between those that stay for good; by default none does


@dataclass(frozen=True)
class GuardConfig:
    max_skips: int = 3  # bad steps in a row that are skipped: a loss or gradient norm that is not finite, or a spike
    max_rewinds: int = 1  # after one more, returns to the last checkpoint with those steps left out; then the run stops
    # a loss above the median of the last 128 by this many of their (scaled median) deviations is a spike; null: none is
    spike: float | None = None  # 20 is a cautious choice


@dataclass(frozen=True)
class LoggingConfig:
    every: int = 10  # steps between rows of metrics.jsonl
    wandb: WandbMode = WandbMode.off  # copy the metrics to Weights & Biases
    project: str = "mdlm_scale"  # Weights & Biases project


@dataclass(frozen=True)
class Config:
    run: RunConfig = field(default_factory=RunConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)


# What may differ between two attempts at one run. Everything else decides what the run computes. Data may move: that it
# is the same is seen by its fingerprint.
FREE_TO_CHANGE = (
    "run.dir", "data.train", "data.validation", "data.prefetch", "data.cache_dir", "data.cache_mb",
    "batch.micro_batch_size", "parallel", "train", "evaluate", "checkpoint", "guard", "logging",
)  # fmt: skip


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply `section.key=value` overrides, and return the typed configuration."""
    if not Path(path).is_file():
        raise ConfigError(f"There is no config file '{path}'. The recipes are in configs/, e.g. configs/debug.yaml.")
    raise_if_any(f"'{o}' is not an override of the form section.key=value." for o in overrides if "=" not in o)
    try:
        file = OmegaConf.load(path)
        if not OmegaConf.is_dict(file):
            raise ConfigError(f"{path} must hold sections of `key: value` pairs at its top, not a list.")
        given = OmegaConf.from_dotlist(list(overrides))
        if OmegaConf.select(given, "data.train") is not None and OmegaConf.select(file, "data.train") is not None:
            file.data.pop("train")  # a mixture is one setting: merged, the datasets of both would be used
        tree = OmegaConf.to_container(OmegaConf.merge(file, given), resolve=True)
    except (OmegaConfBaseException, TypeError, UnicodeDecodeError, YAMLError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return from_tree(tree)


def entries(path: Path, kind: Any) -> dict[str, Any]:
    """A YAML file of dataclasses of one kind, by name; every unknown key and wrong type is reported at once."""
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, UnicodeDecodeError, YAMLError, OSError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    faults: list[str] = []
    found = {name: _build(kind, keys, f"{name}.", faults) for name, keys in dict(tree).items()}  # type: ignore[arg-type]
    raise_if_any(f"{path}: {fault}" for fault in faults)
    return found


def from_tree(tree: Any) -> Config:
    """Build a `Config` from nested dicts; every unknown key and wrong type is reported at once."""
    faults: list[str] = []
    config = _build(Config, tree, "", faults)
    raise_if_any(faults)
    return config


def to_tree(config: Config) -> dict[str, Any]:
    """Nested dicts of plain values, as JSON and YAML take them."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def settings(config: Config) -> dict[str, Any]:
    """Every setting by its full name, `section.key`."""
    return {f"{section}.{key}": value for section, keys in to_tree(config).items() for key, value in keys.items()}


def outside(
    section: str,
    config: Any,
    names: Sequence[str],
    is_right: Callable[[Any], bool] = lambda n: n >= 1,
    must: str = "be at least 1",
) -> list[str]:
    """These settings of a section, where they are not what they must be."""
    values = {name: getattr(config, name) for name in names}
    return [f"{section}.{name}={value} must {must}." for name, value in values.items() if not is_right(value)]


def changes_of_meaning(old: Config, new: Config) -> list[str]:
    """Keys that make `new` another run than `old`, each with both values."""
    before, after = settings(old), settings(new)
    return [
        f"{key}: {before[key]} there, {after[key]} now"
        for key in after
        if before[key] != after[key] and key not in FREE_TO_CHANGE and key.split(".")[0] not in FREE_TO_CHANGE
    ]


def _build(cls: Any, tree: Any, prefix: str, faults: list[str]) -> Any:
    """Construct dataclass `cls` from a dict; faults are appended, and a default stands in for what is wrong."""
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        faults.append(f"{prefix.rstrip('.') or 'the file'} must hold `key: value` pairs, not {tree!r}.")
        return cls()
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in tree.items():
        if key not in hints:
            faults.append(f"{prefix}{key} is not a setting.{_did_you_mean(str(key), prefix, list(hints))}")
        elif isinstance(value, dict) and hints[key] == str | dict[str, float]:
            values[key] = _weights(value, f"{prefix}{key}", faults)
        elif dataclasses.is_dataclass(hints[key]):
            values[key] = _build(hints[key], value, f"{prefix}{key}.", faults)
        else:
            try:
                values[key] = _convert(value, hints[key])
            except ValueError as error:
                faults.append(f"{prefix}{key}={value!r} must be {error}.")
    return cls(**values)


def _weights(mixture: dict[Any, Any], key: str, faults: list[str]) -> dict[str, float]:
    found = {}
    for name, weight in mixture.items():
        try:
            found[str(name)] = _convert(weight, float)
        except ValueError as error:
            faults.append(f"{key}: the weight {weight!r} of '{name}' must be {error}.")
    return found


def _convert(value: Any, hint: Any) -> Any:
    """`value` as type `hint`, or a ValueError that names what is expected; 1e6 is an int, '1' and True are not."""
    if isinstance(hint, types.UnionType):
        kinds = typing.get_args(hint)
        if value is None and type(None) in kinds:
            return None
        if dict[str, float] in kinds and not isinstance(value, str):
            raise ValueError("text, or `name: weight` pairs")
        hint = kinds[0]
    if hint == dict[str, Any]:
        if isinstance(value, dict):
            return value
        raise ValueError("`key: value` pairs")
    if issubclass(hint, StrEnum):
        if value is False and "off" in hint.__members__:  # YAML reads a bare `off` as false
            value = "off"
        if not isinstance(value, str) or value not in hint.__members__:
            raise ValueError("one of " + ", ".join(hint.__members__))
        return hint(value)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int and number and float(value).is_integer():
        return int(value)
    if hint is float and number and math.isfinite(value):
        return float(value)
    if hint in (bool, str) and isinstance(value, hint):
        return value
    raise ValueError({int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint])


def _did_you_mean(key: str, prefix: str, here: list[str]) -> str:
    """The nearest setting of the same section; else the same key of another section; else the section's keys."""
    section = typing.get_type_hints(Config)
    near = difflib.get_close_matches(key, here, n=1)
    if near:
        return f" Did you mean {prefix}{near[0]}?"
    elsewhere = [f"{name}.{key}" for name, cls in section.items() if key in typing.get_type_hints(cls)]
    if elsewhere:
        return f" Did you mean {' or '.join(elsewhere)}?"
    return f" There are: {', '.join(here)}."
