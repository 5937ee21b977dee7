"""The head with its Triton kernel in the interpreter; `test_row_kernel.py` starts a process of its own for these tests.

Every test of `test_head.py` that is imported runs here with the kernel in the place of torch's softmax. Then the kernel
is held to torch's in narrower dtypes, and mistakes are made in it on purpose, each of which must be seen.
M masked rows, R rows of a chunk, V vocabulary.
"""

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_head import (  # noqa: F401
    EXACT,
    NUM_ROWS,
    VOCAB,
    WIDTH,
    expected,
    make_inputs,
    ours,
    test_a_shard_far_below_the_others_still_trains_its_targets,
    test_an_exchange_has_the_work_of_another_chunk_to_hide_behind,
    test_bf16_is_right_up_to_its_rounding,
    test_bf16_rows_give_float32_nats,
    test_fixed_shapes_have_one_chunk_size,
    test_incoming_gradient_scales_the_gradients,
    test_large_logits_do_not_overflow,
    test_loss_and_gradients_match_torch,
    test_no_grad_gives_the_same_nats,
    test_no_rows,
    test_rows_of_weight_zero_that_complete_a_chunk_change_nothing,
    test_rows_without_weight_give_no_gradient,
    test_shards_of_the_vocabulary_equal_the_whole,
    test_the_mask_column_has_no_gradient,
)
from torch import Tensor

from mdlm_scale import kernels, row_kernel
from mdlm_scale.model.head import WHOLE, VocabShard
from mdlm_scale.run import self_test

ONE_AT_A_TIME = threading.Lock()  # the interpreter runs one program, and shards are threads here


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The head takes the kernel, in tiles that do not divide a row; the chunks that it was called with."""
    seen: list[Tensor] = []

    def softmax_rows(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with ONE_AT_A_TIME:
            seen.append(logits_RV)
            logits_RV[:, bias_V == -torch.inf] = torch.nan  # of no answer, and padding holds anything
            return row_kernel.softmax_rows(logits_RV, bias_V, column_R)

    monkeypatch.setattr(row_kernel, "TILE", 8)
    monkeypatch.setattr(kernels, "ROW_MULTIPLE", 6)  # 11 columns become 12, and 5 become 6
    monkeypatch.setattr(kernels, "row_kernel", lambda _device: "triton")
    monkeypatch.setattr(kernels, "softmax_rows", softmax_rows)
    return seen


def part_of_the_vocabulary(start: int, num_valid: int) -> VocabShard:
    """A shard whose one peer has the largest logit 0.5, a sum of 2.5, and half a nat of each target's logit."""

    def combine(max_R: Tensor, sum_R: Tensor, target_R: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        most_R = max_R.clamp_min(0.5)
        all_R = sum_R * (max_R - most_R).exp() + 2.5 * (0.5 - most_R).exp()
        return lambda: (most_R, all_R, target_R + 0.5)

    return VocabShard(start, num_valid, combine)


SHARDS = {
    "whole": WHOLE,
    "the mask in it, two columns of padding": part_of_the_vocabulary(3, VOCAB - 2),
    "the mask elsewhere": part_of_the_vocabulary(VOCAB, VOCAB - 1),
    "only the mask": part_of_the_vocabulary(5, 1),
    "only padding": part_of_the_vocabulary(VOCAB, 0),
}


def gap(shard: VocabShard, dtype: torch.dtype = torch.float64) -> float:
    """The largest difference between the kernel and torch's softmax, relative to each result's largest element."""
    inputs = make_inputs(mask_id=5, dtype=dtype)
    kernel, by_torch = (ours(inputs, mask_id=5, shard=shard, row_kernel=name) for name in ("triton", "torch"))
    pairs = [(kernel[name].double(), by_torch[name].double()) for name in kernel]
    gaps = [(one - other).abs().max() / other.abs().max().clamp_min(1e-30) for one, other in pairs]
    return float(torch.stack(gaps).max())  # a NaN is the largest


def test_the_kernel_is_what_runs_here(calls: list[Tensor]) -> None:
    ours(make_inputs(mask_id=5), mask_id=5, chunk_rows=4)
    assert [tuple(logits_RV.shape) for logits_RV in calls] == [(4, 12), (4, 12), (2, 12)]


def test_half_precision_stays_in_its_place(calls: list[Tensor]) -> None:
    ours(make_inputs(mask_id=5, dtype=torch.bfloat16), mask_id=5)
    (exp_RV,) = calls
    assert exp_RV.dtype == torch.bfloat16
    assert torch.equal(exp_RV[:, [5, VOCAB]], torch.zeros(NUM_ROWS, 2, dtype=torch.bfloat16))


# a few roundings of float64, of float32, and of bf16 in the products' factors
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-7)], ids=str
)
@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS)
def test_the_kernel_does_what_torch_does(shard: VocabShard, dtype: torch.dtype, limit: float) -> None:
    assert gap(shard, dtype) <= limit


