"""The perplexity of a trained model on held-out text, with its standard error.

python -m mdlm_scale.evaluate --checkpoint runs/quickstart --data data/quickstart/validation [--json FILE]
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__" and __package__ is None:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not our folder: it would shadow other packages


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mdlm_scale.evaluate", description=(__doc__ or "").splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--checkpoint", dest="checkpoints", nargs=1, metavar="DIR", help="a run directory or a step-... directory"
    )
    which.add_argument(
        "--compare", dest="checkpoints", nargs=2, metavar=("A", "B"), help="two, and B less A on the same noise"
    )
    parser.add_argument("--data", required=True, help="what data.validation takes: prepared rows, a text file, python")
    parser.add_argument("--estimator", default="paper", choices=["paper", "count"], help="of the bound (paper)")
    parser.add_argument("--num-times", nargs="+", default=[], metavar="T", help="discrete time in T steps; inf: none")
    parser.add_argument("--samples-per-row", type=int, default=1, metavar="K", help="independent draws (1)")
    parser.add_argument(
        "--until-se",
        type=float,
        metavar="X",
        help="draw until noise adds at most X to the error (with --compare: of the difference)",
    )
    parser.add_argument("--rows", type=int, metavar="N", help="the first N rows (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the noise (1)")
    parser.add_argument("--batch", type=int, default=16, metavar="B", help="rows a pass; free to change (16)")
    parser.add_argument("--raw", action="store_true", help="the weights themselves, not their average (EMA)")
    parser.add_argument("--precision", choices=["bf16", "float32", "float64"], help="float32; on GPUs the run's own")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it; RANK says the same
    args = parser.parse_args(arguments)
    del args.local_rank
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parsed(arguments)
    from mdlm_scale.errors import UserError  # heavy imports come after the arguments: --help answers at once
    from mdlm_scale.run.perplexity import main as run

    try:
        return run(args)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted: nothing was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
