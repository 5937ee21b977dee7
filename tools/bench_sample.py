"""How long does a sample take, ours against the original's cached loop, at the same law of T steps?

    python tools/bench_sample.py                                     d 512, 6 layers, V 50258, random weights
    python tools/bench_sample.py --checkpoint runs/mine --minutes 2 --json sample.json

The original's loop, in plain PyTorch: a step draws every position anew from p(z_s | z_t), over the whole vocabulary and
the mask, by Gumbel's trick in float64; the probabilities are kept while no token of the batch changes, else the network
and its head run on all positions of all samples. Ours decides the unmasking ahead, so that a sample passes through the
network only in steps that unmask one of its tokens, and through the head only there. Both use the same network. The
original's loop ends after --minutes: then the steps it made are told, and its times are their mean times T, marked as
estimates (with the loglinear schedule all steps unmask equally many tokens in the mean). First-hitting has a line of
its own, for its law is that of T without end. On a shared machine CPU seconds, of all threads, say more than seconds:
ratios are of them. nll is the mean of -log p of the drawn tokens, entropy that of a sample's tokens, both in nats.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from mdlm_scale import kernels
from mdlm_scale.config import DiffusionConfig, ModelConfig
from mdlm_scale.diffusion import sample, schedule
from mdlm_scale.diffusion.posterior import stay_masked_prob
from mdlm_scale.diffusion.sample import Order, Rule
from mdlm_scale.diffusion.schedule import Schedule
from mdlm_scale.model.dit import DiT
from mdlm_scale.model.init import Fill, fills, init_range
from mdlm_scale.run import quality
from mdlm_scale.run.sample import find_trained, load_model


@dataclass(frozen=True)
class Outcome:
    name: str
    batch: int
    seconds: float  # for all samples; of an unfinished loop what all its steps would take
    cpu_seconds: float
    steps_timed: int | None  # of the original's T
    finished: bool
    calls: int  # of the network, so far
    rows: int  # sequences in them
    head_rows: int
    nll: float | None
    entropy: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", metavar="DIR", help="a trained model instead of random weights")
    parser.add_argument("--hidden", type=int, default=512, help="width of the random model (512)")
    parser.add_argument("--layers", type=int, default=6, help="(6)")
    parser.add_argument("--heads", type=int, default=8, help="(8)")
    parser.add_argument("--vocab", type=int, default=50258, help="vocabulary, the mask last (50258)")
    parser.add_argument("--length", type=int, default=256, help="tokens a sample (256)")
    parser.add_argument("--steps", type=int, default=1000, help="T (1000)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8], help="samples drawn together (1 8)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for the original's loop, each batch size (10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and draws (0)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if min(args.hidden, args.layers, args.heads, args.length, args.steps, *args.batches) < 1 or args.vocab < 2:
        parser.error("sizes, --steps and --batches must be at least 1, --vocab at least 2")
    kernels.tune_cpu()
    if args.checkpoint:
        trained = find_trained(Path(args.checkpoint))
        model, shape = load_model(trained, torch.device("cpu")), schedule.from_config(trained.config.diffusion)
        mask_id, vocab_size = trained.tokenizer.mask_id, trained.tokenizer.vocab_size
    else:
        model, shape = random_model(args), schedule.from_config(DiffusionConfig())
        mask_id, vocab_size = args.vocab - 1, args.vocab
    rule = Rule(mask_id, vocab_size, args.seed, num_steps=args.steps)
    print(f"T {args.steps}, {args.length} tokens a sample, V {vocab_size}, {torch.get_num_threads()} threads")
    print(f"{'':14} batch    seconds    CPU s   network calls  of rows  head rows     nll  entropy")
    outcomes = []
    for batch in args.batches:
        z_BL = torch.full((batch, args.length), mask_id)
        with torch.inference_mode():
            for order in (Order.ancestral, Order.first_hitting):
                outcomes.append(show(ours(model, shape, order, rule, z_BL)))
            outcomes.append(show(original(model, shape, rule, z_BL, args.minutes)))
        ancestral, theirs = outcomes[-3], outcomes[-1]
        note = "" if theirs.finished else f", estimated from {theirs.steps_timed} of {args.steps} steps of the original"
        ratio = theirs.cpu_seconds / ancestral.cpu_seconds
        print(f"batch {batch}: ours takes {ratio:.1f} times less CPU time at the same law{note}")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return 0


def random_model(args: argparse.Namespace) -> DiT:
    """With random numbers also where training starts from zeros: else every token would be equally likely."""
    config = ModelConfig(hidden_size=args.hidden, num_layers=args.layers, num_heads=args.heads)
    model = DiT(config, args.vocab, args.vocab - 1)
    for name, fill in fills(model).items():
        p = model.get_parameter(name)
        fill = Fill(bound=0.1) if fill == Fill(0.0) else fill
        p.data = init_range(args.seed, name, fill, 0, p.numel()).view(p.shape).to(p.dtype)
    return model


def ours(model: DiT, shape: Schedule, order: Order, rule: Rule, z_BL: Tensor) -> Outcome:
    rule = Rule(rule.mask_id, rule.vocab_size, rule.seed, order, rule.num_steps)
    nats: list[Tensor] = []
    rows, head_rows, real_draw = [], [], sample.draw

    def network(z_BL: Tensor, t_B: Tensor, rows_M: Tensor) -> Tensor:
        rows.append(len(z_BL))
        head_rows.append(len(rows_M))
        return model.logits(z_BL, shape.sigma(t_B), rows_M)

    def recording(logits_MV: Tensor, u_M: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
        token_M, p_M = real_draw(logits_MV, u_M, rule)
        nats.append(-p_M.log())
        return token_M, p_M

    sample.draw = recording
    try:
        started, cpu, length = time.monotonic(), time.process_time(), z_BL.shape[1]
        x_BL, _ = sample.generate(network, shape, rule, z_BL, torch.arange(len(z_BL)), width=length, stride=length)
        seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    finally:
        sample.draw = real_draw
    return Outcome(
        str(order), len(z_BL), seconds, cpu, None, True, len(rows), sum(rows), sum(head_rows),
        float(torch.cat(nats).mean()), entropy_of(x_BL),
    )  # fmt: skip


def original(model: DiT, shape: Schedule, rule: Rule, z_BL: Tensor, minutes: float) -> Outcome:
    """Buffers of B x L x V are changed in place where that is possible: allocating them anew would cost more."""
    generator = torch.Generator().manual_seed(rule.seed)
    every_row, nats, p_NV = torch.arange(z_BL.numel()), [torch.zeros(0, dtype=torch.float64)], None
    calls, step, started, cpu = 0, rule.num_steps, time.monotonic(), time.process_time()
    while step > 0 and time.monotonic() - started < 60 * minutes:
        t, s = (torch.tensor(i / rule.num_steps, dtype=torch.float64) for i in (step, step - 1))
        stay = float(stay_masked_prob(shape.mask_prob(s), shape.mask_prob(t))) if step > 1 else 0.0
        if p_NV is None:
            logits_NV = model.logits(z_BL, shape.sigma(t.expand(len(z_BL))), every_row)
            logits_NV[:, rule.mask_id] = -torch.inf
            p_NV, calls = torch.softmax(logits_NV, dim=1), calls + 1
        law_NV = p_NV.double().mul_(1 - stay)
        law_NV[:, rule.mask_id] = stay
        # argmax of log p + Gumbel noise is argmax of p / exponential noise
        race_NV = torch.rand(law_NV.shape, generator=generator, dtype=torch.float64).log_().neg_()
        drawn_BL = law_NV.div_(race_NV).argmax(dim=1).view_as(z_BL)
        is_new_BL = (z_BL == rule.mask_id) & (drawn_BL != rule.mask_id)
        if is_new_BL.any():
            rows_M = torch.nonzero(is_new_BL.flatten()).squeeze(1)
            nats.append(-p_NV[rows_M, drawn_BL.flatten()[rows_M]].double().log())
            z_BL, p_NV = torch.where(is_new_BL, drawn_BL, z_BL), None
        step -= 1
    timed = rule.num_steps - step
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    drawn_M = torch.cat(nats)
    return Outcome(
        "original", len(z_BL), seconds / timed * rule.num_steps, cpu / timed * rule.num_steps, timed, step == 0,
        calls, calls * len(z_BL), calls * len(every_row), float(drawn_M.mean()) if len(drawn_M) else None,
        entropy_of(z_BL) if step == 0 else None,
    )  # fmt: skip


def entropy_of(x_BL: Tensor) -> float:
    return float(quality.report(x_BL.tolist())["entropy"] or 0)


def show(outcome: Outcome) -> Outcome:
    entropy = "" if outcome.entropy is None else f"{outcome.entropy:.3f}"
    nll = "" if outcome.nll is None else f"{outcome.nll:.3f}"
    mark = " " if outcome.finished else "*"
    times = f"{outcome.seconds:10,.1f} {outcome.cpu_seconds:8,.1f}{mark}"
    counts = f"{outcome.calls:13,} {outcome.rows:8,} {outcome.head_rows:10,}"
    print(f"{outcome.name:14} {outcome.batch:5} {times} {counts} {nll:>7} {entropy:>8}", flush=True)
    if not outcome.finished:
        print(f"  * estimated: {outcome.steps_timed} steps were made; calls, rows and nll are of these")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