def test_a_bf16_target_is_rounded_once() -> None:
    """Where it is all but certain, softmax - 1 is far below the rounding of either."""
    inputs = make_inputs(mask_id=5, dtype=torch.bfloat16) | {"target": torch.full((NUM_ROWS,), 2)}
    inputs |= {"hidden": torch.zeros(NUM_ROWS, WIDTH).bfloat16(), "row_weight": torch.ones(NUM_ROWS)}
    inputs |= {"bias": torch.zeros(VOCAB).index_fill(0, torch.tensor([2]), 12.0).bfloat16()}
    actual, exact = ours(inputs, mask_id=5)["bias"].double(), expected(inputs, 5)["bias"]
    torch.testing.assert_close(actual, exact, rtol=2**-7, atol=0)  # a rounding, 2^-9, of both factors and the product


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and padding of the real size."""
    monkeypatch.undo()
    monkeypatch.setattr(kernels, "row_kernel", lambda _device: "triton")


@pytest.mark.usefixtures("as_on_a_gpu")
def test_rows_of_two_tiles_and_a_part_of_one() -> None:
    num_columns, generator = 2 * row_kernel.TILE + 1003, torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(3, WIDTH), (num_columns, WIDTH), (num_columns,)]
    )
    target = torch.tensor([0, num_columns - 1, row_kernel.TILE])
    inputs = {"hidden": hidden, "weight": weight, "bias": bias, "target": target, "row_weight": torch.ones(3).double()}
    torch.testing.assert_close(ours(inputs, mask_id=7), expected(inputs, 7), **EXACT)


def test_a_row_that_is_no_number_stays_one() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"][3, 0] = torch.nan
    assert ours(inputs, mask_id=5)["nll"].isnan().tolist() == [row == 3 for row in range(NUM_ROWS)]


MISTAKES = {
    "sums keep their old maximum": ("total * tl.exp(largest - larger)", "total"),
    "the mask's column is an answer": ("bias == -float(\"inf\"), bias, logit + bias", "False, bias, logit"),
    "what padding holds is looked at": ("tl.where(bias == -float(\"inf\"), bias, logit + bias)", "logit + bias"),
    "the last tile goes beyond the row": ("at < width, -float(\"inf\")", "at < width, 0.0"),
    "the target is taken off twice": ("tl.where(at == column, 0.0, exp)", "exp"),
    "a target in the first column is not here": ("column >= 0", "column > 0"),
    "the target has no bias": (" + tl.load(bias_V + column, is_here, 0.0).to(wide)", ""),
    "without an answer the maximum is infinite": ("tl.full((), lowest, wide)", "tl.full((), -float(\"inf\"), wide)"),
}  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_seen(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Path(row_kernel.__file__).read_text()
    assert source.count(right) == 1
    path = tmp_path / "mistaken.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("mistaken", path)
    assert spec is not None
    assert spec.loader is not None
    mistaken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mistaken)
    monkeypatch.setattr(mistaken, "TILE", 8)
    monkeypatch.setattr(row_kernel, "softmax_rows", mistaken.softmax_rows)
    assert not all(gap(shard) <= 1e-3 for shard in SHARDS.values())


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_run_would_find_it_right() -> None:
    (line,) = self_test.check(torch.device("cpu"), torch.bfloat16, sharded=False)
    assert line.startswith("the head's softmax by triton")
