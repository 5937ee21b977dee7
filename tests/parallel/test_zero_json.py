"""What DeepSpeed is told, and which of the user's additions to that are refused: named, all at once."""

import importlib
from typing import Any

import pytest
from conftest import DEBUG

from mdlm_scale import config
from mdlm_scale.config import BatchConfig, EngineName, ParallelConfig, Precision
from mdlm_scale.errors import ConfigError
from mdlm_scale.layout import Layout
from mdlm_scale.parallel import deepspeed, zero_json

BATCH, LAYOUT = BatchConfig(global_batch_size=24, micro_batch_size=3), Layout(world_size=4)


def parallel(theirs: dict[str, Any], zero_stage: int = 1) -> ParallelConfig:
    return ParallelConfig(EngineName.deepspeed, zero_stage=zero_stage, deepspeed=theirs)


def faults(theirs: dict[str, Any], zero_stage: int = 1, precision: Precision = Precision.float32) -> list[str]:
    return deepspeed.faults(parallel(theirs, zero_stage), BATCH, LAYOUT, precision)


def settings(
    theirs: dict[str, Any] | None = None,
    zero_stage: int = 1,
    precision: Precision = Precision.float32,
    num_parameters: int = 66_020,
) -> dict[str, Any]:
    config = parallel(theirs or {}, zero_stage)
    return zero_json.settings(config, BATCH, LAYOUT, precision, max_norm=0.5, num_parameters=num_parameters)


def test_batches_and_clipping_are_ours() -> None:
    told = settings()
    assert told["train_batch_size"] == 24
    assert told["train_micro_batch_size_per_gpu"] == 3
    assert told["gradient_accumulation_steps"] == 2
    assert told["gradient_clipping"] == 0.5
    assert told["zero_optimization"]["stage"] == 1


@pytest.mark.parametrize(("zero_stage", "operation"), [(0, "sum"), (1, "sum"), (2, "sum"), (3, None)])
def test_gradients_are_summed_where_deepspeed_can(zero_stage: int, operation: str | None) -> None:
    assert settings(zero_stage=zero_stage).get("gradient_allreduce_op") == operation


@pytest.mark.parametrize(("precision", "is_told"), [(Precision.bf16, True), (Precision.float32, False)])
def test_half_precision_is_told_with_float32_sums(precision: Precision, is_told: bool) -> None:
    told = settings(precision=precision)
    assert told.get("bf16", {}).get("enabled", False) is is_told
    assert told.get("data_types", {}).get("grad_accum_dtype") == ("fp32" if is_told else None)


