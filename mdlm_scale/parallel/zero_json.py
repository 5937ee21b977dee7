"""What DeepSpeed is told: our JSON, what the user adds to it, and what the user may not add.

What is computed (batches, precision, clipping, sums) is decided by our own sections; the rest is passed on.
"""

from typing import Any

from mdlm_scale.config import BatchConfig, ParallelConfig, Precision
from mdlm_scale.layout import Layout

KNOWN_VERSION = "0.19.8"  # of DeepSpeed: its private names are there

# sections of DeepSpeed's JSON that are passed on, and what of `zero_optimization` is not
PASSED_ON = (
    "zero_optimization", "aio", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown",
    "dump_state", "steps_per_print", "tensorboard", "csv_monitor",
)  # fmt: skip
ONLY_STAGE_3 = ("stage3_", "offload_param", "sub_group_size", "param_persistence_threshold", "max_live_parameters")
OTHER_MATHEMATICS = ("zero_quantized", "zero_hpz", "mics_", "zenflow", "super_offload")

# what decides instead of a section of DeepSpeed's
INSTEAD = {
    "optimizer": "the section optimizer", "scheduler": "optimizer.schedule", "fp16": "train.precision",
    "bf16": "train.precision", "amp": "train.precision", "torch_autocast": "train.precision",
    "data_types": "train.precision", "communication_data_type": "train.precision",
    "train_batch_size": "batch.global_batch_size", "train_micro_batch_size_per_gpu": "batch.micro_batch_size",
    "gradient_accumulation_steps": "batch.global_batch_size", "gradient_clipping": "optimizer.max_grad_norm",
    "zero_optimization.stage": "parallel.zero_stage", "wandb": "logging.wandb",
    "activation_checkpointing": "parallel.recompute", "compile": "parallel.compile",
}  # fmt: skip


def settings(
    config: ParallelConfig,
    batch: BatchConfig,
    layout: Layout,
    precision: Precision,
    max_norm: float,
    num_parameters: int,
) -> dict[str, Any]:
    """DeepSpeed's JSON: ours, with what the user adds to it."""
    told = ours(config, batch, layout, precision, max_norm)
    return _merged(_merged(_defaults(config, layout, num_parameters), told), config.deepspeed)


def ours(
    config: ParallelConfig, batch: BatchConfig, layout: Layout, precision: Precision, max_norm: float
) -> dict[str, Any]:
    """What we tell it."""
    told: dict[str, Any] = {
        "train_batch_size": batch.global_batch_size,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_accumulation_steps": batch.global_batch_size // (batch.micro_batch_size * layout.dp_size),
        "gradient_clipping": max_norm,
        "zero_optimization": {"stage": config.zero_stage, "memory_efficient_linear": False},
        "zero_force_ds_cpu_optimizer": False,  # offloaded, torch's fused AdamW works on the CPU as well
        "communication_data_type": "fp32",
    }
    if config.zero_stage < 3:
        told["gradient_allreduce_op"] = "sum"  # stage 3 knows only means
    if precision is Precision.bf16 and config.zero_stage > 0:
        told["bf16"] = {"enabled": True, "check_grad_overflow": True}
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    return told


def faults(config: ParallelConfig, batch: BatchConfig, layout: Layout | None, precision: Precision) -> list[str]:
    """What of the user's settings cannot be passed on; without a layout, only what does not depend on it."""
    if config.zero_stage not in range(4):
        return [f"parallel.zero_stage={config.zero_stage} must be 0, 1, 2 or 3."]
    found = []
    if precision is Precision.float64:
        found.append("train.precision=float64 is not for parallel.engine=deepspeed, whose master weights are float32.")
    if layout is None:
        return found
    passed_on = ", ".join(PASSED_ON)
    key, told = "parallel.deepspeed", ours(config, batch, layout, precision, max_norm=1.0)
    del told["gradient_clipping"]  # whatever the user's is: what it must be is not known here
    found += [
        f"{key}.{name} is not passed on to DeepSpeed. {_instead(name, f'These sections are: {passed_on}.')}"
        for name in config.deepspeed
        if name not in (*PASSED_ON, *told)
    ]
    found += [
        f"{key}.{path}={theirs!r} contradicts {mine!r}. {_instead(path, 'Leave it out.')}"
        for path, mine, theirs in _contradictions(told, config.deepspeed)
    ]
    zero = config.deepspeed.get("zero_optimization", {})
    if not isinstance(zero, dict):
        return found
    for name, value in zero.items():
        place = f"{key}.zero_optimization.{name}"
        if name.startswith(OTHER_MATHEMATICS):
            found.append(f"{place} changes what is computed, or where it lies, in ways not known here; leave it out.")
        elif name.startswith(ONLY_STAGE_3) and config.zero_stage < 3:
            found.append(f"{place} has a meaning only at parallel.zero_stage=3, not {config.zero_stage}.")
        elif isinstance(value, dict) and value.get("device") == "nvme":
            found.append(f"{place}.device=nvme is not supported: use cpu.")
        elif isinstance(value, dict) and value.get("ratio", 1.0) != 1.0:
            found.append(f"{place}.ratio={value['ratio']} is not supported: all or nothing is offloaded.")
    return found


def _defaults(config: ParallelConfig, layout: Layout, num_parameters: int) -> dict[str, Any]:
    """Where DeepSpeed's own defaults do not fit: buffers of a fixed size, larger than many a model."""
    piece = max(1, num_parameters // 20)  # a twentieth of the model is moved at a time
    zero: dict[str, Any] = {"reduce_bucket_size": min(piece, 500_000_000)}
    if config.zero_stage == 3:
        zero["sub_group_size"] = max(1, piece // layout.dp_size)  # of this rank's part
        zero["contiguous_gradients"] = False  # else a bucket is kept for good, whatever the number of ranks
    return {"steps_per_print": 2**31, "zero_optimization": zero}  # metrics.jsonl has what it would print


def _merged(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(value, theirs[key]) for key, value in mine.items() if isinstance(theirs.get(key), dict)}
    return mine | theirs | both


def _contradictions(mine: dict[str, Any], theirs: dict[str, Any], path: str = "") -> list[tuple[str, Any, Any]]:
    """Leaves that both set, to different values."""
    found: list[tuple[str, Any, Any]] = []
    for key in sorted(mine.keys() & theirs.keys()):
        if isinstance(mine[key], dict) and isinstance(theirs[key], dict):
            found += _contradictions(mine[key], theirs[key], f"{path}{key}.")
        elif mine[key] != theirs[key]:
            found.append((f"{path}{key}", mine[key], theirs[key]))
    return found


def _instead(path: str, otherwise: str) -> str:
    """Which of our settings decides what this one of DeepSpeed's would."""
    decides = INSTEAD.get(path) or INSTEAD.get(path.partition(".")[0])
    return f"That is decided by {decides}." if decides else otherwise
