"""Pre-train a masked diffusion language model.

python -m mdlm_scale.train --config configs/debug.yaml [--check [--ranks N]] [section.key=value ...]
deepspeed mdlm_scale/train.py --config configs/debug.yaml
"""

import argparse
import sys
import time
from pathlib import Path

if __name__ == "__main__" and __package__ is None:
    # run as a script: our folder on sys.path would shadow other packages (data, config, evaluate)
    sys.path[0] = str(Path(__file__).resolve().parent.parent)


def main(arguments: list[str] | None = None) -> int:
    started = time.monotonic()
    parser = argparse.ArgumentParser(prog="mdlm_scale.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML file, e.g. configs/debug.yaml")
    parser.add_argument("--check", action="store_true", help="check config, data and tokenizer; write nothing")
    parser.add_argument("--ranks", type=int, metavar="N", help="with --check: as if N processes had been started")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it; RANK says the same
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    args = parser.parse_intermixed_args(arguments)
    if args.ranks is not None and (args.ranks < 1 or not args.check):
        parser.error("--ranks goes with --check and is at least 1: the processes of a run are its launcher's to start")

    from mdlm_scale.errors import UserError  # heavy imports come after the arguments: --help answers at once
    from mdlm_scale.run.main import main as run

    try:
        return run(args.config, args.overrides, args.check, args.ranks, started)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