@pytest.mark.parametrize("num_parameters", [1, 66_020, 124_000_000, 20_000_000_000])
def test_buffers_fit_the_model(num_parameters: int) -> None:
    """DeepSpeed's own sizes are fixed, and larger than many a model; they are the most here."""
    zero = settings(zero_stage=3, num_parameters=num_parameters)["zero_optimization"]
    assert 1 <= zero["reduce_bucket_size"] <= min(num_parameters, 500_000_000)
    assert 1 <= zero["sub_group_size"] <= max(1, num_parameters // LAYOUT.dp_size)
    assert faults({"zero_optimization": zero}, zero_stage=3) == []


def test_additions_arrive_beside_ours() -> None:
    zero = {"offload_optimizer": {"device": "cpu", "pin_memory": True}, "reduce_bucket_size": 5000}
    theirs = {"zero_optimization": zero, "wall_clock_breakdown": True, "steps_per_print": 7}
    assert faults(theirs) == []
    ours = settings()
    assert settings(theirs) == ours | theirs | {"zero_optimization": ours["zero_optimization"] | zero}


def test_additions_come_from_the_command_line() -> None:
    place = "parallel.deepspeed.zero_optimization"
    loaded = config.load(DEBUG, [f"{place}.reduce_bucket_size=5000", f"{place}.offload_optimizer.device=cpu"])
    zero = settings(loaded.parallel.deepspeed)["zero_optimization"]
    assert zero["reduce_bucket_size"] == 5000
    assert zero["offload_optimizer"] == {"device": "cpu"}


def test_additions_do_not_change_the_config() -> None:
    theirs = {"zero_optimization": {"reduce_bucket_size": 5000}}
    settings(theirs)
    assert theirs == {"zero_optimization": {"reduce_bucket_size": 5000}}


def test_equal_values_are_no_contradiction() -> None:
    ours = settings(precision=Precision.bf16)
    del ours["gradient_clipping"]  # has one place, optimizer.max_grad_norm
    assert faults(ours, precision=Precision.bf16) == []


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": (
        {"train_batch_size": 8},
        "train_batch_size=8 contradicts 24. That is decided by batch.global_batch_size.",
    ),
    "micro-batch": (
        {"train_micro_batch_size_per_gpu": 4},
        "train_micro_batch_size_per_gpu=4 contradicts 3. That is decided by batch.micro_batch_size.",
    ),
    "accumulation": ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps=1 contradicts 2."),
    "stage": (
        {"zero_optimization": {"stage": 2}},
        "zero_optimization.stage=2 contradicts 1. That is decided by parallel.zero_stage.",
    ),
    "bf16": ({"bf16": {"enabled": False}}, "bf16.enabled=False contradicts True. That is decided by train.precision."),
    "sums of half precision": ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype='bf16'"),
    "mean": ({"gradient_allreduce_op": "mean"}, "gradient_allreduce_op='mean' contradicts 'sum'."),
    "no section": ({"zero_optimization": 1}, "zero_optimization=1 contradicts {"),
}  # fmt: skip


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_contradiction_is_named(contradiction: str) -> None:
    theirs, expected = CONTRADICTIONS[contradiction]
    (fault,) = faults(theirs, precision=Precision.bf16)
    assert fault.startswith(f"parallel.deepspeed.{expected}")


@pytest.mark.parametrize(
    ("section", "instead"),
    [
        ("optimizer", "the section optimizer"),
        ("scheduler", "optimizer.schedule"),
        ("fp16", "train.precision"),
        ("bf16", "train.precision"),  # with train.precision=float32
        ("gradient_clipping", "optimizer.max_grad_norm"),
        ("activation_checkpointing", "parallel.recompute"),
    ],
)
def test_section_decided_elsewhere_names_our_setting(section: str, instead: str) -> None:
    assert faults({section: {}}) == [
        f"parallel.deepspeed.{section} is not passed on to DeepSpeed. That is decided by {instead}."
    ]


def test_unknown_section_names_those_passed_on() -> None:
    assert faults({"zero_optimisation": {}}) == [
        "parallel.deepspeed.zero_optimisation is not passed on to DeepSpeed. These sections are: "
        "zero_optimization, aio, comms_logger, flops_profiler, wall_clock_breakdown, memory_breakdown, dump_state, "
        "steps_per_print, tensorboard, csv_monitor."
    ]


OF_STAGE_3 = {"stage3_max_live_parameters": 1000, "offload_param": {"device": "cpu"}, "sub_group_size": 1000}


@pytest.mark.parametrize("name", OF_STAGE_3)
def test_option_of_stage_3_is_refused_below(name: str) -> None:
    assert faults({"zero_optimization": {name: OF_STAGE_3[name]}}, zero_stage=2) == [
        f"parallel.deepspeed.zero_optimization.{name} has a meaning only at parallel.zero_stage=3, not 2."
    ]


def test_options_of_stage_3_are_passed_on_there() -> None:
    assert faults({"zero_optimization": OF_STAGE_3}, zero_stage=3) == []


@pytest.mark.parametrize("name", ["offload_optimizer", "offload_param"])
def test_nvme_is_refused(name: str) -> None:
    (fault,) = faults({"zero_optimization": {name: {"device": "nvme"}}}, zero_stage=3)
    assert fault == f"parallel.deepspeed.zero_optimization.{name}.device=nvme is not supported: use cpu."


