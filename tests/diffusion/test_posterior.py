"""The probabilities of the masking process against explicit transition matrices and Bayes' rule on a small vocabulary.

Tolerances: products of a few float64 numbers up to 1, so errors of a few 1e-16; 1e-14 leaves room for the sums.
"""

import itertools

import pytest
import torch
from torch import Tensor

from mdlm_scale.diffusion.posterior import forward_probs, posterior_probs, stay_masked_prob, subs_log_probs

V, MASK_ID = 5, 2
CLEAN = [v for v in range(V) if v != MASK_ID]
REACHABLE = [(x, z) for x in CLEAN for z in (x, MASK_ID)]  # every clean token with every z_t it can lead to
X_P, Z_P = torch.tensor(REACHABLE).t()
ALPHAS = [1.0, 0.8, 0.35, 1e-3, 0.0]  # falling, as time goes on
LATER = list(itertools.combinations(ALPHAS, 2))  # alpha_s > alpha_t
LATER_TWICE = list(itertools.combinations(ALPHAS, 3))  # alpha_r > alpha_s > alpha_t


def matrix(stay: float) -> Tensor:
    """Row i: where state i goes if a readable token stays with this probability."""
    Q_VV = stay * torch.eye(V, dtype=torch.float64)
    Q_VV[:, MASK_ID] += 1 - stay
    return Q_VV


def forward(z_s: Tensor, alpha_s: float, alpha_t: float) -> Tensor:
    """q(z_t | z_s) for a list of states, (len, V)."""
    alphas = torch.tensor([[alpha_s], [alpha_t]], dtype=torch.float64)
    return forward_probs(z_s[None], *alphas, vocab_size=V, mask_id=MASK_ID)[0]


def posterior(z_t: Tensor, x_PV: Tensor, alpha_s: float, alpha_t: float) -> Tensor:
    """q(z_s | z_t, x) for a list of pairs, (len, V)."""
    mask_probs = 1 - torch.tensor([[alpha_s], [alpha_t]], dtype=torch.float64)
    return posterior_probs(z_t[None], x_PV[None], *mask_probs, mask_id=MASK_ID)[0]


def one_hot(x: Tensor) -> Tensor:
    return torch.eye(V, dtype=torch.float64)[x]


def close(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("alpha_s", "alpha_t"), LATER)
def test_the_forward_kernel_is_the_transition_matrix(alpha_s: float, alpha_t: float) -> None:
    close(forward(torch.arange(V), alpha_s, alpha_t), matrix(alpha_t / alpha_s))


@pytest.mark.parametrize(("alpha_r", "alpha_s", "alpha_t"), LATER_TWICE)
def test_the_forward_kernel_composes(alpha_r: float, alpha_s: float, alpha_t: float) -> None:
    every = torch.arange(V)
    close(forward(every, alpha_r, alpha_s) @ forward(every, alpha_s, alpha_t), forward(every, alpha_r, alpha_t))


@pytest.mark.parametrize(("alpha_s", "alpha_t"), LATER)
def test_the_posterior_is_bayes_rule(alpha_s: float, alpha_t: float) -> None:
    joint_PV = matrix(alpha_s)[X_P] * matrix(alpha_t / alpha_s)[:, Z_P].t()  # q(z_s | x) q(z_t | z_s), for each pair
    evidence_P = matrix(alpha_t)[X_P, Z_P]
    seen = evidence_P > 0  # with alpha_t = 0 nothing is readable
    expected = joint_PV[seen] / evidence_P[seen, None]
    close(posterior(Z_P[seen], one_hot(X_P[seen]), alpha_s, alpha_t), expected)


@pytest.mark.parametrize(("alpha_s", "alpha_t"), LATER)
def test_the_posterior_sums_to_one(alpha_s: float, alpha_t: float) -> None:
    close(posterior(Z_P, one_hot(X_P), alpha_s, alpha_t).sum(1), torch.ones(len(Z_P), dtype=torch.float64))


@pytest.mark.parametrize(("alpha_r", "alpha_s", "alpha_t"), LATER_TWICE)
def test_the_posterior_composes(alpha_r: float, alpha_s: float, alpha_t: float) -> None:
    every = torch.arange(V)
    two_steps = [
        posterior(z[None], x[None], alpha_s, alpha_t)[0] @ posterior(every, x.expand(V, V), alpha_r, alpha_s)
        for z, x in zip(Z_P, one_hot(X_P), strict=True)
    ]
    close(torch.stack(two_steps), posterior(Z_P, one_hot(X_P), alpha_r, alpha_t))


def test_the_posterior_of_a_guess_is_the_mixture_over_its_answers() -> None:
    guess_V = torch.tensor([0.1, 0.2, 0.0, 0.3, 0.4], dtype=torch.float64)
    masked = torch.tensor(MASK_ID)
    mixture_V = guess_V @ posterior(masked.expand(V), torch.eye(V, dtype=torch.float64), 0.8, 0.35)
    close(posterior(masked[None], guess_V[None], 0.8, 0.35)[0], mixture_V)


def test_each_sample_has_its_own_time() -> None:
    mask_prob_s, mask_prob_t = torch.tensor([[0.1, 0.2], [0.4, 0.5]], dtype=torch.float64)
    z_BL = torch.full((2, 3), MASK_ID)
    probs_BLV = posterior_probs(z_BL, one_hot(torch.tensor([[0, 1, 3]] * 2)), mask_prob_s, mask_prob_t, mask_id=MASK_ID)
    close(probs_BLV[..., MASK_ID], torch.tensor([[0.25] * 3, [0.4] * 3], dtype=torch.float64))


def test_a_mask_stays_with_the_ratio_of_the_mask_probabilities() -> None:
    assert stay_masked_prob(torch.tensor(0.25), torch.tensor(0.5)) == 0.5


# --- the network's side

LOGITS_BLV = torch.sin(torch.arange(2.0 * 4 * V, dtype=torch.float64)).view(2, 4, V) * 3
Z_BL = torch.tensor([[MASK_ID, 0, MASK_ID, 4], [3, MASK_ID, 1, MASK_ID]])


def test_subs_never_answers_the_mask() -> None:
    assert (subs_log_probs(LOGITS_BLV, Z_BL, mask_id=MASK_ID)[..., MASK_ID] == -torch.inf).all()


def test_subs_keeps_readable_tokens() -> None:
    readable = Z_BL != MASK_ID
    probs = subs_log_probs(LOGITS_BLV, Z_BL, mask_id=MASK_ID).exp()
    assert torch.equal(probs[readable], one_hot(Z_BL[readable]))


def test_subs_sums_to_one() -> None:
    close(subs_log_probs(LOGITS_BLV, Z_BL, mask_id=MASK_ID).exp().sum(-1), torch.ones(2, 4, dtype=torch.float64))


def test_subs_is_the_softmax_over_the_other_tokens() -> None:
    masked = Z_BL == MASK_ID
    log_probs = subs_log_probs(LOGITS_BLV, Z_BL, mask_id=MASK_ID)
    close(log_probs[masked][:, CLEAN], LOGITS_BLV[masked][:, CLEAN].log_softmax(-1))


def test_subs_ignores_the_logit_of_the_mask() -> None:
    louder = LOGITS_BLV.clone()
    louder[..., MASK_ID] = 1e4
    close(subs_log_probs(louder, Z_BL, mask_id=MASK_ID), subs_log_probs(LOGITS_BLV, Z_BL, mask_id=MASK_ID))
