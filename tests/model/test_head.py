"""The masked-row cross entropy against torch's over the vocabulary without the mask token, whole and in shards.

M masked rows, D width, V vocabulary.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mdlm_scale.model.head import Head, VocabShard, masked_cross_entropy

NUM_ROWS, WIDTH, VOCAB = 10, 6, 11
NAMES = ("hidden", "weight", "bias")
EXACT = {"rtol": 0.0, "atol": 1e-12}  # float64 sums of about ten terms of order one to ten


def make_inputs(mask_id: int, num_rows: int = NUM_ROWS, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in [(num_rows, WIDTH), (VOCAB, WIDTH), (VOCAB,)]
    )
    target = torch.randint(VOCAB - 1, (num_rows,), generator=generator)
    row_weight = 5 * torch.rand(num_rows, generator=generator, dtype=torch.float64)
    row_weight[::4] = 0.0
    return {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target + (target >= mask_id),
        "row_weight": row_weight,
    }


def ours(inputs: dict[str, Tensor], scale: float = 1.0, **options: Any) -> dict[str, Tensor]:
    """Loss, nats of each row, and the gradients of scale * loss."""
    leaves = {name: inputs[name].clone().requires_grad_() for name in NAMES}
    loss, nll_M = masked_cross_entropy(*leaves.values(), inputs["target"], inputs["row_weight"], **options)
    gradients = torch.autograd.grad(scale * loss, list(leaves.values()))
    return {"loss": loss.detach(), "nll": nll_M} | dict(zip(NAMES, gradients, strict=True))


def expected(inputs: dict[str, Tensor], mask_id: int, scale: float = 1.0) -> dict[str, Tensor]:
    """The same from torch, in float64, with the mask's column removed."""
    leaves = {name: inputs[name].double().requires_grad_() for name in NAMES}
    answers = [v for v in range(len(inputs["bias"])) if v != mask_id]
    logits = F.linear(leaves["hidden"], leaves["weight"], leaves["bias"])[:, answers]
    target = inputs["target"] - (inputs["target"] > mask_id).long()
    nll_M = F.cross_entropy(logits, target, reduction="none")
    loss = (nll_M * inputs["row_weight"]).sum()
    gradients = torch.autograd.grad(scale * loss, list(leaves.values()))
    return {"loss": loss.detach(), "nll": nll_M.detach()} | dict(zip(NAMES, gradients, strict=True))


@pytest.mark.parametrize("chunk_rows", [1, 5, 4, NUM_ROWS, 100, None])  # some divide the rows, some do not
@pytest.mark.parametrize("mask_id", [0, 5, VOCAB - 1])
def test_loss_and_gradients_match_torch(mask_id: int, chunk_rows: int | None) -> None:
    inputs = make_inputs(mask_id)
    actual = ours(inputs, mask_id=mask_id, chunk_rows=chunk_rows)
    torch.testing.assert_close(actual, expected(inputs, mask_id), **EXACT)


def test_incoming_gradient_scales_the_gradients() -> None:
    inputs = make_inputs(mask_id=5)
    torch.testing.assert_close(ours(inputs, 0.25, mask_id=5), expected(inputs, 5, 0.25), **EXACT)


def test_rows_without_weight_give_no_gradient() -> None:
    inputs = make_inputs(mask_id=5)
    gradient = ours(inputs, mask_id=5)["hidden"]
    assert torch.equal(gradient[::4], torch.zeros_like(gradient[::4]))


@pytest.mark.parametrize("mask_id", [0, 5, VOCAB - 1])
def test_the_mask_column_has_no_gradient(mask_id: int) -> None:
    result = ours(make_inputs(mask_id), mask_id=mask_id)
    assert result["weight"][mask_id].abs().max() == 0
    assert result["bias"][mask_id] == 0


def test_no_rows() -> None:
    result = ours(make_inputs(mask_id=5, num_rows=0), mask_id=5)
    assert result["nll"].shape == (0,)
    assert all(torch.equal(value, torch.zeros_like(value)) for value in result.values())


def test_no_grad_gives_the_same_nats() -> None:
    inputs = make_inputs(mask_id=5)
    with torch.no_grad():
        loss, nll_M = masked_cross_entropy(*inputs.values(), mask_id=5, chunk_rows=4)
    with_gradient = ours(inputs, mask_id=5, chunk_rows=4)
    assert torch.equal(nll_M, with_gradient["nll"])
    assert torch.equal(loss, with_gradient["loss"])


def test_nats_carry_no_gradient() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"].requires_grad_()
    assert not masked_cross_entropy(*inputs.values(), mask_id=5)[1].requires_grad