def test_partial_offload_is_refused() -> None:
    (fault,) = faults({"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, zero_stage=3)
    assert fault.startswith("parallel.deepspeed.zero_optimization.offload_optimizer.ratio=0.5 is not supported")


@pytest.mark.parametrize("name", ["zero_quantized_weights", "zero_quantized_gradients", "zero_hpz_partition_size"])
def test_other_mathematics_is_refused(name: str) -> None:
    (fault,) = faults({"zero_optimization": {name: 1}}, zero_stage=3)
    assert fault.startswith(f"parallel.deepspeed.zero_optimization.{name} changes what is computed")


@pytest.mark.parametrize(
    ("zero", "place", "reason"),
    [
        ({"reduce_buket_size": 5000}, "reduce_buket_size", "not permitted"),
        ({"reduce_bucket_size": "many"}, "reduce_bucket_size", "valid integer"),
        ({"reduce_bucket_size": -1}, "reduce_bucket_size", "greater than"),
        ({"offload_optimizer": {"devise": "cpu"}}, "offload_optimizer.devise", "not permitted"),
    ],
)
def test_what_deepspeed_would_refuse_is_named(zero: dict[str, Any], place: str, reason: str) -> None:
    (fault,) = faults({"zero_optimization": zero})
    assert fault.startswith(f"parallel.deepspeed.zero_optimization.{place}: ")
    assert reason in fault


@pytest.mark.parametrize("zero_stage", [-1, 7])
def test_unknown_stage_is_named(zero_stage: int) -> None:
    assert faults({}, zero_stage) == [f"parallel.zero_stage={zero_stage} must be 0, 1, 2 or 3."]


@pytest.mark.parametrize("zero_stage", range(4))
def test_float64_is_refused(zero_stage: int) -> None:
    (fault,) = faults({}, zero_stage, Precision.float64)
    assert fault.startswith("train.precision=float64 is not for parallel.engine=deepspeed")


@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("precision", [Precision.float32, Precision.bf16])
def test_nothing_added_has_no_fault(zero_stage: int, precision: Precision) -> None:
    assert faults({}, zero_stage, precision) == []


def test_all_faults_at_once() -> None:
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 1, "zero_quantized_weights": True, "reduce_buket_size": 1}
    found = faults({"train_batch_size": 1, "fp16": {}, "zero_optimization": zero}, precision=Precision.float64)
    named = ("float64", "train_batch_size", "fp16", "zero_optimization.stage=3", *list(zero)[1:])
    assert len(found) == len(named)
    for name in named:
        assert any(name in fault for fault in found), name


class BF16_Optimizer:
    """DeepSpeed's optimizer of another version: two of the names that are used have gone."""

    get_grads_for_norm = clear_hp_grads = clear_lp_grads = None


def test_missing_private_names_are_one_error_with_the_versions() -> None:
    with pytest.raises(ConfigError) as caught:
        deepspeed._check_names(BF16_Optimizer())
    assert caught.value.faults == (
        f"DeepSpeed {deepspeed.deepspeed.__version__} has no BF16_Optimizer.update_lp_params, "
        f"BF16_Optimizer._lazy_init_hp_params_optimizer_state, which mdlm_scale needs. Version "
        f"{deepspeed.KNOWN_VERSION} is known to work: pip install deepspeed=={deepspeed.KNOWN_VERSION}",
    )


def test_object_of_an_unknown_class_is_refused() -> None:
    """An optimizer that DeepSpeed chose for reasons not known here must not be used by accident."""
    with pytest.raises(ConfigError, match="has no known class in the place of object, which mdlm_scale needs"):
        deepspeed._check_names(object())


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine", "DeepSpeedEngine"),
        ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
        ("bf16_optimizer", "BF16_Optimizer"),
        ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ],
)
def test_names_belong_to_classes_of_the_installed_deepspeed(module: str, name: str) -> None:
    """A misspelt class would never be looked up, and its names never checked."""
    assert hasattr(importlib.import_module(f"deepspeed.runtime.{module}"), name)
    assert name in deepspeed.NAMES
