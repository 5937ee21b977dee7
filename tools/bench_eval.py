"""Is the standard error of an evaluation right, and which estimator has the smallest at equal cost?

    python tools/bench_eval.py                                        200 seeds; then trains a small model
    python tools/bench_eval.py --checkpoint runs/quickstart --data data/quickstart/validation --json eval.json

Coverage: a model of five positions whose bound is summed over all masks (tests/enumeration.py); how often the estimate
+- 2 standard errors holds it, with fresh rows for every seed (the whole error) and with the same rows (the part of the
noise). A normal error that is right covers 95.4 %.

Equal cost: on a trained model, what the error of one pass over the rows is, for one independent time and Bernoulli
masks a row (iid), for the paper's estimator on frozen lattices (paper), and for masks by count in mirrored pairs
(count). All see the same rows, --draws times, from which the parts of the noise and of the rows are told apart.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from enumeration import coverage

from mdlm_scale import evaluate, kernels
from mdlm_scale.config import TimeSampling
from mdlm_scale.errors import UserError, raise_if_any
from mdlm_scale.layout import Layout
from mdlm_scale.parallel.groups import Groups
from mdlm_scale.run import perplexity
from mdlm_scale.run.evaluate import Estimator, Plan, estimate, frozen, score
from mdlm_scale.run.metrics import json_faults, write_json
from mdlm_scale.run.sample import Trained, load_model

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_STEPS = 600  # a minute or two on a core
MIN_DRAWS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", metavar="DIR", help="of the second part (a small model is trained for it)")
    parser.add_argument("--data", default="python", help="what the second part evaluates on (python)")
    parser.add_argument("--rows", type=int, help="the first rows of it (all)")
    parser.add_argument("--draws", type=int, default=8, help="passes over the rows (8)")
    parser.add_argument("--seeds", type=int, default=200, help="of the first part (200); 0 leaves it out")
    parser.add_argument("--steps", type=int, default=DEFAULT_STEPS, help=f"of the small model ({DEFAULT_STEPS})")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    for name, least in {"draws": MIN_DRAWS, "seeds": 0, "steps": 1}.items():
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name)} must be at least {least}")
    kernels.tune_cpu()
    try:
        raise_if_any(json_faults(args.json))
        if args.checkpoint:
            checked(args, args.checkpoint)
        result: dict[str, Any] = {"coverage": covered(args.seeds) if args.seeds else {}}
        with tempfile.TemporaryDirectory() as folder:
            result["equal_cost"] = compared(args, args.checkpoint or trained(Path(folder), args.steps))
        if args.json:
            write_json(args.json, json.dumps(result, indent=1) + "\n")
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def covered(num_seeds: int) -> dict[str, Any]:
    """Of each estimator: with fresh rows, and with the same ones."""
    print(f"{'':8}{'':14}{'covered':>10}{'spread':>10}{'reported':>10}    {num_seeds} seeds")
    result: dict[str, Any] = {}
    for estimator in Estimator:
        for kind in ("fresh rows", "same rows"):
            found = coverage(estimator, num_seeds, fresh_rows=kind == "fresh rows")
            print(f"{estimator:8}{kind:14}{found.share:10.1%}{found.spread:10.4f}{found.mean_se:10.4f}", flush=True)
            result.setdefault(str(estimator), {})[kind] = asdict(found)
    return result


def trained(folder: Path, num_steps: int) -> str:
    """The debug recipe with longer rows and more steps."""
    settings = [f"run.dir={folder / 'run'}", f"train.num_steps={num_steps}", "data.length=128"]
    settings += [f"evaluate.every={num_steps}", f"checkpoint.every={num_steps}", "parallel.engine=plain"]
    command = [sys.executable, "-m", "mdlm_scale.train", "--config", str(ROOT / "configs" / "debug.yaml"), *settings]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    return str(folder / "run")


def checked(args: argparse.Namespace, checkpoint: str) -> tuple[Trained, perplexity.Rows]:
    """A network without time conditioning, for masks by count are one of the estimators."""
    rows_asked = [] if args.rows is None else ["--rows", str(args.rows)]
    asked = ["--checkpoint", checkpoint, "--data", args.data, "--estimator", "count", *rows_asked]
    (subject,), rows = perplexity.checked(evaluate.parsed(asked))
    return subject, rows


def compared(args: argparse.Namespace, checkpoint: str) -> dict[str, Any]:
    """The errors of one pass over the rows, and their ratios to iid."""
    subject, rows = checked(args, checkpoint)
    model = load_model(subject, torch.device("cuda" if torch.cuda.is_available() else "cpu"), dtype=torch.float32)
    diffusion = replace(frozen(subject.config.diffusion), num_times=None)
    plans = {
        "iid": (Estimator.paper, replace(diffusion, time_sampling=TimeSampling.iid)),
        "paper": (Estimator.paper, diffusion),
        "count": (Estimator.by_count, diffusion),
    }
    mask_id, vocab_size = subject.tokenizer.mask_id, subject.tokenizer.vocab_size
    result: dict[str, Any] = {}
    print(f"\n{'':8}{'nelbo':>10}{'noise':>10}{'rows':>10}{'both':>10}{'noise/iid':>11}{'both/iid':>10}", end="")
    print(f"    nats a token, one pass over {rows.num_rows} rows of {rows.source.length} tokens")
    for name, (estimator, times) in plans.items():
        plan = Plan(times, 1, rows.num_rows, mask_id, vocab_size, estimator)
        found = estimate(
            score(partial(perplexity.forward, model), rows.source, plan, range(args.draws), Layout(), Groups(), 16)
        )
        assert found.se_mc is not None
        assert found.se_data is not None
        noise = found.se_mc * math.sqrt(args.draws)  # of one draw a row
        figures = {"nelbo": found.nelbo, "se_mc": noise, "se_data": found.se_data}
        figures["se"] = math.hypot(noise, found.se_data)
        result[name] = figures
        figures |= {f"{key}_over_iid": figures[key] / result["iid"][key] for key in ("se_mc", "se")}
        print(
            f"{name:8}{found.nelbo:10.4f}{noise:10.4f}{found.se_data:10.4f}{figures['se']:10.4f}"
            f"{figures['se_mc_over_iid']:11.3f}{figures['se_over_iid']:10.3f}",
            flush=True,
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
