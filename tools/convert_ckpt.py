"""From one checkpoint format to another, tensor by tensor: the model is never held in memory.

    python tools/convert_ckpt.py runs/mine exported --to hf                       for transformers and the hub
    python tools/convert_ckpt.py runs/mine original --to mdlm                     for the original's code
    python tools/convert_ckpt.py last.ckpt start --to native --tokenizer gpt2     to train, evaluate and sample here

SRC is recognised: a run directory or a checkpoint of ours, a folder exported by this tool, the original's Hugging Face
folder or its Lightning .ckpt (of which nothing is executed). Averaged (EMA) weights are taken where there are some.
A folder appears when it is complete, or not at all. Exit code 2: nothing was written, and why.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

DTYPES = ("float64", "float32", "bfloat16", "float16")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint")
    parser.add_argument("target", type=Path, metavar="DST", help="the folder to make")
    parser.add_argument("--to", required=True, choices=["hf", "mdlm", "native"], help="the format of DST")
    parser.add_argument("--raw", action="store_true", help="the weights themselves, not their average (EMA)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights written (as they are stored)")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="X", help="largest safetensors file (5)")
    parser.add_argument("--tokenizer", metavar="NAME|FOLDER", help="for a source that has none, or another place of it")
    parser.add_argument("--mask-id", type=int, metavar="N", help="its config's, else its tokenizer's, else the last id")
    parser.add_argument("--force", action="store_true", help="replace DST, if it holds a converted checkpoint")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    args = arguments(given)
    from convert_targets import convert  # heavy imports come after the arguments: --help answers at once

    from mdlm_scale import log as log_module
    from mdlm_scale.errors import UserError

    log_module.start()
    try:
        convert(args)
    except UserError as error:
        log_module.end_live()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
