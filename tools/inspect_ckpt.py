"""What is in a checkpoint: counters, layout, sizes, health.

    python tools/inspect_ckpt.py runs/mine                            every checkpoint of a run
    python tools/inspect_ckpt.py runs/mine/checkpoints/step-005000    one of them
    python tools/inspect_ckpt.py runs/mine --verify                   read every file, check its hash
    python tools/inspect_ckpt.py runs/mine --json checkpoints.json

Exit code 1 if one of them is damaged; without --verify only what the names and sizes of files tell.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="DIR", help="a run directory or one checkpoint")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its sha256")
    parser.add_argument("--json", metavar="FILE", help="write the facts here too")
    args = parser.parse_args()
    from mdlm_scale.run import checkpoint

    is_one = args.path.name.startswith("step-") or (args.path / checkpoint.MANIFEST).is_file()
    paths = [args.path] if is_one else checkpoint.listed(args.path / "checkpoints")
    if not paths or not args.path.is_dir():
        print(f"{args.path} is neither a checkpoint (step-...) nor a run directory with one.", file=sys.stderr)
        return 2
    found = [_facts(path, args.verify) for path in paths]
    for facts in found:
        _print(facts)
    if args.json:
        Path(args.json).write_text(json.dumps({"checkpoints": found}, indent=1) + "\n")
    return 1 if any(facts["faults"] for facts in found) else 0


def _facts(path: Path, verify: bool) -> dict[str, Any]:
    from mdlm_scale.errors import CheckpointError
    from mdlm_scale.run import checkpoint

    try:
        manifest = checkpoint.read_manifest(path)
    except CheckpointError as error:
        return {"path": str(path), "faults": [str(error)]}
    files = manifest["files"]
    if verify:
        faults = checkpoint.damaged_files(path, files)
    else:
        faults = [
            f"{name} is missing or has another size"
            for name, facts in files.items()
            if not (path / name).is_file() or (path / name).stat().st_size != facts["bytes"]
        ]
    kinds: dict[str, int] = {}
    for key, entry in manifest["tensors"].items():
        kind, numel = key.partition("/")[0], math.prod(entry["shape"])
        kinds[kind] = kinds.get(kind, 0) + numel
        stored = sum(math.prod(box["size"]) for box in entry["boxes"])
        if stored != numel:
            faults.append(f"{key} has {stored} of {numel} elements")
    state = manifest["state"]
    return {
        "path": str(path),
        "faults": faults,
        "verified": verify,
        "state": {key: value for key, value in state.items() if key != "losses"},
        "last_loss": state["losses"][-1] if state["losses"] else None,
        "layout": manifest["layout"],
        "engine": manifest["config"]["parallel"]["engine"],
        "versions": manifest["versions"],
        "elements": kinds,
        "files": len(files),
        "bytes": sum(facts["bytes"] for facts in files.values()),
    }


def _print(facts: dict[str, Any]) -> None:
    print(facts["path"])
    if "state" in facts:
        state, layout = facts["state"], facts["layout"]
        skipped = f", skipped {state['skipped_steps']}" if state["skipped_steps"] else ""
        print(f"  step {state['step']}, {state['updates']} updates{skipped}; last loss {facts['last_loss']}")
        print(
            f"  written by {layout['world_size']} rank(s), tp {layout['tp_size']}, engine {facts['engine']}; "
            f"mdlm_scale {facts['versions']['mdlm_scale']}, torch {facts['versions']['torch']}"
        )
        kinds = ", ".join(f"{kind} {numel:,}" for kind, numel in facts["elements"].items())
        print(f"  {facts['bytes'] / 1e6:,.1f} MB in {facts['files']} file(s); elements: {kinds}")
    if facts["faults"]:
        print("  DAMAGED: " + "; ".join(facts["faults"]))
    else:
        print("  sound: every hash is right" if facts["verified"] else "  complete (--verify reads it)")


if __name__ == "__main__":
    sys.exit(main())
