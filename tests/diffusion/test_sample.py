"""The ancestral sampler draws from the law it claims, on a vocabulary small enough to enumerate."""

import itertools

import pytest
import torch
from formulas import posterior_probs, subs_log_probs
from scipy import stats
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, ScheduleName
from mdlm_scale.diffusion import schedule
from mdlm_scale.diffusion.sample import ancestral, draw

VOCAB, MASK, LENGTH = 4, 1, 2  # the mask in the middle of the vocabulary


def network(z_BL: Tensor) -> Tensor:
    """Logits (B, L, V) that depend on the position, on the other tokens, and favour the mask, which must not matter."""
    weight = torch.tensor([[0.5, 9.0, -0.3, 0.1], [-0.7, 9.0, 0.4, 0.9]], dtype=torch.float64)
    context = z_BL.double().flip(1)[..., None] * torch.tensor([0.3, 0.0, -0.2, 0.1], dtype=torch.float64)
    return weight + context


def logits(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
    return network(z_BL).flatten(0, 1)[rows_M]


def exact_law(num_steps: int, shape: schedule.Schedule) -> dict[tuple[int, ...], float]:
    """The T-step law by enumeration of all sequences: p(z_s) = sum over z_t of p(z_s | z_t) p(z_t)."""
    states = list(itertools.product(range(VOCAB), repeat=LENGTH))
    law = {state: float(all(token == MASK for token in state)) for state in states}
    for step in range(num_steps, 0, -1):
        t, s = (torch.tensor([i / num_steps], dtype=torch.float64) for i in (step, step - 1))
        after = dict.fromkeys(states, 0.0)
        for state, probability in law.items():
            if probability == 0:
                continue
            z_BL = torch.tensor([state])
            x_BLV = subs_log_probs(network(z_BL), z_BL, mask_id=MASK).exp()
            mask_prob_s = shape.mask_prob(s) if step > 1 else torch.zeros_like(s)
            p_LV = posterior_probs(z_BL, x_BLV, mask_prob_s, shape.mask_prob(t), mask_id=MASK)[0]
            for target in states:
                after[target] += probability * float(torch.stack([p_LV[i, v] for i, v in enumerate(target)]).prod())
        law = after
    return law


@pytest.mark.parametrize("num_steps", [1, 2, 8])
@pytest.mark.parametrize("name", [ScheduleName.loglinear, ScheduleName.cosine])
def test_law(num_steps: int, name: ScheduleName) -> None:
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    number = 20_000
    z_BL = ancestral(logits, shape, torch.arange(number), LENGTH, num_steps=num_steps, mask_id=MASK, seed=3)
    law = {state: p for state, p in exact_law(num_steps, shape).items() if p > 0}
    counts = torch.zeros(VOCAB, VOCAB)
    counts.index_put_((z_BL[:, 0], z_BL[:, 1]), torch.ones(number), accumulate=True)
    observed = [float(counts[state]) for state in law]
    assert sum(observed) == number  # nothing outside the law's support
    # a fixed seed: this either holds for ever or never; the law is wrong long before p = 1e-4
    assert stats.chisquare(observed, [p * number for p in law.values()]).pvalue > 1e-4


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("num_steps", [1, 7])
def test_no_mask_is_left(name: ScheduleName, num_steps: int) -> None:
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    z_BL = ancestral(logits, shape, torch.arange(500), LENGTH, num_steps=num_steps, mask_id=MASK, seed=0)
    assert not (z_BL == MASK).any()


def test_sample_does_not_depend_on_its_batch() -> None:
    shape = schedule.from_config(DiffusionConfig())
    together = ancestral(logits, shape, torch.arange(8), LENGTH, num_steps=4, mask_id=MASK, seed=0)
    alone = ancestral(logits, shape, torch.tensor([5]), LENGTH, num_steps=4, mask_id=MASK, seed=0)
    assert torch.equal(together[5:6], alone)


def test_draw_keeps_the_tail() -> None:
    """Of 50k nearly equal tokens, those of small probability are drawn as often as they should be."""
    logits_V = -torch.log1p(torch.arange(50_000, dtype=torch.float64))
    p_V = torch.softmax(logits_V.index_fill(0, torch.tensor([0]), -torch.inf), 0)
    number = 4_000
    u_M = (torch.arange(number, dtype=torch.float64) + 0.5) / number  # a stratified sample: nearly no noise
    tokens_M = torch.cat([draw(logits_V.expand(len(u), -1), u, mask_id=0) for u in u_M.split(500)])
    mean_nll = float(-p_V[tokens_M].log().mean())
    entropy = float(-(p_V[1:] * p_V[1:].log()).sum())
    assert mean_nll == pytest.approx(entropy, abs=1e-3)  # half a stratum of the most probable token is about 1e-3


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("mask_id", [0, 3])
def test_draw_at_the_ends_is_never_the_mask(u: float, mask_id: int) -> None:
    token = draw(torch.zeros(1, 4), torch.tensor([u], dtype=torch.float64), mask_id=mask_id)
    assert int(token) == (0 if u == 0 else 3) + (1 if mask_id == 0 and u == 0 else -1 if mask_id == 3 and u else 0)
