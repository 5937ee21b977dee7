"""What a traced micro-batch says is what the model's own formulas and its whole depth say."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mdlm_scale.config import BlockName, ModelConfig, Recompute
from mdlm_scale.model.sizes import sizes
from mdlm_scale.parallel import trace
from mdlm_scale.parallel.trace import Passes

DEPTH = 5
MODEL = ModelConfig(hidden_size=96, num_layers=DEPTH, num_heads=4, cond_size=8, dropout=0.1)
MODERN = replace(MODEL, block=BlockName.modern, num_kv_heads=2)
PASSES = Passes(MODEL, 1003, 64, 3, Recompute.none, torch.bfloat16)
INPUTS = 3 * 64 * 96  # elements of a block's input


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=["paper", "modern"])
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(
    "more",
    [{}, {"on_cpu": True}, {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}],
    ids=["alone", "on a CPU", "tp 2", "tp 2, sliced"],
)
def test_two_short_models_tell_of_any_depth(model: ModelConfig, recompute: Recompute, more: dict[str, Any]) -> None:
    passes = replace(PASSES, model=model, recompute=recompute, **more)
    told, whole = trace.of_model(passes), trace.of_depth(passes, DEPTH)
    assert {key: n for key, n in told.operations.items() if n} == whole.operations
    assert told.kept == whole.kept
    assert told.peak == whole.peak
    assert not dist.is_initialized()


@pytest.mark.parametrize("model", [MODEL, MODERN], ids=["paper", "modern"])
def test_operations_are_those_of_the_formula(model: ModelConfig) -> None:
    """Three times the forward pass, and attention's backward pass makes its scores anew; the products of adaLN, one a
    pass, and of the gradients of biases are left out of the formula."""
    B, L, D = 4, PASSES.length, model.hidden_size  # as many masked rows as the head takes at a time
    found = trace.of_model(replace(PASSES, model=model, micro_batch_size=B, dtype=torch.float32)).operations
    flops = {kind: sum(n * op.flops for op, n in found.items() if op.kind == kind) for kind in ("product", "attention")}
    attention = 4 * L * D * DEPTH * B * L
    assert flops["attention"] == pytest.approx(3.5 * attention)
    formula = sizes(model, PASSES.vocab_size, L).step_flops(B * L, B * L // 2) - 3 * attention
    assert formula <= flops["product"] <= 1.005 * formula


def test_recomputing_keeps_less_and_computes_more() -> None:
    none, selective, full = (trace.of_model(replace(PASSES, recompute=each)) for each in Recompute)
    assert none.kept > selective.kept > full.kept
    assert per_block(recompute=Recompute.full) == 4 * INPUTS

    def products(found: trace.Trace) -> int:
        return sum(n * op.flops for op, n in found.operations.items() if op.kind == "product")

    assert products(none) == products(selective) < products(full)


def test_ranks_share_what_is_kept() -> None:
    """But for modulations, which each has for itself; they do not grow with the batch."""
    assert per_block(tp_size=4, sequence_parallel=True) == pytest.approx(per_block() / 4, rel=0.05)


def per_block(**changes: Any) -> int:
    """Bytes that a block keeps."""
    passes = replace(PASSES, **changes)
    return trace.of_depth(passes, 3).kept - trace.of_depth(passes, 2).kept


def test_a_gpus_attention_never_holds_its_scores() -> None:
    short, long = (trace.of_model(replace(PASSES, length=length, micro_batch_size=1)) for length in (1024, 4096))
    assert long.peak == pytest.approx(4 * short.peak, rel=0.1)
    assert long.peak < 4 * MODEL.num_heads * 4096**2  # scores of one block in float32


def test_size_costs_nothing() -> None:
    """8 billion parameters: were they made, this process would end."""
    model = ModelConfig(4096, 42, 32, block=BlockName.modern, num_kv_heads=8)
    found = trace.of_model(Passes(model, 50258, 4096, 1, Recompute.full, torch.bfloat16))
    inputs = 42 * 4 * 4096 * 4096
    assert math.isclose(found.kept, inputs, rel_tol=0.1)
