"""The shipped scripts on real Slurm: whatever ends a job, it goes on by itself, to the weights it would have had.

Two nodes of two ranks each, a third in reserve. On the same number of ranks weights are equal bit for bit; on another
one float64 sums differ in their order (1e-11, the parity suite's limit for parameters).
"""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TEXT
from jobs import TINY, Job, kill_rank, submit
from lab import Lab, missing, said, wait_for
from runs import assert_close, rows, tensors

from mdlm_scale import evaluate

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Submit = Callable[..., Job]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Lab]:
    if reason := missing():
        pytest.skip(f"no Slurm cluster can be made here: {reason}")
    with Lab() as made:
        yield made


@pytest.fixture(scope="session")
def tiny(corpus: Path) -> Path:
    path = corpus.with_name("tiny.yaml")
    path.write_text(TINY.format(corpus=corpus))
    return path


@pytest.fixture
def train(cluster: Lab, tiny: Path, tmp_path: Path) -> Iterator[Submit]:
    """`train("section.key=value", ..., sbatch=[...])`; what a test leaves behind on the cluster goes when it ends."""

    def submitted(*overrides: str, sbatch: tuple[str, ...] = (), arguments: tuple[str, ...] = ()) -> Job:
        run, log = tmp_path / "run", tmp_path / "job.out"
        options = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=2", f"--output={log}", *sbatch]
        given = ["slurm/train_owt.sh", "--config", str(tiny), *arguments, f"run.dir={run}", *overrides]
        return Job(submit(given, options), run, log)

    yield submitted
    said("scancel", "-u", "root")
    for node in cluster.nodes:
        cluster.heal(node)
        if not cluster.pids(node):
            cluster.start(node)
        subprocess.run(["scontrol", "update", f"NodeName={node}", "State=RESUME"], capture_output=True)  # if drained
    wait_for("the nodes", lambda: cluster.states() == ["idle"] * cluster.num_nodes, 60.0)
    for left in ROOT.glob("slurm-mdlm-*.starts"):
        left.unlink()


