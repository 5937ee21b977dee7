"""Draw text from a trained model.

python -m mdlm_scale.sample --checkpoint runs/quickstart [--num 4] [--steps 128] [--seed 0] [--json FILE]
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__" and __package__ is None:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not our folder: it would shadow other packages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mdlm_scale.sample", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="a run directory or a step-... directory")
    parser.add_argument("--num", type=int, default=4, help="how many samples (4)")
    parser.add_argument("--steps", type=int, default=128, help="steps of the ancestral sampler (128)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument("--json", metavar="FILE", help="write the samples here too, one JSON object a line")
    args = parser.parse_args(arguments)

    from mdlm_scale.errors import UserError  # heavy imports come after the arguments: --help answers at once
    from mdlm_scale.run.sample import main as run

    try:
        return run(args.checkpoint, args.num, args.steps, args.seed, args.json)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
