"""Tell what a run needs on GPUs that are not here: memory, exchanges, time; and find the layouts that fit.

python -m mdlm_scale.plan --config configs/8b.yaml --gpus 64 --gpu h100 [--search] [section.key=value ...]
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__" and __package__ is None:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not our folder: it would shadow other packages


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mdlm_scale.plan", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="a YAML file, e.g. configs/8b.yaml")
    add("--gpus", required=True, type=int, metavar="N", help="of the whole job")
    add("--gpu", required=True, metavar="NAME", help="their kind, an entry of configs/plan/gpus.yaml, e.g. h100")
    add("--search", action="store_true", help="try every layout and micro-batch; the batch and the model stay")
    add("--json", metavar="FILE", help="write the plan here too")
    add("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    args = parser.parse_intermixed_args(arguments)
    if args.gpus < 1:
        parser.error(f"--gpus {args.gpus} must be at least 1")
    from mdlm_scale.errors import UserError  # heavy imports come after the arguments: --help answers at once
    from mdlm_scale.run.plan import main as run

    try:
        return run(args)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