@pytest.fixture(scope="session")
def uninterrupted(cluster: Lab, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that the others are held to: 2 x 2 ranks, 120 steps, and on to 600."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run, log = folder / "run", folder / "job.out"
    options = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=2", f"--output={log}"]
    given = ["slurm/train_owt.sh", "--config", str(tiny), f"run.dir={run}", "train.num_steps=600"]
    job = Job(submit(given, options), run, log)
    text = job.ended("COMPLETED")
    assert job.starts() == 1
    assert "2 x 2 ranks on n[1-2]" in text
    assert f"writes  {run}, from the beginning of 600 steps" in text
    assert f"tail -f {log}" in text
    assert f"scancel {job.number}" in text
    assert re.search(r"first step done \d+\.\d s after the start", text)
    return run


def assert_as_uninterrupted(job: Job, uninterrupted: Path, starts: int = 2) -> None:
    """Finished in so many starts, with every weight, moment and average as it would have been."""
    assert job.starts() == starts
    (last,) = [row["step"] for row in rows(job.run, "eval")][-1:]
    ours, theirs = job.weights(), tensors(uninterrupted / "checkpoints" / f"step-{last:06d}")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


def test_uninterrupted(uninterrupted: Path) -> None:
    assert (uninterrupted / "done").exists()


def test_signal_saves_and_requeues(train: Submit, uninterrupted: Path) -> None:
    job = train()
    job.at_step(20)
    said("scancel", "--batch", "--signal=USR1", job.number)
    text = job.ended("COMPLETED")
    assert re.search(r"stopped at step \d+ of 120, saved \d+\.\d s after SIGUSR1", text)
    assert re.search(r"srun ended with 85 at step-\d+ of 120, \d+ s after the signal", text)
    assert_as_uninterrupted(job, uninterrupted)


def test_preemption(train: Submit, uninterrupted: Path) -> None:
    """Tasks that leave during the grace time would leave the job completed."""
    job = train("train.num_steps=300")  # some seconds may pass before Slurm looks for whom to preempt
    job.at_step(20)
    other = submit(["--wrap", "sleep 2"], ["-p", "high", "-N", "3", "--exclusive", "--output=/dev/null"])
    text = job.ended("COMPLETED")
    assert "saved" in text
    assert re.search(r"after SIG(TERM|USR1)", text)
    assert "JobState=COMPLETED" in said("scontrol", "show", "job", other)
    assert_as_uninterrupted(job, uninterrupted)


@pytest.mark.parametrize("node", ["n1", "n2"], ids=["first node", "other node"])
def test_node_back_early(cluster: Lab, train: Submit, uninterrupted: Path, node: str) -> None:
    """A node reboots before the controller finds it missing. The first has rank 0 and the script itself."""
    job = train()
    job.at_step(60)
    cluster.kill(node)
    time.sleep(1.0)
    cluster.start(node)
    job.ended("COMPLETED")
    assert_as_uninterrupted(job, uninterrupted)


def test_node_back_late(cluster: Lab, train: Submit, uninterrupted: Path) -> None:
    """It is found missing; the job goes on with the node in reserve."""
    job = train()
    job.at_step(60)
    cluster.kill("n2")
    job.at_start(2)
    cluster.start("n2")
    text = job.ended("COMPLETED")
    assert "ranks on n[1,3]" in text
    assert_as_uninterrupted(job, uninterrupted)


def test_rank_killed(cluster: Lab, train: Submit, uninterrupted: Path) -> None:
    job = train()
    job.at_step(60)
    kill_rank(cluster, "n2")
    text = job.ended("COMPLETED")
    assert "a rank is gone without a word" in text
    assert_as_uninterrupted(job, uninterrupted)


def test_link_cut(cluster: Lab, train: Submit, uninterrupted: Path) -> None:
    """The ranks behind it live on until it is mended; what replaced them goes on meanwhile."""
    job = train()
    job.at_step(60)
    cluster.cut("n2")
    mended = threading.Timer(40.0, cluster.heal, ["n2"])
    mended.start()
    job.ended("COMPLETED")
    mended.join()
    assert_as_uninterrupted(job, uninterrupted)


def test_link_of_the_first_node_cut(cluster: Lab, train: Submit, uninterrupted: Path) -> None:
    """The script itself is behind it: when it is mended, it leaves the start that replaced it alone. Its srun may not,
    which ends ranks by the number of their step: the new script starts them again."""
    job = train("train.num_steps=600")
    job.at_step(60)
    cluster.cut("n1")
    job.at_start(2)
    cluster.heal("n1")
    text = job.ended("COMPLETED")
    assert "2 x 2 ranks on n[2-3]" in text
    assert job.starts() in (2, 3)
    assert_as_uninterrupted(job, uninterrupted, job.starts())


def test_time_limit_without_warning(train: Submit) -> None:
    """Slurm itself stops it then, and would not start it again."""
    job = train("train.num_steps=100000", sbatch=("--time=1", "--signal=B:CONT@5"))
    wait_for("the limit", lambda: job.starts() == 2, 150.0)
    assert "to be started again" in job.log.read_text()


def test_time_limit(train: Submit, uninterrupted: Path) -> None:
    """Slurm counts the limit in minutes, and looks at it every half one. Evaluations make the run last until then."""
    slow = ("train.num_steps=600", "evaluate.every=1", "evaluate.rows=64")
    job = train(*slow, sbatch=("--time=1", "--signal=B:USR1@5"))
    wait_for("the limit", lambda: job.starts() == 2, 120.0)
    said("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    text = job.ended("COMPLETED", 600.0)
    assert "USR1: stopping" in text
    assert_as_uninterrupted(job, uninterrupted)


def test_fewer_nodes(cluster: Lab, train: Submit, uninterrupted: Path) -> None:
    """Asked for one to two nodes, started again when only one is left. So few steps that rounding has not grown yet."""
    job = train("train.num_steps=60", sbatch=("--nodes=1-2",))
    job.at_step(20)
    for node in ("n2", "n3"):
        said("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    said("scancel", "--batch", "--signal=USR1", job.number)
    text = job.ended("COMPLETED")
    assert "2 x 2 ranks on n[1-2]" in text
    assert "1 x 2 ranks on n1" in text
    assert_close(job.weights(), tensors(uninterrupted / "checkpoints" / "step-000060"), 1e-11)


def test_torchrun_and_deepspeed(train: Submit) -> None:
    """torchrun itself would die of the signal, and of TERM within 30 s."""
    options = ["parallel.engine=deepspeed", "train.precision=float32"]
    job = train(*options, arguments=("--torchrun",))
    job.at_step(20)
    said("scancel", "--batch", "--signal=USR1", job.number)
    text = job.ended("COMPLETED")
    assert text.count("saved") >= 1
    assert job.starts() == 2


def test_scancel_is_final(train: Submit) -> None:
    """It saves, and stays stopped."""
    job = train("train.num_steps=100000")
    job.at_step(20)
    said("scancel", job.number)
    text = job.ended("CANCELLED", 60.0)
    # Slurm's TERM to every rank, or what the script makes of its own: the ranks hear of both
    assert re.search(r"stopped at step \d+ of 100000, saved \d+\.\d s after SIG(TERM|USR1)", text)
    wait_for("the script's last word", lambda: "Slurm ends this job" in job.log.read_text(), 30.0)
    assert job.field("JobState") == "CANCELLED"


def test_other_variables_of_slurm(train: Submit) -> None:
    """Of a job from inside of which this one is submitted, or of options that mean other ranks; or none at all."""
    job = train("train.num_steps=20", sbatch=("--export=NONE", "--ntasks=2", "--distribution=cyclic"))
    text = job.ended("COMPLETED", 120.0)
    assert "4 ranks: dp 4, tp 1" in text


def test_inside_an_allocation(cluster: Lab, tiny: Path, tmp_path: Path) -> None:
    """salloc tells less than sbatch, and there is nothing to start again."""
    given = ["--config", str(tiny), f"run.dir={tmp_path}/run"]
    command = ["salloc", "--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=2", "bash", "slurm/train_owt.sh", *given]
    done = subprocess.run([*command, "train.num_steps=20"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 x 2 ranks on n[1-2]" in done.stdout
    assert "4 ranks: dp 4, tp 1" in done.stderr
    failed = subprocess.run([*command, "run.dir=" + str(tmp_path / "other"), "optimizer.lr=1e200"], cwd=ROOT,
                            capture_output=True, text=True, timeout=120)  # fmt: skip
    assert failed.returncode == 85
    assert "no batch job, so it is not started again" in failed.stdout


def test_another_run_is_done_there(train: Submit, uninterrupted: Path) -> None:
    """Its `done` file is not this run's."""
    text = train(f"run.dir={uninterrupted}", "optimizer.lr=0.5").ended("FAILED", 60.0)
    assert f"run.dir={uninterrupted} belongs to another run. Differing: optimizer.lr" in text
    assert "slurm: done" not in text


def test_gpus_that_pytorch_does_not_see(train: Submit) -> None:
    text = train("train.device=auto").ended("FAILED", 60.0)
    assert "Slurm gave this job 2 GPUs a node, but PyTorch" in text


def test_bad_config_fails_at_once(train: Submit) -> None:
    """Before srun, with every fault, and it is not started again."""
    job = train("batch.micro_batch_size=3", "optimizer.lr=-1")
    text = job.ended("FAILED", 60.0)
    assert "2 faults" in text
    assert "srun" not in text
    assert not job.run.exists()
    assert (job.starts(), job.field("ExitCode")) == (1, "2:0")


def test_layout_that_does_not_fit(train: Submit) -> None:
    job = train("parallel.tp_size=3")
    text = job.ended("FAILED", 60.0)
    assert "4 ranks cannot be laid out as tp_size * replicate_size * shards = 3" in text
    assert "not started: 4 ranks, 2 a node" in text


def test_config_that_does_not_exist(train: Submit) -> None:
    text = train(arguments=("--config", "configs/none.yaml")).ended("FAILED", 60.0)
    assert "There is no config file 'configs/none.yaml'" in text


def test_run_directory_that_is_not_shared(train: Submit) -> None:
    """/var/tmp is each node's own."""
    job = train("run.dir=/var/tmp/run")
    text = job.ended("FAILED", 150.0)
    assert "run.dir=/var/tmp/run is not shared: what rank 0 wrote there on n1 is not seen on n2." in text
    assert (job.starts(), job.field("ExitCode")) == (1, "2:0")


def test_crash_without_progress_ends(train: Submit) -> None:
    """Not forever: three starts from the same checkpoint are enough."""
    job = train("optimizer.lr=1e200", "optimizer.warmup_steps=0")  # not a number, after a single step
    text = job.ended("FAILED")
    assert "gives up: 3 starts from the beginning brought no new checkpoint, 3 of them crashed" in text
    assert job.starts() == 4


def test_submitted_from_another_folder(cluster: Lab, tmp_path: Path) -> None:
    log = tmp_path / "job.out"
    command = ["sbatch", "--parsable", "--gpus-per-node=2", "--cpus-per-gpu=2", f"--output={log}"]
    asked = subprocess.run([*command, ROOT / "slurm/train_owt.sh"], cwd=tmp_path, capture_output=True, text=True)
    text = Job(asked.stdout.strip(), tmp_path / "run", log).ended("FAILED", 60.0)
    assert f"submitted from {tmp_path}, which is not the repository of mdlm_scale" in text


def test_prepare(cluster: Lab, tmp_path: Path) -> None:
    """Options behind the script's name take the place of its own."""
    log, output = tmp_path / "job.out", tmp_path / "data"
    given = ["slurm/prepare_owt.sh", "--recipe", "python", "--output", str(output)]
    job = Job(submit(given, ["--cpus-per-task=2", f"--output={log}"]), tmp_path, log)
    text = job.ended("COMPLETED", 120.0)
    assert f"writes  {output}\n  watch   tail -f {log}\n  stop    scancel {job.number}" in text
    assert (output / "train" / "manifest.json").exists()


def test_preparing_without_memory_fails(cluster: Lab, tmp_path: Path) -> None:
    """Whatever is killed for it would be killed again."""
    log, text = tmp_path / "job.out", tmp_path / "train.txt"
    text.write_text("".join(f"{TEXT.format(number)}\n" for number in range(300_000)))
    given = ["slurm/prepare_owt.sh", "--input", str(text), "--output", str(tmp_path / "data"), "--tokenizer", "bytes"]
    job = Job(submit(given, ["--cpus-per-task=2", f"--output={log}"]), tmp_path, log)
    wait_for("its first rows", lambda: any(tmp_path.glob("data/*.tmp")), 60.0)
    kill_rank(cluster, "n1", b"tools/prepare_data.py")
    job.ended("FAILED", 60.0)
    assert (job.starts(), job.field("ExitCode")) == (1, "137:0")


def test_preparing_goes_on_after_preemption(cluster: Lab, tmp_path: Path) -> None:
    """Text for some seconds; it begins anew and ends."""
    log, output, text = tmp_path / "job.out", tmp_path / "data", tmp_path / "train.txt"
    text.write_text("".join(f"{TEXT.format(number)}\n" for number in range(300_000)))
    given = ["slurm/prepare_owt.sh", "--input", str(text), "--output", str(output), "--validation-documents", "9"]
    given += ["--tokenizer", "bytes", "--length", "128"]
    job = Job(submit(given, ["--cpus-per-task=2", f"--output={log}"]), tmp_path, log)
    wait_for("its first rows", lambda: any(tmp_path.glob("data/*.tmp")), 60.0)
    submit(["--wrap", "sleep 1"], ["-p", "high", "-N", "3", "--exclusive", "--output=/dev/null"])
    said_so = job.ended("COMPLETED", 180.0)
    assert "interrupted: nothing half-written is left" in said_so
    assert (job.starts(), (output / "train" / "manifest.json").exists()) == (2, True)


def test_evaluate(cluster: Lab, corpus: Path, uninterrupted: Path, tmp_path: Path) -> None:
    """Four ranks under srun find what one process finds."""
    log, (ours, theirs) = tmp_path / "job.out", (tmp_path / name for name in ("ours.json", "theirs.json"))
    given = ["--checkpoint", str(uninterrupted), "--data", str(corpus), "--rows", "64", "--precision", "float64"]
    options = ["--nodes=2", "--gpus-per-node=2", "--cpus-per-gpu=2", f"--output={log}"]
    job = Job(submit(["slurm/evaluate.sh", *given, "--json", str(ours)], options), tmp_path, log)
    assert evaluate.main([*given, "--json", str(theirs)]) == 0
    text = job.ended("COMPLETED", 120.0)
    assert "2 x 2 ranks on n[1-2]" in text
    assert f"writes  {ours}\n  watch   tail -f {log}\n  stop    scancel {job.number}" in text
    found, expected = (json.loads(path.read_text())["nelbo"] for path in (ours, theirs))
    assert found == pytest.approx(expected, rel=1e-12)


def test_checked_before_submitting(cluster: Lab, tiny: Path, tmp_path: Path) -> None:
    """`bash` in place of `sbatch`, with the same options and overrides."""
    given = ["-N", "2", "--gpus-per-node=2", "--cpus-per-gpu=2", "--hold", f"--output={tmp_path}/job.out"]
    given += ["--config", str(tiny), f"run.dir={tmp_path}/run"]
    called = ["bash", "slurm/train_owt.sh", *given]
    asked = subprocess.run(called, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"fits: 2 nodes x 2 GPUs, writes to {tmp_path}/run" in asked.stdout
    job = Job(asked.stdout.split()[-1], tmp_path / "run", tmp_path / "job.out")
    assert (job.field("JobState"), job.field("NumNodes"), job.field("JobName")) == ("PENDING", "2-2", "mdlm-owt")
    said("scancel", job.number)
