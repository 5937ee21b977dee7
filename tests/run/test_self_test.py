"""The self-test of kernels: it passes those that are right, and stops a run for those that are off by a little.

R rows of logits, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import published
import pytest
import torch
from conftest import Train
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.errors import TrainingError
from mdlm_scale.run import self_test

CPU = torch.device("cpu")
Kernel = Callable[..., Any]


def softmax_rows(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the Triton kernel does, by torch."""
    wide_RV = (logits_RV.double() + bias_V).masked_fill(bias_V == -torch.inf, -torch.inf)
    max_R, is_target_RV = wide_RV.amax(1), torch.arange(len(bias_V)) == column_R[:, None]
    exp_RV = (wide_RV - max_R[:, None]).exp()
    logits_RV.copy_(exp_RV.masked_fill(is_target_RV, 0.0))
    target_R = wide_RV.masked_fill(~is_target_RV, 0.0).sum(1)
    return max_R.float(), exp_RV.sum(1).float(), target_R.float()


def forgets_the_mask(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return softmax_rows(logits_RV, torch.where(bias_V == -torch.inf, 12.0, bias_V), column_R)


def leaves_the_target(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    softmax_rows(before_RV := logits_RV.clone(), bias_V, torch.full_like(column_R, -1))
    sums = softmax_rows(logits_RV, bias_V, column_R)
    logits_RV.copy_(before_RV)
    return sums


def loses_a_row(logits_RV: Tensor, bias_V: Tensor, column_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    max_R, sum_R, target_R = softmax_rows(logits_RV, bias_V, column_R)
    return max_R, sum_R.index_fill(0, torch.tensor([30]), torch.nan), target_R


def causal(*qkv: Tensor, **options: Any) -> Tensor:
    return published.flash_attn_func(*qkv, **options | {"causal": True})


def scaled_otherwise(*qkv: Tensor, **options: Any) -> Tensor:
    return published.flash_attn_func(*qkv, **options, softmax_scale=1.1 * 64**-0.5)


def deals_heads_in_turn(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return published.flash_attn_func(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1), **options)


class DecaysInTheGradient(published.FusedAdam):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"adam_w_mode": False})


class ForgetsEps(published.FusedAdam):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options | {"eps": 0.0})


class KeepsItsRate(published.FusedAdam):
    def step(self, *args: Any) -> None:
        for group in self.param_groups:
            group["lr"] = 0.1
        super().step(*args)


class WithoutExtensions(published.FusedAdam):
    def __init__(self, *args: Any, **options: Any) -> None:
        raise RuntimeError("apex.optimizers.FusedAdam requires cuda extensions")


def install(
    monkeypatch: pytest.MonkeyPatch,
    attention: Kernel = published.flash_attn_func,
    rows: Kernel = softmax_rows,
    optimizer: type[torch.optim.Optimizer] = published.FusedAdam,
) -> None:
    """All three as on a GPU; those that are not given are right."""
    published.install_flash_attn(monkeypatch, attention)
    published.install_apex(monkeypatch, optimizer)
    monkeypatch.setattr(kernels, "row_kernel", lambda _device: "triton")
    monkeypatch.setattr(kernels, "softmax_rows", rows)


@pytest.mark.parametrize("dtype", self_test.LIMITS, ids=str)
def test_a_cpu_has_nothing_to_test(dtype: torch.dtype) -> None:
    assert self_test.check(CPU, dtype, sharded=False) == []


def test_right_kernels_pass_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    starts = [
        "attention by flash-attn, bfloat16 on cpu: differs from PyTorch by ",
        "the head's softmax by triton, bfloat16 on cpu: differs from PyTorch by ",
        "AdamW by apex, float32 on cpu: differs from PyTorch by ",  # of the masters
    ]
    lines = self_test.check(CPU, torch.bfloat16, sharded=False)
    assert [line.startswith(start) for line, start in zip(lines, starts, strict=True)] == [True] * 3
    assert [line.split("(")[1] for line in lines] == ["limit 3.1e-02)", "limit 3.1e-02)", "limit 1.0e-05)"]


def test_what_an_engine_shards_is_not_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, optimizer=WithoutExtensions)
    assert len(self_test.check(CPU, torch.bfloat16, sharded=True)) == 2


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"attention": causal}, "attention by flash-attn, .*Upgrade or rebuild flash-attn"),
        ({"attention": scaled_otherwise}, "attention by flash-attn, .*its gradient of the [a-z]+ differs"),
        ({"attention": deals_heads_in_turn}, "attention by flash-attn, .* differs"),
        ({"rows": forgets_the_mask}, "the head's softmax by triton, .*MDLM_PLAIN_KERNELS=1"),
        ({"rows": leaves_the_target}, "the head's softmax by triton, .*its gradient of the .* differs"),
        ({"rows": loses_a_row}, "the head's softmax by triton, .* differs from PyTorch's by nan"),
        ({"optimizer": DecaysInTheGradient}, "AdamW by apex, float32 .*its exp_avg(_sq)? of the .* differs"),
        ({"optimizer": ForgetsEps}, "AdamW by apex, .*rounding explains 1.0e-05"),
        ({"optimizer": KeepsItsRate}, "AdamW by apex, .*its (matrix|vector) differs"),
        ({"optimizer": WithoutExtensions}, "AdamW by apex, .*does not run: RuntimeError: .*requires cuda extensions"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_kernel_that_is_off_is_the_one_named(
    wrong: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, **wrong)
    with pytest.raises(TrainingError, match=told) as raised:
        self_test.check(CPU, torch.bfloat16, sharded=False)
    assert len(raised.value.faults) == 1


def test_all_that_are_off_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, causal, forgets_the_mask, WithoutExtensions)
    with pytest.raises(TrainingError, match=r"3 faults:\n.*flash-attn.*\n.*triton.*\n.*apex"):
        self_test.check(CPU, torch.bfloat16, sharded=False)


def test_a_run_says_what_it_found(train_run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published.install_apex(monkeypatch)
    assert train_run("train.precision=float32", "train.num_steps=1") == 0
    assert "AdamW by apex, float32 on cpu: differs from PyTorch by " in (tmp_path / "run" / "log.txt").read_text()


def test_a_run_with_a_wrong_kernel_stops(
    train_run: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    published.install_apex(monkeypatch, DecaysInTheGradient)
    assert train_run("train.precision=float32") == 1
    assert "TrainingError: AdamW by apex, float32 on cpu, is wrong" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