def test_the_gradient_of_a_gradient_is_refused() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"].requires_grad_()
    loss, _ = masked_cross_entropy(*inputs.values(), mask_id=5)
    (gradient,) = torch.autograd.grad(loss**2, inputs["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_second_backward_pass_is_refused_rather_than_scaled_twice() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"].requires_grad_()
    loss, _ = masked_cross_entropy(*inputs.values(), mask_id=5)
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(AssertionError, match="differentiated already"):
        (2 * loss).backward()


def test_large_logits_do_not_overflow() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"] *= 1e3
    # logits of order 1e4, where float64 has 1e-12 left
    torch.testing.assert_close(ours(inputs, mask_id=5), expected(inputs, 5), rtol=1e-12, atol=1e-9)


def test_bf16_rows_give_float32_nats() -> None:
    assert ours(make_inputs(mask_id=5, dtype=torch.bfloat16), mask_id=5)["nll"].dtype == torch.float32


@pytest.mark.parametrize("name", ["loss", "nll", *NAMES])
def test_bf16_is_right_up_to_its_rounding(name: str) -> None:
    inputs = make_inputs(mask_id=5, dtype=torch.bfloat16)
    actual, exact = ours(inputs, mask_id=5)[name].double(), expected(inputs, 5)[name]
    # logits below 8 are off by up to 2^-9 * 8 = 2^-6, probabilities and nats likewise
    assert (actual - exact).abs().max() <= 2**-6 * exact.abs().max()


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_bf16_chunks_are_added_up_in_float32(name: str) -> None:
    """A thousand equal rows, one a chunk: a bf16 sum would stop growing at 256 times its first term."""
    one = make_inputs(mask_id=5, num_rows=1, dtype=torch.bfloat16) | {"row_weight": torch.ones(1).double()}
    many = one | {key: one[key].repeat_interleave(1000, 0) for key in ("hidden", "target", "row_weight")}
    actual = ours(many, mask_id=5, chunk_rows=1)[name].double()
    single = ours(one, mask_id=5)[name].double()
    # 1000 times the chunk's own gradient: that is rounded to bf16 once, and so is the sum
    assert (actual - 1000 * single).abs().max() <= 2**-7 * (1000 * single).abs().max()


def test_head_casts_its_input_to_its_weights() -> None:
    head = Head(WIDTH, VOCAB, mask_id=5).double()
    inputs = make_inputs(mask_id=5)
    head.load_state_dict({"weight": inputs["weight"], "bias": inputs["bias"]})
    hidden_MD = inputs["hidden"].float()
    assert torch.equal(head.logits(hidden_MD), F.linear(hidden_MD.double(), inputs["weight"], inputs["bias"]))
    assert head(hidden_MD, inputs["target"], inputs["row_weight"])[1].dtype == torch.float64


class Exchange:
    """What process groups do, for shards that run in threads: everybody puts a value, then everybody has all."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def all(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()  # nobody puts the next value before all have read
        return values

    def shard(self, rank: int, start: int, num_valid: int | None) -> VocabShard:
        def combine(*own: Tensor) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
            def wait() -> tuple[Tensor, Tensor, Tensor]:
                max_SR, sum_SR, target_SR = (torch.stack(x) for x in zip(*self.all(rank, own), strict=True))
                max_R = max_SR.amax(0)
                return max_R, (sum_SR * (max_SR - max_R).exp()).sum(0), target_SR.sum(0)

            return wait

        return VocabShard(start, num_valid, combine, lambda d_hidden_MD: sum(self.all(rank, d_hidden_MD)))


@pytest.mark.parametrize(
    ("widths", "mask_id"),
    [
        ((5, 6), 5),
        ((4, 4, 3), 0),
        ((6, 6), VOCAB - 1),  # 12 columns: the last is padding
        ((5, 5, 5), VOCAB - 1),  # the last shard's one token is the mask: no answer there
        ((5, 1, 5), 5),  # the same in the middle
        ((4, 4, 4, 4), 5),  # the last shard is nothing but padding
        ((3, 3, 3, 3), 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [NUM_ROWS, 0])
def test_shards_of_the_vocabulary_equal_the_whole(widths: tuple[int, ...], mask_id: int, num_rows: int) -> None:
    inputs, exchange = make_inputs(mask_id, num_rows), Exchange(len(widths))
    padding = sum(widths) - VOCAB
    weight_VD, bias_V = (
        F.pad(inputs["weight"], (0, 0, 0, padding), value=9.0),
        F.pad(inputs["bias"], (0, padding), value=9.0),
    )
    starts = [sum(widths[:rank]) for rank in range(len(widths))]

    def run(rank: int) -> dict[str, Tensor]:
        start, stop = starts[rank], starts[rank] + widths[rank]
        num_valid = max(0, min(VOCAB, stop) - start)
        shard = exchange.shard(rank, start, num_valid if num_valid < widths[rank] else None)
        part = inputs | {"weight": weight_VD[start:stop], "bias": bias_V[start:stop]}
        return ours(part, 0.5, mask_id=mask_id, shard=shard, chunk_rows=4)

    with ThreadPoolExecutor(len(widths)) as pool:
        results = list(pool.map(run, range(len(widths))))
    exact = expected(inputs, mask_id, 0.5)
    exact |= {"weight": F.pad(exact["weight"], (0, 0, 0, padding)), "bias": F.pad(exact["bias"], (0, padding))}
    for result, start, width in zip(results, starts, widths, strict=True):
        part = exact | {name: exact[name][start : start + width] for name in ("weight", "bias")}
        torch.testing.assert_close(result, part, **EXACT)
