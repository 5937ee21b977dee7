"""The samplers draw from the laws they claim, on a vocabulary small enough to enumerate; what is given stays."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from mdlm_scale.config import DiffusionConfig, ModelConfig, ScheduleName
from mdlm_scale.diffusion import noise, schedule
from mdlm_scale.diffusion.posterior import posterior_probs, subs_log_probs
from mdlm_scale.diffusion.sample import Logits, Order, Rule, draw, generate, moments
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.init import Fill, init_range

VOCAB, MASK, LENGTH = 4, 1, 3  # the mask in the middle of the vocabulary
NUMBER = 20_000  # samples of a law over 27 sequences: enough to tell T = 1 from T = 2 by p < 1e-6
RULE = Rule(MASK, VOCAB, seed=3)
LOGLINEAR = schedule.from_config(DiffusionConfig())


def network(z_BL: Tensor, t_B: Tensor) -> Tensor:
    """Logits (B, L, V) by position, time and the other tokens. They favour the mask, which must not matter."""
    weight = torch.tensor([[0.5, 9, -0.3, 0.1], [-0.7, 9, 0.4, 0.9], [0.0, 9, 1.0, -0.5]], dtype=torch.float64)
    token_BLV = torch.nn.functional.one_hot(z_BL, VOCAB).double()
    others_BLV = token_BLV.sum(1, keepdim=True) - token_BLV
    mix = torch.tensor([[2.0, 0, -1, 0], [0.3, 0, 0, -0.4], [-1, 0, 1.5, 0.2], [0, 0, 0.5, -2]], dtype=torch.float64)
    return weight + others_BLV @ mix / 2 + t_B[:, None, None] * weight[:, [2, 1, 3, 0]]


def timed(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
    return network(z_BL, t_B).flatten(0, 1)[rows_M]


def timeless(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
    return timed(z_BL, torch.zeros_like(t_B), rows_M)


def masks(number: int, length: int = LENGTH) -> Tensor:
    return torch.full((number, length), MASK)


def sampled(
    logits: Logits, rule: Rule, z_BL: Tensor, shape: Schedule = LOGLINEAR, first: int = 0, stride: int = 1
) -> Tensor:
    """In windows of at most LENGTH positions."""
    sample_B = torch.arange(first, first + len(z_BL))
    return generate(logits, shape, rule, z_BL, sample_B, width=LENGTH, stride=stride)[0]


def p_value(z_BL: Tensor, law: Tensor) -> float:
    """Of a chi-square test over all sequences; none may be outside the law."""
    found = torch.zeros_like(law).index_put_(tuple(z_BL.t()), torch.ones(len(z_BL), dtype=law.dtype), accumulate=True)
    assert float(law.sum()) == pytest.approx(1)
    assert not (found[law == 0] > 0).any()
    return float(stats.chisquare(found[law > 0].numpy(), (law[law > 0] * len(z_BL)).numpy()).pvalue)


def ancestral_law(num_steps: int, shape: Schedule) -> Tensor:
    """Over all sequences, by enumeration of all states: p(z_s) = sum over z_t of p(z_s | z_t) p(z_t)."""
    law = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    law[(MASK,) * LENGTH] = 1
    for step in range(num_steps, 0, -1):
        t, s = (torch.tensor([i / num_steps], dtype=torch.float64) for i in (step, step - 1))
        mask_prob_s = shape.mask_prob(s) if step > 1 else torch.zeros_like(s)
        after = torch.zeros_like(law)
        for state in itertools.product(range(VOCAB), repeat=LENGTH):
            z_BL = torch.tensor([state])
            x_BLV = subs_log_probs(network(z_BL, t), z_BL, mask_id=MASK).exp()
            p_LV = posterior_probs(z_BL, x_BLV, mask_prob_s, shape.mask_prob(t), mask_id=MASK)[0]
            after += law[state] * torch.einsum("a,b,c->abc", *p_LV)
        law = after
    return law


@cache
def any_order_law(state: tuple[int, ...] = (MASK,) * LENGTH) -> Tensor:
    """Over all sequences that `state` may become: a masked position at random, drawn given what is there, and so on."""
    law = torch.zeros((VOCAB,) * LENGTH, dtype=torch.float64)
    open_positions = [i for i, token in enumerate(state) if token == MASK]
    if not open_positions:
        law[state] = 1
    for i in open_positions:
        z_BL = torch.tensor([state])
        p_V = subs_log_probs(network(z_BL, torch.zeros(1)), z_BL, mask_id=MASK).exp()[0, i]
        for token in set(range(VOCAB)) - {MASK}:
            law += p_V[token] / len(open_positions) * any_order_law((*state[:i], token, *state[i + 1 :]))
    return law


# seeds are fixed, so that a law that holds today holds for ever; chance alone gives p < 1e-3 once in a thousand seeds
@pytest.mark.parametrize("num_steps", [1, 2, 8])
@pytest.mark.parametrize("name", [ScheduleName.loglinear, ScheduleName.cosine])
def test_ancestral_draws_from_its_own_law_of_t_steps(num_steps: int, name: ScheduleName) -> None:
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    z_BL = sampled(timed, replace(RULE, num_steps=num_steps), masks(NUMBER), shape)
    assert p_value(z_BL, ancestral_law(num_steps, shape)) > 1e-3
    if num_steps > 1:  # the test would see the law of another number of steps
        assert p_value(z_BL, ancestral_law(1, shape)) < 1e-6


def test_first_hitting_draws_from_the_joint_of_random_orders() -> None:
    z_BL = sampled(timeless, replace(RULE, order=Order.first_hitting), masks(NUMBER))
    assert p_value(z_BL, any_order_law()) > 1e-3
    assert p_value(sampled(timeless, replace(RULE, num_steps=2), masks(NUMBER)), any_order_law()) < 1e-6


def test_first_hitting_given_a_token_draws_from_the_joint_given_it() -> None:
    given = torch.tensor([MASK, 2, MASK]).expand(NUMBER, -1)
    assert (
        p_value(sampled(timeless, replace(RULE, order=Order.first_hitting), given), any_order_law((MASK, 2, MASK)))
        > 1e-3
    )


def test_first_hitting_is_ancestral_with_ever_more_steps() -> None:
    """The same noise: 10^6 steps part no two of these unmaskings otherwise, and move no time by more than 1e-6."""
    for name in ScheduleName:
        shape = schedule.from_config(
            DiffusionConfig(schedule=name, sigma_min=1e-9 if name is ScheduleName.geometric else None)
        )
        steps = sampled(timed, replace(RULE, num_steps=10**6), masks(200), shape)
        assert torch.equal(sampled(timed, replace(RULE, order=Order.first_hitting), masks(200), shape), steps)


def test_confidence_takes_the_most_probable_first() -> None:
    """At temperature 0 with a step for each position: greedy in the order of the largest probability."""
    rule = replace(RULE, order=Order.confidence, num_steps=LENGTH, temperature=0.0)
    z = [MASK] * LENGTH
    for _ in range(LENGTH):
        p_LV = subs_log_probs(network(torch.tensor([z]), torch.zeros(1)), torch.tensor([z]), mask_id=MASK).exp()[0]
        position = max((i for i in range(LENGTH) if z[i] == MASK), key=lambda i: float(p_LV[i].max()))
        z[position] = int(p_LV[position].argmax())
    assert sampled(timeless, rule, masks(2)).tolist() == [z, z]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 50])
def test_confidence_spreads_its_tokens_over_the_steps(num_steps: int) -> None:
    seen: list[int] = []

    def counting(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        seen.append(len(rows_M))
        return timeless(z_BL, t_B, rows_M)

    sampled(counting, replace(RULE, order=Order.confidence, num_steps=num_steps), masks(1))
    assert seen == {1: [3], 2: [3, 2], 3: [3, 2, 1], 50: [3, 2, 1]}[num_steps]


def plain_loop(model: DiT, rule: Rule, z_BL: Tensor) -> Tensor:
    """Step by step, the whole network at every one of them, the head on every row: what there is to be saved."""
    number, length = z_BL.shape
    u_when_BL, u_which_BL = (
        noise.uniforms(rule.seed, name, 0, torch.arange(number), length) for name in ("unmask", "token")
    )
    edges = torch.arange(rule.num_steps + 1, dtype=torch.float64) / rule.num_steps
    mask_prob = LOGLINEAR.mask_prob(edges) / LOGLINEAR.mask_prob(edges[-1])
    for step in range(rule.num_steps, 0, -1):
        t_B = edges[step].expand(number)
        logits_MV = model.logits(z_BL, LOGLINEAR.sigma(t_B), torch.arange(number * length))
        token_BL = draw(logits_MV, u_which_BL.flatten(), rule)[0].view(number, length)
        is_drawn_BL = (z_BL == MASK) & (u_when_BL >= mask_prob[step - 1])
        z_BL = torch.where(is_drawn_BL, token_BL, z_BL)
    return z_BL


def dit(time_conditioning: bool) -> DiT:
    """Tiny, in float64, with random numbers also where training starts from zeros."""
    config = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, cond_size=8, time_conditioning=time_conditioning)
    model = DiT(config, VOCAB, MASK).double()
    for name, p in model.named_parameters():
        p.data = init_range(0, name, Fill(bound=0.5), 0, p.numel()).view(p.shape)
    return model.requires_grad_(False)


@pytest.mark.parametrize("time_conditioning", [False, True])
@pytest.mark.parametrize("num_steps", [3, 40])
def test_only_what_is_needed_is_computed_bit_for_bit(time_conditioning: bool, num_steps: int) -> None:
    model, rule, z_BL = dit(time_conditioning), replace(RULE, num_steps=num_steps), masks(20, 12)
    through_head, passes = 0, torch.zeros(0, dtype=torch.long)

    def logits(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        nonlocal through_head, passes
        through_head, passes = through_head + len(rows_M), torch.cat([passes, torch.tensor([len(z_BL)])])
        return model.logits(z_BL, LOGLINEAR.sigma(t_B), rows_M)

    ours = generate(logits, LOGLINEAR, rule, z_BL, torch.arange(20), width=12, stride=1)[0]
    assert torch.equal(ours, plain_loop(model, rule, z_BL))
    assert through_head == 20 * 12  # each token once
    assert len(passes) <= min(num_steps, 12)
    step_BL = moments(LOGLINEAR, rule, noise.uniforms(rule.seed, "unmask", 0, torch.arange(20), 12))[0]
    assert int(passes.sum()) == sum(len(set(row)) for row in step_BL.tolist())  # a row's own steps


def test_first_hitting_asks_the_network_once_for_each_token() -> None:
    asked: list[int] = []

    def logits(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        asked.append(len(z_BL))
        assert ((z_BL == MASK).sum(1) == LENGTH - len(asked) + 1).all()
        return timeless(z_BL, t_B, rows_M)

    sampled(logits, replace(RULE, order=Order.first_hitting), masks(7))
    assert asked == [7] * LENGTH


@pytest.mark.parametrize("name", list(ScheduleName))
def test_times_of_unmasking_follow_the_schedule(name: ScheduleName) -> None:
    """P(masked at t | masked at 1) for quantiles of t; the time is the schedule's inverse."""
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    u_BL = (torch.arange(1000, dtype=torch.float64)[None] + 0.5) / 1000
    _, time_BL = moments(shape, replace(RULE, order=Order.first_hitting), u_BL)
    mask_prob_1 = shape.mask_prob(torch.ones(1, dtype=torch.float64))
    least = shape.mask_prob(torch.zeros(1, dtype=torch.float64)) / mask_prob_1
    torch.testing.assert_close(
        shape.mask_prob(time_BL) / mask_prob_1, u_BL.clamp(min=float(least)), rtol=0.0, atol=1e-4
    )


