"""Do runs survive? Kills at random, restarts on random layouts, and a comparison with the run that was left in peace.

    python tools/torture.py --runs 50                      some twenty minutes on two cores
    python tools/torture.py --runs 3 --seed 7 --json torture.json

A run of 24 steps is interrupted two to four times: a rank killed (-9) at a random step, all ranks killed while a
checkpoint is being written, or SIGTERM or SIGUSR1 to one of them. Every second run starts again on the same layout and
must end bit-equal to the uninterrupted run there. The others start again on another layout each time, of FSDP2, HSDP
and ZeRO 0 to 3 with tensor parallelism or without, on 1 to 4 ranks; they must end within 1e-11 of one process (float64;
DeepSpeed by way of the tests' patch). Samples are counted along the surviving trajectory: lost if a step's rows were
not trained on, repeated if twice. Exit code 1 unless all runs are equal and none is lost or repeated.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores

STEPS, EVERY, TOLERANCE, SECONDS = 24, 3, 1e-11, 180.0
ZERO = ["parallel.engine=deepspeed", "parallel.deepspeed.zero_optimization.reduce_scatter=false"]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "plain": (1, ["parallel.engine=plain"]),
    "fsdp dp 2": (2, ["parallel.engine=fsdp"]),
    "fsdp dp 4": (4, ["parallel.engine=fsdp"]),
    "hsdp 2 x 2": (4, ["parallel.engine=fsdp", "parallel.replicate_size=2"]),
    "fsdp tp 2": (2, ["parallel.engine=fsdp", "parallel.tp_size=2"]),
    "fsdp tp 2 x dp 2, sliced": (
        4, ["parallel.engine=fsdp", "parallel.tp_size=2", "parallel.sequence_parallel=true"]
    ),
    **{f"zero{stage} dp 2": (2, [*ZERO, f"parallel.zero_stage={stage}"]) for stage in range(4)},
    "zero1 tp 2": (2, [*ZERO, "parallel.zero_stage=1", "parallel.tp_size=2"]),
    "zero3 tp 2 x dp 2": (4, [*ZERO, "parallel.zero_stage=3", "parallel.tp_size=2"]),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10, help="how many are tortured (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the interruptions and layouts (0)")
    parser.add_argument("--json", metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    if args.runs < 1:
        parser.error(f"--runs {args.runs} must be at least 1")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        chamber = Chamber(Path(folder))
        results = [chamber.torture(number, random.Random(f"{args.seed} {number}")) for number in range(args.runs)]
    told = {
        "runs": args.runs,
        "equal": sum(result["equal"] for result in results),
        "lost": sum(result["lost"] for result in results),
        "repeated": sum(result["repeated"] for result in results),
        "interruptions": sum(len(result["interruptions"]) for result in results),
        "seconds": time.monotonic() - start,
    }
    print(
        f"{told['equal']} of {args.runs} equal, {told['lost']} samples lost, {told['repeated']} repeated; "
        f"{told['interruptions']} interruptions, {told['seconds']:.0f} s"
    )
    if args.json:
        Path(args.json).write_text(json.dumps({**told, "each": results}, indent=1) + "\n")
    return 0 if (told["equal"], told["lost"], told["repeated"]) == (args.runs, 0, 0) else 1


class Chamber:
    """Runs in a folder, and uninterrupted ones to compare with."""

    def __init__(self, folder: Path) -> None:
        from conftest import TEXT
        from runs import ByHand

        self.folder = folder
        self.corpus = folder / "text.txt"
        self.corpus.write_text("".join(TEXT.format(number) + "\n" for number in range(200)))
        (folder / "said").mkdir()
        self.ranks = ByHand(folder / "said")
        self.expected: dict[str, dict[str, Any]] = {}

    def torture(self, number: int, draw: random.Random) -> dict[str, Any]:
        """One run: interrupted, ended, compared."""
        run = self.folder / f"run-{number}"
        stays = number % 2 == 0
        layout = draw.choice(list(LAYOUTS))
        history, interruptions = [layout], []
        for _ in range(draw.randint(2, 4)):
            interruptions.append(self._interrupted(run, layout, draw))
            layout = layout if stays else draw.choice([name for name in LAYOUTS if name != layout])
            history.append(layout)
        self._end(run, layout)
        reference = self._reference(layout if stays else "plain")
        difference = _difference(_tensors(run), reference)
        lost, repeated = self._samples(run)
        limit = 0.0 if stays else TOLERANCE
        result = {
            "run": number, "equal": difference <= limit, "difference": difference, "limit": limit,
            "lost": lost, "repeated": repeated, "layouts": history, "interruptions": interruptions,
        }  # fmt: skip
        way = f"{layout}, {len(history)} attempts" if stays else " > ".join(history)
        verdict = "equal" if result["equal"] else "NOT EQUAL"
        print(f"run {number}: {verdict} ({difference:.0e}), {', '.join(interruptions)}: {way}", flush=True)
        shutil.rmtree(run)
        return result

    def _reference(self, layout: str) -> dict[str, Any]:
        if layout not in self.expected:
            run = self.folder / "peace" / layout.replace(" ", "-")
            self._end(run, layout)
            self.expected[layout] = _tensors(run)
        return self.expected[layout]

    def _begin(self, run: Path, layout: str) -> None:
        from runs import arguments

        world_size, options = LAYOUTS[layout]
        given = arguments(
            run, self.corpus, "train.precision=float64", f"train.num_steps={STEPS}", f"checkpoint.every={EVERY}",
            "evaluate.every=999", "parallel.timeout_minutes=1", "parallel.start_minutes=2", *options,
        )  # fmt: skip
        self.ranks.begin(world_size, given)

    def _end(self, run: Path, layout: str) -> None:
        self._begin(run, layout)
        ended = self.ranks.ended(SECONDS)
        if any(rank.code for rank in ended):
            raise SystemExit(f"{layout} did not come to its end: {ended}")

    def _interrupted(self, run: Path, layout: str, draw: random.Random) -> str:
        """One attempt and how it was ended; one that finishes before the blow is a finished run, which is fine."""
        from runs import last_step

        at = last_step(run) + draw.randint(1, 6)
        how = draw.choice(["kill", "kill", "kill while saving", "SIGTERM", "SIGUSR1"])
        self._begin(run, layout)
        victim = draw.choice(self.ranks.processes)
        deadline = time.monotonic() + SECONDS
        while any(process.is_alive() for process in self.ranks.processes):
            if time.monotonic() > deadline:
                raise SystemExit(f"{layout}: an attempt hangs: {[p.exitcode for p in self.ranks.processes]}")
            if how == "kill while saving":
                if last_step(run) >= at - 3 and any((run / "checkpoints").glob("step-*.tmp")):
                    self._blow(self.ranks.processes, signal.SIGKILL)
                    break
            elif last_step(run) >= at:
                number = signal.SIGKILL if how == "kill" else signal.Signals[how]
                self._blow([victim], number)
                break
            time.sleep(0.001)
        self.ranks.ended(SECONDS)
        return f"{how} at {last_step(run)}"

    def _blow(self, processes: list[Any], number: signal.Signals) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _samples(self, run: Path) -> tuple[int, int]:
        """Lost and repeated samples, by the rows of the steps that the final weights have seen."""
        from runs import rows

        from mdlm_scale import config
        from mdlm_scale.data import source, tokenizer
        from mdlm_scale.data.order import sample_ids

        settings = config.load(run / "config.yaml")
        texts = tokenizer.load(settings.tokenizer)
        index = source.load(settings.data.train, "train", settings.data, texts, source.open_cache(settings.data)).index
        batch = settings.batch.global_batch_size

        def ids(step: int) -> list[int]:
            return sample_ids(settings.run.seed, step, range(batch), batch, index).tolist()

        seen = Counter(i for row in rows(run, "train") for i in ids(row["step"] - 1))
        expected = Counter(i for step in range(STEPS) for i in ids(step))
        return (expected - seen).total(), (seen - expected).total()


def _tensors(run: Path) -> dict[str, Any]:
    from runs import tensors

    from mdlm_scale.run import checkpoint

    path = checkpoint.newest(run)
    assert path is not None
    assert checkpoint.read_manifest(path)["state"]["updates"] == STEPS
    return tensors(path)


def _difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """The largest of any element of any tensor, relative to its tensor's largest."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[key] - value).abs().max() / value.abs().max()) for key, value in theirs.items())


if __name__ == "__main__":
    sys.exit(main())
