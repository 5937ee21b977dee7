"""Draw text from a trained model.

python -m mdlm_scale.sample --checkpoint runs/quickstart [--num 4] [--sampler first-hitting] [--prompt TEXT]
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__" and __package__ is None:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # not our folder: it would shadow other packages

RULE = """A sample is a BOS token and the text given, if any, then what is drawn, up to --length tokens; what is given
never changes. In --infill each ___ is a gap of --gap tokens. The text between gaps is tokenised as it stands: where a
tokenizer puts a space into the word behind it, write "The___ sat". Neither --num nor --batch changes a sample."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mdlm_scale.sample", description=(__doc__ or "").splitlines()[0], epilog=RULE)
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a run directory or a step-... directory")
    add("--num", type=int, default=4, help="how many samples (4)")
    add("--sampler", default="ancestral", choices=["ancestral", "first-hitting", "confidence"],
        help="in T steps; token by token, as if T had no end; the surest first, not the model's law")  # fmt: skip
    add("--steps", type=int, metavar="T", help="of ancestral and confidence (128)")
    add("--length", type=int, help="tokens a sample (the model's L); what is longer is drawn in windows of L")
    add("--stride", type=int, help="new tokens of each further window, behind the last L - stride before it (L / 2)")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", metavar="TEXT", help="what samples begin with")
    text.add_argument("--infill", metavar="TEXT", help='what they begin with, with gaps: "the ___ sat on the ___"')
    add("--gap", type=int, default=8, metavar="N", help="tokens of each gap (8)")
    add("--temperature", type=float, default=1.0, help="0 draws the most probable token; 1 is the model's law (1)")
    add("--top-p", type=float, default=1.0, help="draw only from the most probable tokens, P together (1: from all)")
    add("--stop-at-eos", action="store_true", help="what follows the first EOS is not shown, nor computed if it can be")
    add("--seed", type=int, default=0, help="of the draws (0)")
    add("--batch", type=int, default=16, metavar="B", help="samples drawn together; free to change (16)")
    add("--raw", action="store_true", help="the weights themselves, not their average (EMA)")
    add("--report", action="store_true", help="entropy, distinct n-grams and repetition of the samples")
    add("--judge", metavar="NAME", help="report generative perplexity too, under this causal LM: a name or a folder")
    add("--json", metavar="FILE", help="write the samples here too, one JSON object a line")
    args = parser.parse_args(arguments)
    from mdlm_scale.errors import UserError  # heavy imports come after the arguments: --help answers at once
    from mdlm_scale.run.sample import main as run

    try:
        return run(args)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted: a --json file is written when all samples are there", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
