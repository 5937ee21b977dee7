"""What does the way in which times are spread over a batch bring: a better model, or less noise?

    python tools/bench_times.py --text enwik8.txt                                   the quick start's model, 2000 steps
    python tools/bench_times.py --text enwik8.txt --seeds 0 1 2 --steps 1200 --json times.json

For each seed a model is trained with every `diffusion.time_sampling`, all else equal: rows, masks' bits, initial
weights, steps and so the cost. Runs lie in --output; the same command again goes on with what is unfinished.

Validation: the bound of the averaged weights on the held-out twentieth of the text, on the same frozen noise for all,
mean over seeds. Its standard error, and that of the differences to the first of --times (paired: block by block), are
those of rows and evaluation noise alone; with several seeds the difference has a second one, of its spread over the
seeds, which knows how much runs differ. A difference is called one if it is beyond both (95 %).

Noise: at fixed weights (those of the first run, averaged) and fixed rows (one global batch), the same for all, over K
draws of times, of which row gets which of them, and of masks. With g the gradient of the batch loss,

    gradient noise = sqrt(E |g - E g|^2) / |E g|        loss noise: the same of the loss, a single number

Each draw of times is met by two draws of masks. Their covariance is the part of the variance that comes from times and
their rows (the law of total variance: Var E[g | times]); masks make the rest. |E g|^2 is estimated from products of
different draws, so it has no bias from the noise. Standard errors, also of the ratios to the first of --times, are
jackknifed over the K draws; a ratio less than two of them from 1 is called within error.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

TIMES = ("lattice", "stratified", "iid")
MASKS = 2  # draws of masks to a draw of times
STUDENT = {2: 12.7, 3: 4.3, 4: 3.2, 5: 2.8}  # errors of a mean over so many runs that 5 % of such means go beyond


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", nargs="+", required=True, metavar="FILE", help="what tools/prepare_data.py reads")
    add("--times", nargs="+", default=list(TIMES), choices=TIMES, help="the first is what others are held against")
    add("--seeds", nargs="+", type=int, default=[0], metavar="S", help="of the runs (0)")
    add("--steps", type=int, default=2000, help="of each run (2000)")
    add("--draws", type=int, default=128, metavar="K", help="of times, each with two of masks (128)")
    add("--config", default=str(ROOT / "configs" / "quickstart.yaml"), metavar="FILE", help="configs/quickstart.yaml")
    add("--output", type=Path, default=Path("runs/bench_times"), metavar="DIR", help="rows and runs (runs/bench_times)")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("overrides", nargs="*", metavar="section.key=value", help="settings that replace the config's")
    args = parser.parse_intermixed_args()
    for name, least in {"steps": 4, "draws": 3}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    for name in ("times", "seeds"):
        if len(set(given := getattr(args, name))) < len(given):
            parser.error(f"--{name} {' '.join(map(str, given))} names one twice")
    if args.json and (args.json.is_dir() or not os.access(args.json.absolute().parent, os.W_OK)):
        parser.error(f"--json {args.json} cannot be written")
    return args


def main() -> int:
    args = arguments()

    from mdlm_scale import log as log_module
    from mdlm_scale.errors import UserError

    log_module.start()
    try:
        return measure(args)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def measure(args: argparse.Namespace) -> int:
    import prepare_documents as documents

    from mdlm_scale import config as config_module
    from mdlm_scale.errors import ConfigError, DataError
    from mdlm_scale.parallel.groups import World
    from mdlm_scale.run.main import faults
    from mdlm_scale.run.main import main as train

    runs = {(seed, times): settings(args, seed, times) for seed in args.seeds for times in args.times}
    config = config_module.load(args.config, runs[args.seeds[0], args.times[0]])
    found = faults(config, World())
    try:
        files = documents.find(args.text)
    except DataError as error:
        found += error.faults
    if found:
        raise ConfigError(*found)
    if code := prepare(args, config, sum(block.num_records for block in documents.blocks(files))):
        return code
    for (seed, times), overrides in runs.items():
        print(f"--- {times}, seed {seed}", flush=True)
        if code := train(args.config, overrides, False, None, time.monotonic()):
            return code
    result = {
        "steps": args.steps,
        "seeds": args.seeds,
        "draws": args.draws,
        "global_batch_size": config.batch.global_batch_size,
        "validation": validation(args),
        "noise": noises(args),
    }
    show(args, result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def settings(args: argparse.Namespace, seed: int, times: str) -> list[str]:
    return [
        f"data.train={args.output / 'data' / 'train'}", f"data.validation={args.output / 'data' / 'validation'}",
        f"train.num_steps={args.steps}", f"checkpoint.every={args.steps}", f"evaluate.every={args.steps // 4}",
        f"optimizer.cosine_steps={args.steps}", *args.overrides,
        f"run.dir={run_folder(args, seed, times)}", f"run.seed={seed}", f"diffusion.time_sampling={times}",
    ]  # fmt: skip


def run_folder(args: argparse.Namespace, seed: int, times: str) -> Path:
    return args.output / f"{times}-{seed}"


def prepare(args: argparse.Namespace, config: Any, num_records: int) -> int:
    """The text as rows, its last twentieth for validation."""
    import prepare_data

    settings = {
        "--output": args.output / "data", "--tokenizer": config.tokenizer.name, "--length": config.data.length,
        "--validation-documents": max(1, num_records // 20),
    }  # fmt: skip
    return prepare_data.main(["--input", *args.text, *(str(part) for pair in settings.items() for part in pair)])


# --- the bound on held-out rows


def validation(args: argparse.Namespace) -> dict[str, Any]:
    """By way of sampling times: the bound, its difference to the first, and how it fell. Seeds stand as draws."""
    from mdlm_scale.run.evaluate import Scores, estimate

    scores = {times: scored(args, times) for times in args.times}
    first = scores[args.times[0]]
    found: dict[str, Any] = {}
    for times, own in scores.items():
        bound, differing = estimate(own), estimate(Scores(own.nats - first.nats, own.tokens))
        each = [estimate(Scores(nats[None], own.tokens)).nelbo for nats in own.nats - first.nats]
        squares = sum((one - differing.nelbo) ** 2 for one in each)
        found[times] = {
            "nelbo": bound.nelbo,
            "nelbo_se": bound.nelbo_se,
            "difference": differing.nelbo,
            "difference_se": differing.nelbo_se,
            "difference_of_seeds": each,
            "difference_se_over_seeds": math.sqrt(squares / (len(each) - 1) / len(each)) if len(each) > 1 else None,
            "curve": curve(args, times),
        }
    return found


def scored(args: argparse.Namespace, times: str) -> Any:
    """Nats of every held-out row under the run of each seed."""
    from functools import reduce
    from operator import add

    import torch

    from mdlm_scale.layout import Layout
    from mdlm_scale.parallel.groups import Groups
    from mdlm_scale.run.evaluate import Plan, frozen, score

    parts = []
    for seed in args.seeds:
        model, trained = load(args, seed, times)
        rows, config = rows_of(trained, "validation"), trained.config
        plan = Plan(
            frozen(config.diffusion), config.evaluate.seed, rows.num_rows, trained.tokenizer.mask_id,
            trained.tokenizer.vocab_size,
        )  # fmt: skip
        with torch.inference_mode():
            parts.append(score(lambda batch, of=model: of(batch)[1], rows, plan, range(1), Layout(), Groups(), 16))
    return reduce(add, parts)


def curve(args: argparse.Namespace, times: str) -> dict[str, list[float]]:
    """Step to what each seed's run evaluated there, on its first `evaluate.rows` held-out rows."""
    found: dict[str, list[float]] = {}
    for seed in args.seeds:
        for line in (run_folder(args, seed, times) / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["kind"] == "eval":
                found.setdefault(str(row["step"]), []).append(row["nelbo"])
    return found


def load(args: argparse.Namespace, seed: int, times: str) -> tuple[Any, Any]:
    """The averaged model of a run, and what the run was made with."""
    import torch

    from mdlm_scale.run.sample import find_trained, load_model

    trained = find_trained(run_folder(args, seed, times))
    return load_model(trained, torch.device("cpu"), dtype=torch.float32), trained


def rows_of(trained: Any, split: str) -> Any:
    from mdlm_scale.data import source

    data = trained.config.data
    return source.load(getattr(data, split), split, data, trained.tokenizer, source.open_cache(data))


# --- noise of a batch's loss and gradient


def noises(args: argparse.Namespace) -> dict[str, Any]:
    """By way of sampling times: noise of loss and gradient, and its ratio to the first."""
    products = {times: draw(args, times) for times in args.times}
    first = products[args.times[0]]
    found: dict[str, Any] = {}
    for times, own in products.items():
        found[times] = {}
        for what in own:
            figures = {
                "noise": jackknife(relative_noise, own[what]),
                "from_times": jackknife(share_of_times, own[what]),
                "ratio": jackknife(ratio_of_noise, own[what], first[what]),
            }
            found[times][what] = {
                key: value for name, (mean, se) in figures.items() for key, value in ((name, mean), (f"{name}_se", se))
            }
    return found


def draw(args: argparse.Namespace, times: str) -> dict[str, Any]:
    """Inner products of the losses, and of the gradients, of all draws: (masks, K, masks, K)."""
    import torch

    from mdlm_scale import log as log_module
    from mdlm_scale.diffusion import schedule
    from mdlm_scale.diffusion.corrupt import corrupted

    model, trained = load(args, args.seeds[0], args.times[0])
    own = loader_of(trained, one_batch(trained), times)
    parameters = list(model.parameters())
    losses_MK = torch.empty(MASKS, args.draws, 1, dtype=torch.float64)
    gradients_MKP = torch.empty(MASKS, args.draws, sum(p.numel() for p in parameters))
    again = partial(
        corrupted, config=own.diffusion, schedule=schedule.from_config(own.diffusion), seed=own.seed,
        slots=range(own.batch.global_batch_size), mask_id=own.mask_id, vocab_size=own.vocab_size,
    )  # fmt: skip
    for k in range(args.draws):
        log_module.live(f"noise, {times}: draw {k + 1}/{args.draws}")
        [batch] = own.make(k)
        for m in range(MASKS):
            if m > 0:  # the masks of a later step
                batch = again(batch.x_BL, batch.is_token_BL, batch.t_B, step=m * args.draws + k)
            loss = model(batch)[0] / batch.num_tokens
            gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
            losses_MK[m, k, 0] = loss.detach()
            torch.cat([g.flatten() for g in gradients], out=gradients_MKP[m, k])
    own.close()
    log_module.end_live()
    return {"loss": inner_products(losses_MK), "gradient": inner_products(gradients_MKP)}


def loader_of(trained: Any, rows: Any, times: str) -> Any:
    """The loader of a run as it would be with these rows and times: a step is one micro-batch without dropout."""
    from mdlm_scale.config import TimeSampling
    from mdlm_scale.data.loader import Loader
    from mdlm_scale.layout import Layout

    config, tokenizer = trained.config, trained.tokenizer
    return Loader(
        rows, Layout(), replace(config.batch, micro_batch_size=config.batch.global_batch_size),
        replace(config.diffusion, time_sampling=TimeSampling(times)), config.run.seed,
        mask_id=tokenizer.mask_id, vocab_size=tokenizer.vocab_size, dropout_sites=0,
    )  # fmt: skip


def one_batch(trained: Any) -> Any:
    """The rows of the step that would come next, as a source of their own: an epoch is a batch, dealt anew."""
    import numpy as np

    from mdlm_scale.data.rows import NUM_TOKENS, TOKENS, record_type, token_type
    from mdlm_scale.data.source import Source, in_memory

    own = loader_of(trained, rows_of(trained, "train"), str(trained.config.diffusion.time_sampling))
    [batch] = own.make(trained.manifest["state"]["step"])
    own.close()
    records = np.empty(len(batch.x_BL), record_type(trained.config.data.length, token_type(own.vocab_size)))
    records[TOKENS], records[NUM_TOKENS] = batch.x_BL.numpy(), batch.is_token_BL.sum(1).numpy()
    return Source([in_memory(records)])


def inner_products(vectors_MKP: Any) -> Any:
    import torch

    flat_NP = vectors_MKP.flatten(0, 1)
    parts = (part.double() @ part.double().T for part in flat_NP.split(1 << 16, dim=1))
    return torch.stack(list(parts)).sum(0).view(2 * vectors_MKP.shape[:2])


def variances(products: Any) -> tuple[float, float, float]:
    """Of vectors with these inner products: |E g|^2, the variance E |g - E g|^2, and what of it comes from times."""
    num_draws = products.shape[1]
    of_draws_KK = products.sum((0, 2)) / MASKS**2  # of the means over masks
    same_k = float(of_draws_KK.trace())
    square_of_mean = (float(of_draws_KK.sum()) - same_k) / (num_draws * (num_draws - 1))
    square = sum(float(products[m, :, m].trace()) for m in range(MASKS)) / (MASKS * num_draws)
    pairs = sum(float(products[m, :, n].trace()) for m in range(MASKS) for n in range(MASKS) if m != n)
    return square_of_mean, square - square_of_mean, pairs / (MASKS * (MASKS - 1) * num_draws) - square_of_mean


def relative_noise(products: Any) -> float:
    square_of_mean, variance, _ = variances(products)
    return math.sqrt(variance / square_of_mean) if square_of_mean > 0 else math.inf


def share_of_times(products: Any) -> float:
    _, variance, from_times = variances(products)
    return from_times / variance


def ratio_of_noise(products: Any, first: Any) -> float:
    return relative_noise(products) / relative_noise(first)


def jackknife(statistic: Callable[..., float], *products: Any) -> tuple[float, float]:
    """A statistic of all draws, and its standard error from leaving out one after the other."""
    import torch

    num_draws = products[0].shape[1]
    without = []
    for k in range(num_draws):
        kept = torch.arange(num_draws) != k
        without.append(statistic(*(each[:, kept][:, :, :, kept] for each in products)))
    mean = sum(without) / num_draws
    return statistic(*products), math.sqrt((num_draws - 1) / num_draws * sum((w - mean) ** 2 for w in without))


# --- what is told


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    first = args.times[0]
    print(f"\nvalidation NELBO after {args.steps} steps, nats a token, mean of {len(args.seeds)} seed(s)")
    print(f"{'':22s}{'NELBO':>18s}{f'minus {first}, paired':>26s}{'error over seeds':>18s}")
    for times, row in result["validation"].items():
        told, spread = "", row["difference_se_over_seeds"]
        if times != first:
            over_seeds = "" if spread is None else f"+- {spread:.4f}"
            if spread is None:
                seen = "one run each: how much runs differ is not known"
            else:
                limit = max(2 * row["difference_se"], STUDENT.get(len(args.seeds), 2.6) * spread)
                seen = verdict(row["difference"], limit)
            told = f"{with_error(row, 'difference', '+.4f'):>26s}{over_seeds:>18s}  {seen}"
        print(f"{times:22s}{with_error(row, 'nelbo', '.4f'):>18s}{told}")
    print(f"\nnoise of a batch of {result['global_batch_size']} rows at fixed weights, {args.draws} draws")
    print(f"{'':22s}{'relative noise':>18s}{'of its variance, times':>26s}{f'over {first}':>18s}")
    for what in ("loss", "gradient"):
        for times, rows in result["noise"].items():
            row, told = rows[what], ""
            if times != first:
                told = f"{with_error(row, 'ratio', '.3f'):>18s}  {verdict(row['ratio'] - 1, 2 * row['ratio_se'])}"
            figures = f"{with_error(row, 'noise', '.4f'):>18s}{with_error(row, 'from_times', '.1%'):>26s}"
            print(f"{what + ', ' + times:22s}{figures}{told}")


def with_error(row: dict[str, float], name: str, form: str) -> str:
    return f"{row[name]:{form}} +- {row[name + '_se']:{form.lstrip('+')}}"


def verdict(difference: float, limit: float) -> str:
    return "within error" if abs(difference) < limit else "a difference"


if __name__ == "__main__":
    sys.exit(main())
