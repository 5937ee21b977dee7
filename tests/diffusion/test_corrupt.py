"""The corrupted batch: what is masked, what is scored and with which weight, and that ranks cut it as they like."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, LossWeight, ScheduleName
from mdlm_scale.diffusion import noise, objective
from mdlm_scale.diffusion.corrupt import Batch, corrupt, corrupted, row_faults
from mdlm_scale.diffusion.schedule import from_config
from mdlm_scale.errors import DataError

N, L, V, MASK_ID, SEED, STEP, SITES = 12, 17, 11, 5, 3, 7, 6
X_NL = (torch.arange(N * L).view(N, L) * 7 % (V - 1) + MASK_ID + 1) % V  # every token but the mask
IS_TOKEN_NL = torch.arange(L) < torch.tensor([L, L - 4, L - 9, 1])[:, None].repeat(N // 4, 1)
every_schedule = pytest.mark.parametrize("config", [DiffusionConfig(schedule=name) for name in ScheduleName], ids=str)


def batch(
    slots: range = range(N),
    config: DiffusionConfig | None = None,
    dropout_sites: int = SITES,
    x_NL: Tensor | None = None,
) -> Batch:
    config = config or DiffusionConfig()
    rows = slice(slots.start, slots.stop)
    return corrupted(
        (X_NL if x_NL is None else x_NL)[rows],
        IS_TOKEN_NL[rows],
        noise.times(config, SEED, STEP, N)[rows],
        config=config,
        schedule=from_config(config),
        seed=SEED,
        step=STEP,
        slots=slots,
        mask_id=MASK_ID,
        vocab_size=V,
        dropout_sites=dropout_sites,
    )


def test_masked_tokens_become_the_mask_and_the_others_stay() -> None:
    z_BL = corrupt(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[True, False], [False, True]]), mask_id=9)
    assert z_BL.tolist() == [[9, 2], [3, 9]]


def test_a_batch_is_masked_by_the_noise_of_its_slots() -> None:
    made = batch()
    mask_prob = from_config(DiffusionConfig()).mask_prob(made.t_B)
    is_masked_BL = noise.is_masked(SEED, STEP, torch.arange(N), mask_prob, L)
    assert torch.equal(made.z_BL, torch.where(is_masked_BL, MASK_ID, X_NL))


def test_the_rows_are_the_masked_real_tokens() -> None:
    made = batch()
    expected = [b * L + i for b in range(N) for i in range(L) if made.z_BL[b, i] == MASK_ID and made.is_token_BL[b, i]]
    assert made.rows_M.tolist() == expected


def test_padding_is_corrupted_too() -> None:
    assert (batch().z_BL[~IS_TOKEN_NL] == MASK_ID).any()


def test_the_targets_are_the_clean_tokens_of_the_rows() -> None:
    made = batch()
    assert made.target_M.tolist() == [X_NL[row // L, row % L].item() for row in made.rows_M.tolist()]


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize(
    "changes", [{}, {"num_times": 10}, {"weight": LossWeight.flat}], ids=["continuous", "discrete", "flat"]
)
def test_a_row_has_the_weight_of_its_sample(name: ScheduleName, changes: dict[str, int | LossWeight]) -> None:
    config = DiffusionConfig(schedule=name, **changes)
    made = batch(config=config)
    weight_B = objective.weight(from_config(config), made.t_B, num_times=config.num_times, kind=config.weight)
    assert made.weight_M.tolist() == [weight_B[row // L].item() for row in made.rows_M.tolist()]


@every_schedule
def test_the_network_is_told_sigma(config: DiffusionConfig) -> None:
    made = batch(config=config)
    assert torch.equal(made.sigma_B, from_config(config).sigma(made.t_B))


def test_num_tokens_counts_the_real_tokens() -> None:
    assert batch().num_tokens == N // 4 * (L + (L - 4) + (L - 9) + 1)


@every_schedule
@pytest.mark.parametrize("slots", [range(0, 5), range(5, 12), range(4, 5), range(11, 12)], ids=str)
def test_a_rank_makes_its_slice_of_the_batch(config: DiffusionConfig, slots: range) -> None:
    whole, part = batch(config=config), batch(slots, config)
    own = slice(slots.start, slots.stop)
    is_own_M = (whole.rows_M // L >= slots.start) & (whole.rows_M // L < slots.stop)
    assert whole.dropout_keys is not None
    expected = Batch(
        x_BL=whole.x_BL[own],
        z_BL=whole.z_BL[own],
        t_B=whole.t_B[own],
        sigma_B=whole.sigma_B[own],
        is_token_BL=whole.is_token_BL[own],
        rows_M=whole.rows_M[is_own_M] - slots.start * L,
        target_M=whole.target_M[is_own_M],
        weight_M=whole.weight_M[is_own_M],
        elbo_weight_M=whole.elbo_weight_M[is_own_M],
        dropout_keys=whole.dropout_keys[:, own],
        num_tokens=int(IS_TOKEN_NL[own].sum()),
    )
    assert [
        f.name for f in dataclasses.fields(Batch) if not _same(getattr(part, f.name), getattr(expected, f.name))
    ] == []


def test_a_batch_may_be_empty() -> None:
    made = batch(range(4, 4))
    assert (tuple(made.z_BL.shape), len(made.rows_M), made.num_tokens) == ((0, L), 0, 0)


def test_a_network_without_dropout_gets_no_keys() -> None:
    assert batch(dropout_sites=0).dropout_keys is None


def test_moving_a_batch_keeps_every_field() -> None:
    made = batch()
    moved = made.to(torch.device("cpu"))
    assert [f.name for f in dataclasses.fields(Batch) if not _same(getattr(made, f.name), getattr(moved, f.name))] == []


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def test_text_with_the_mask_or_with_unknown_tokens_is_refused_and_the_slots_are_named() -> None:
    x_NL = X_NL.clone()
    x_NL[4, 2], x_NL[5, 3] = MASK_ID, V
    batch(range(0, 4), x_NL=x_NL)
    with pytest.raises(DataError) as caught:
        batch(range(4, 8), x_NL=x_NL)
    message = str(caught.value)
    assert message.count(f"Step {STEP}, slots 4 to 7: ") == 2
    assert f"the mask token, id {MASK_ID}" in message
    assert f"token id {V}, outside the vocabulary, 0 .. {V - 1}" in message


@pytest.mark.parametrize("bad", [-1e-9, float("nan"), float("inf")])
def test_a_weight_that_is_no_weight_is_a_fault(bad: float) -> None:
    def faults(weights: list[float]) -> list[str]:
        return row_faults(torch.tensor([1]), torch.tensor(weights), mask_id=0, vocab_size=2)

    assert faults([0.0, 1e30]) == []
    (fault,) = faults([0.0, bad, 1.0])
    assert "must be finite and not negative" in fault
