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

from mdlm_scale.model.head import Head, VocabShard, _equal_chunks, _tile_columns, masked_cross_entropy

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
    with pytest.raises(RuntimeError, match=r"no second derivative.*without create_graph"):
        torch.autograd.grad(loss**2, inputs["hidden"], create_graph=True)


def test_a_second_backward_pass_is_refused_rather_than_scaled_twice() -> None:
    inputs = make_inputs(mask_id=5)
    inputs["hidden"].requires_grad_()
    loss, _ = masked_cross_entropy(*inputs.values(), mask_id=5)
    (2 * loss).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated already"):
        (2 * loss).backward()


@pytest.mark.parametrize("num_rows", [NUM_ROWS, 0])
@pytest.mark.parametrize("mask_id", [0, 5])
def test_rows_of_weight_zero_that_complete_a_chunk_change_nothing(mask_id: int, num_rows: int) -> None:
    inputs = make_inputs(mask_id, num_rows)
    actual = ours(inputs, mask_id=mask_id, chunk_rows=4, fixed_shapes=True)
    torch.testing.assert_close(actual, expected(inputs, mask_id), **EXACT)


def test_fixed_shapes_have_one_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: shapes.append(tuple(out.shape)) or mm(a, b, out=out))
    ours(make_inputs(mask_id=5), mask_id=5, chunk_rows=4, fixed_shapes=True)
    assert shapes == [(4, VOCAB), (4, WIDTH)] * 3


def test_nothing_waits_for_the_device() -> None:
    """Tensors on the meta device have no values: whatever looked at one would raise."""
    inputs = {name: tensor.to("meta") for name, tensor in make_inputs(mask_id=5).items()}
    result = ours(inputs, mask_id=5, chunk_rows=4)
    assert result["nll"].shape == (NUM_ROWS,)
    assert result["weight"].shape == (VOCAB, WIDTH)


@pytest.mark.parametrize(
    ("num_rows", "most", "on_cpu", "rows"),
    [
        (4096, 592, True, 592),  # 7 chunks of 586, rounded up to an odd number of cache lines
        (2048, 592, True, 528),  # 4 chunks of 512: not a power of two
        (600, 592, True, 304),  # 2 of 300, rather than 592 and 8
        (10, 592, True, 16),
        (10, 4, True, 4),
        (0, 592, True, 16),
        (9000, 4096, False, 3072),
        (4096, 4096, False, 4096),
    ],
)
def test_chunks_are_equal_and_of_a_good_size(num_rows: int, most: int, on_cpu: bool, rows: int) -> None:
    assert _equal_chunks(num_rows, most, on_cpu) == rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": torch.full((NUM_ROWS,), 5)}, "mask token, id 5"),
        ({"target": torch.full((NUM_ROWS,), VOCAB)}, f"token id {VOCAB}, outside the vocabulary, 0 .. {VOCAB - 1}"),
        ({"target": torch.full((NUM_ROWS,), -100)}, "token id -100"),
        ({"row_weight": torch.full((NUM_ROWS,), -1.0)}, "weight is -1.0"),
        ({"row_weight": torch.full((NUM_ROWS,), float("nan"))}, "weight is nan"),
        ({"row_weight": torch.ones(NUM_ROWS - 1)}, r"they have \(10, 6\), \(11, 6\), \(11,\), \(10,\), \(9,\)"),
        ({"hidden": torch.ones(2, 5, WIDTH).double()}, r"they have \(2, 5, 6\), "),
        ({"weight": torch.ones(VOCAB, WIDTH + 1).double()}, r"\(11, 7\)"),
        ({"bias": torch.ones(VOCAB)}, "one dtype; they have torch.float64, torch.float64, torch.float32"),
        ({"target": torch.ones(NUM_ROWS)}, "target must be int64"),
        ({"row_weight": torch.ones(NUM_ROWS, dtype=torch.int64)}, "row_weight floating point"),
    ],
    ids=str,
)
def test_bad_rows_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        masked_cross_entropy(*(make_inputs(mask_id=5) | change).values(), mask_id=5)


def test_all_faults_of_a_call_are_told_at_once() -> None:
    inputs = make_inputs(mask_id=5) | {"bias": torch.ones(VOCAB - 1)}
    with pytest.raises(ValueError, match=r"shapes.*one dtype.*chunk_rows=0 must be at least 1"):
        masked_cross_entropy(*inputs.values(), mask_id=5, chunk_rows=0)


def test_a_frozen_head_needs_no_gradients() -> None:
    loss, _ = masked_cross_entropy(*make_inputs(mask_id=5).values(), mask_id=5)
    assert not loss.requires_grad


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


def test_tiles_and_chunks_of_a_larger_vocabulary() -> None:
    """Of 300 rows of 1300 float64 logits, a chunk is some tiles."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(s, generator=generator).double() for s in [(300, WIDTH), (1300, WIDTH), (1300,)]
    )  # fmt: skip
    target = torch.randint(1, 1300, (300,), generator=generator)
    inputs = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "target": target,
        "row_weight": torch.ones(300).double(),
    }
    rows = _equal_chunks(300, 200, on_cpu=True)
    assert rows < 300
    assert _tile_columns(torch.empty(rows, 1300, dtype=torch.float64)) * 2 < 1300
    # sums of 300 terms of order one
    torch.testing.assert_close(ours(inputs, mask_id=0, chunk_rows=200), expected(inputs, 0), rtol=1e-12, atol=1e-11)


def test_a_shard_far_below_the_others_still_trains_its_targets() -> None:
    """exp(own max - max) is 0 in float64 where a shard's logits lie 800 below; the target's gradient is -weight."""
    mask_id, exchange = 9, Exchange(2)
    inputs = make_inputs(mask_id) | {"target": torch.full((NUM_ROWS,), 2)}
    inputs["bias"] = inputs["bias"].clone()
    inputs["bias"][:5] -= 800.0

    def run(rank: int) -> dict[str, Tensor]:
        columns = slice(0, 5) if rank == 0 else slice(5, VOCAB)
        part = inputs | {"weight": inputs["weight"][columns], "bias": inputs["bias"][columns]}
        return ours(part, mask_id=mask_id, shard=exchange.shard(rank, columns.start, None), chunk_rows=4)

    with ThreadPoolExecutor(2) as pool:
        low, high = pool.map(run, range(2))
    exact = expected(inputs, mask_id)
    assert exact["bias"][2] == -inputs["row_weight"].sum()
    # the loss is a sum of terms of 800
    torch.testing.assert_close(low["loss"], exact["loss"], rtol=1e-12, atol=0.0)
    for name in ("weight", "bias"):
        torch.testing.assert_close(torch.cat([low[name], high[name]]), exact[name], **EXACT)
    torch.testing.assert_close(low["hidden"], exact["hidden"], **EXACT)


def test_an_exchange_has_the_work_of_another_chunk_to_hide_behind() -> None:
    """Of three chunks, each starts its exchange before the one before waits for its own."""
    events: list[str] = []

    def combine(*own: Tensor) -> Callable[[], Any]:
        number = sum(event.startswith("start") for event in events)
        events.append(f"start {number}")
        return lambda: events.append(f"wait {number}") or own

    ours(make_inputs(mask_id=5), mask_id=5, chunk_rows=4, shard=VocabShard(combine=combine))
    assert events == ["start 0", "start 1", "wait 0", "start 2", "wait 1", "wait 2"]