@pytest.mark.parametrize("name", list(ScheduleName))
@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("num_steps", [1, 7])
def test_no_mask_is_left(name: ScheduleName, order: Order, num_steps: int) -> None:
    shape = schedule.from_config(DiffusionConfig(schedule=name))
    z_BL = sampled(timed, replace(RULE, order=order, num_steps=num_steps), masks(500, 5), shape, stride=2)
    assert not (z_BL == MASK).any()


def test_steps_in_which_masks_are_left_at_time_0_are_the_last() -> None:
    """Linear has P(masked) = 0.001 at t = 0: with one step in ten thousand, that stretch is the last step's."""
    shape = schedule.from_config(DiffusionConfig(schedule=ScheduleName.linear))
    step, time = moments(shape, replace(RULE, num_steps=10_000), torch.tensor([[0.0, 9e-4]], dtype=torch.float64))
    assert step.tolist() == [[0, 0]]
    assert time.tolist() == [[1e-4, 1e-4]]


@pytest.mark.parametrize("order", list(Order))
def test_sample_does_not_depend_on_its_batch(order: Order) -> None:
    rule = replace(RULE, order=order, num_steps=4, top_p=0.9, temperature=2.0)
    together = sampled(timed, rule, masks(8, 5))
    assert torch.equal(together[5:6], sampled(timed, rule, masks(1, 5), first=5))
    assert not torch.equal(together, sampled(timed, replace(rule, seed=4), masks(8, 5)))


