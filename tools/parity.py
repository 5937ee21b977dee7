"""Does every layout compute what one process computes? The matrix of engines, with the worst difference of each cell.

    python tools/parity.py                       every cell and every seeded bug
    python tools/parity.py --only "ZeRO 3" --json parity.json

A cell trains a small model on real processes (gloo) and compares loss, gradient norm, every gradient, parameters and
averaged weights with one process; tests/parity/cells.py has the cells and says where their tolerances come from. Then
mistakes are made on purpose, each of which must be seen. Exit code 1 if a cell is out of tolerance or a mistake passes.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

FAILED = 1e300  # a difference that is no number: JSON has neither infinity nor NaN
COLUMNS = ("loss", "norm", "grad", "param", "ema", "losses", "params")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="cells and bugs whose name contains this")
    parser.add_argument("--quick", action="store_true", help="leave out the slow cells")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    from parity.bugs import BUGS, is_caught
    from parity.cells import CELLS

    start = time.monotonic()
    cells = [cell for cell in CELLS if args.only in cell.name and not (args.quick and cell.slow)]
    print(f"{'against one process':42s} {'':8s} " + " ".join(f"{column:>8s}" for column in COLUMNS), flush=True)
    rows = [_measure(cell) for cell in cells]
    bugs = []
    for name in BUGS:
        if args.only in name:
            bugs.append({"name": name, "caught": is_caught(name)})
            print(f"seeded bug: {name:60s} {'caught' if bugs[-1]['caught'] else 'NOT CAUGHT'}", flush=True)
    good = all(not row["faults"] for row in rows) and all(bug["caught"] for bug in bugs)
    print(
        f"{sum(not row['faults'] for row in rows)} of {len(rows)} cells within tolerance, "
        f"{sum(bug['caught'] for bug in bugs)} of {len(bugs)} seeded bugs caught, {time.monotonic() - start:.0f} s"
    )
    if args.json:
        Path(args.json).write_text(json.dumps({"cells": rows, "seeded_bugs": bugs}, indent=1) + "\n")
    return 0 if good else 1


def _measure(cell: Any) -> dict[str, Any]:
    """One row: figures of a cell, or the error it ended with."""
    from parity.cells import differences, growth_for
    from parity.ranks import RankError

    precision = cell.trial.precision
    row: dict[str, Any] = {"name": cell.name, "dtype": str(precision)}
    try:
        found = differences(cell.trial)
    except RankError as error:
        row |= dict.fromkeys(COLUMNS, FAILED) | {"faults": [str(error).strip().splitlines()[-1]]}
    else:
        figures = {column: getattr(found, column) for column in COLUMNS}
        row |= {column: figure if math.isfinite(figure) else FAILED for column, figure in figures.items()}
        row["faults"] = found.faults(precision, growth_for(cell.trial))
    told = " ".join(f"{row[column]:8.0e}" for column in COLUMNS)
    print(f"{cell.name:42s} {precision:8s} {told}  {'; '.join(row['faults'])}", flush=True)
    return row


if __name__ == "__main__":
    sys.exit(main())