@pytest.mark.parametrize("order", list(Order))
def test_what_is_given_never_changes(order: Order) -> None:
    """Every pattern of given tokens of a text that takes three windows."""
    is_given_BN = torch.tensor(list(itertools.product([False, True], repeat=6)))
    tokens_BN = torch.tensor([0, 2, 3])[torch.arange(64 * 6).view(64, 6) * 7 % 3]
    z_BN = sampled(timed, replace(RULE, order=order, num_steps=2), torch.where(is_given_BN, tokens_BN, MASK), stride=2)
    assert torch.equal(z_BN[is_given_BN], tokens_BN[is_given_BN])
    assert not (z_BN == MASK).any()


@pytest.mark.parametrize(("length", "starts"), [(3, [0]), (4, [0, 1]), (5, [0, 2]), (8, [0, 2, 4, 5])])
def test_windows_keep_what_was_made_before(length: int, starts: list[int]) -> None:
    """Windows of 3, each two further on, the last one at the end: the network sees the end of the window before."""
    windows: list[Tensor] = []

    def logits(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        windows.append(z_BL[0].clone())
        return timed(z_BL, t_B, rows_M)

    z_L = sampled(logits, replace(RULE, num_steps=1), masks(1, length), stride=2)[0]
    assert len(windows) == len(starts)  # in one step a window
    for before, start, window_L in zip([0, *(s + 3 for s in starts)], starts, windows, strict=False):
        expected_L = torch.where(torch.arange(start, start + 3) < before, z_L[start : start + 3], MASK)
        assert torch.equal(window_L, expected_L)


@pytest.mark.parametrize("order", list(Order))
def test_the_wanted_part_is_the_same_with_and_without_stopping(order: Order) -> None:
    rule, sample_B, asked = replace(RULE, order=order, num_steps=8), torch.arange(400), [0, 0]

    def counting(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        asked[-1] += len(rows_M)
        return timed(z_BL, t_B, rows_M)

    whole, all_wanted = generate(counting, LOGLINEAR, rule, masks(400, 7), sample_B, width=3, stride=1)
    asked.append(0)
    cut, wanted_B = generate(counting, LOGLINEAR, replace(rule, stop_id=2), masks(400, 7), sample_B, width=3, stride=1)
    assert asked[-1] < asked[-2]
    assert (all_wanted == 7).all()
    frame = {0, 2, 3, 4, 5}  # a row's first place and the last of every window but the last one
    for row, end, stopped in zip(whole.tolist(), wanted_B.tolist(), cut.tolist(), strict=True):
        ends = [i + 1 for i in range(7) if row[i] == 2 and i not in frame]
        assert end == (ends[0] if ends else 7)
        assert stopped[:end] == row[:end]
    assert (cut == MASK).any()


def test_a_given_stop_token_does_not_stop() -> None:
    given = torch.tensor([MASK, 2, MASK]).expand(50, -1)
    _, wanted_B = generate(timed, LOGLINEAR, replace(RULE, stop_id=2), given, torch.arange(50), width=3, stride=1)
    assert (wanted_B == 3).all()


def harmonic() -> tuple[Tensor, Tensor]:
    """Logits of 50,000 tokens with a heavy tail, and the probabilities without the first one, which is the mask."""
    logits_V = -torch.log1p(torch.arange(50_000, dtype=torch.float64))
    return logits_V, torch.softmax(logits_V.index_fill(0, torch.tensor([0]), -torch.inf), 0)


def test_draw_keeps_the_tail() -> None:
    """Of 50k tokens, those of small probability are drawn as often as they should be."""
    logits_V, p_V = harmonic()
    number = 4_000
    u_M = (torch.arange(number, dtype=torch.float64) + 0.5) / number  # a stratified sample: nearly no noise
    tokens_M, p_M = draw(logits_V.expand(number, -1), u_M, Rule(mask_id=0, vocab_size=50_000))
    torch.testing.assert_close(p_M, p_V[tokens_M], rtol=1e-9, atol=0.0)  # two orders of summation
    entropy = float(-(p_V[1:] * p_V[1:].log()).sum())
    assert float(-p_M.log().mean()) == pytest.approx(entropy, abs=1e-3)  # half a stratum of the first token


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("mask_id", [0, 3])
def test_draw_at_the_ends_is_never_the_mask_nor_padding(u: float, mask_id: int) -> None:
    padded = torch.tensor([[0.0, 0.0, 0.0, 0.0, 50.0, 50.0]])
    token = draw(padded, torch.tensor([u], dtype=torch.float64), Rule(mask_id, vocab_size=4))[0]
    assert int(token) == (0 if u == 0 else 3) + (1 if mask_id == 0 and u == 0 else -1 if mask_id == 3 and u else 0)


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.5, 1.0), (2.0, 1.0), (1.0, 0.6), (0.5, 0.9), (0, 1), (1e-310, 1)]
)
def test_temperature_and_top_p(temperature: float, top_p: float) -> None:
    p_V = torch.tensor([0.0, 0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
    number = 10_000
    u_M = (torch.arange(number, dtype=torch.float64) + 0.5) / number
    rule = Rule(0, 5, temperature=temperature, top_p=top_p)
    token_M, p_M = draw(p_V.log().expand(number, -1), u_M, rule)
    expected = {
        (0.5, 1.0): [0, 16 / 30, 1 / 30, 9 / 30, 4 / 30],
        (2.0, 1.0): (p_V.sqrt() / p_V.sqrt().sum()).tolist(),
        (1.0, 0.6): [0, 4 / 7, 0, 3 / 7, 0],  # 0.4 is not enough, 0.7 is
        (0.5, 0.9): [0, 16 / 29, 0, 9 / 29, 4 / 29],
        (0, 1): [0, 1, 0, 0, 0],
        (1e-310, 1): [0, 1, 0, 0, 0],
    }[temperature, top_p]
    assert (torch.bincount(token_M, minlength=5) / number).tolist() == pytest.approx(expected, abs=1 / number)
    torch.testing.assert_close(p_M, p_V[token_M])  # the network's own
    assert len(rule.departures()) == (temperature != 1) + (top_p != 1)
