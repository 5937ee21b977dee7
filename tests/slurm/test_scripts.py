"""What the scripts do outside of a job: check, then submit; and say what is wrong. No cluster is needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import DEBUG, ROOT

SCRIPTS = sorted(path.name for path in (ROOT / "slurm").glob("*.sh") if path.name != "common.sh")


def called(script: str, *arguments: str, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
    """`bash slurm/SCRIPT ARGUMENTS` where Slurm has no configuration; the exit code and all that was said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    environment |= {"PYTHON": sys.executable, "SLURM_CONF": "/nonexistent"} | variables
    command = ["bash", str(ROOT / "slurm" / script), *arguments]
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_called_from_another_folder(script: str, tmp_path: Path) -> None:
    code, text = called(script, cwd=tmp_path)
    assert code == 2
    assert f"submitted from {tmp_path}, which is not the repository of mdlm_scale, or not seen on" in text


@pytest.mark.slow  # an sbatch without a cluster takes a minute to say so
def test_what_fits_is_submitted(tmp_path: Path) -> None:
    """Here that fails, as there is no cluster."""
    options = ["-N", "2", "--gpus-per-node", "2", "-A", "project"]
    code, text = called("train_owt.sh", *options, "--config", DEBUG, f"run.dir={tmp_path}/run", "run.seed=3",
                        "batch.micro_batch_size=8")  # fmt: skip
    assert f"fits: 2 nodes x 2 GPUs, writes to {tmp_path}/run" in text
    assert code != 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "ranks"),
    [([], "8 ranks, 8 a node"), (["-N3", "--gpus-per-node=a100:2"], "6 ranks, 2 a node"),
     (["--nodes", "1-4", "--gpus-per-node=1"], "2 ranks, 1 a node")],
)  # fmt: skip
def test_what_does_not_fit_is_not_submitted(options: list[str], ranks: str) -> None:
    """By the script's own #SBATCH lines, by the options, and for every number of nodes that may be given."""
    code, text = called("train_owt.sh", *options, "--config", DEBUG, "batch.micro_batch_size=32")
    if ranks.startswith("2"):
        assert "micro_batch_size * dp_size = 32 * 2 = 64" in text
    assert f"not started: {ranks}, with {DEBUG} batch.micro_batch_size=32: see above" in text
    assert "fits" not in text
    assert code == 2


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["-N", "2,4"], "--nodes=2,4: this check knows N and N-M alone"),
        (["--nodes=4-8:4"], "--nodes=4-8:4: this check knows N and N-M alone"),
        (["--gres=gpu:4"], "this check knows --gpus-per-node alone, not --gres, --gpus and -G"),
        (["-G", "8"], "this check knows --gpus-per-node alone, not --gres, --gpus and -G"),
    ],
)
def test_options_that_cannot_be_checked(options: list[str], fault: str) -> None:
    code, text = called("train_owt.sh", *options, "--config", DEBUG)
    assert code == 2
    assert fault in text
    assert "fits" not in text


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("train_owt.sh", ["--config", DEBUG]), ("prepare_owt.sh", []), ("evaluate.sh", ["--checkpoint", "runs/none"])],
)
def test_job_arrays_are_refused(script: str, arguments: list[str]) -> None:
    code, text = called(script, *arguments, SLURM_JOB_ID="7", SLURM_ARRAY_TASK_ID="1")
    assert code == 2
    assert "the tasks of a job array would all do the same: submit without --array" in text


@pytest.mark.parametrize(
    ("before", "ends"),
    [
        (["step-5"] * 19, False),  # preempted, or its nodes failed
        (["step-5"] * 20, True),
        (["step-5", "step-5 crashed"] * 2, False),
        (["step-5", "step-5 crashed"] * 3, True),
        (["step-4", "step-4 crashed"] * 3, False),
        (["step-50"] * 30, False),
    ],
)
def test_how_often_a_job_starts_from_one_checkpoint(before: list[str], ends: bool, tmp_path: Path) -> None:
    starts = tmp_path / "job.starts"
    starts.write_text("".join(f"{line}\n" for line in before))
    program = f"source slurm/common.sh; newest=step-5 starts={starts}; note_start; echo goes on"
    ended = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ("goes on" in ended.stdout, "gives up" in ended.stderr, ended.returncode) == (not ends, ends, int(ends))


def test_starts_that_cannot_be_counted(tmp_path: Path) -> None:
    program = f"source slurm/common.sh; newest=step-5 starts={tmp_path}/no/job.starts; note_start; echo goes on"
    ended = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "goes on" not in ended.stdout
    assert "without which a job that crashes would start for ever" in ended.stderr


@pytest.mark.parametrize(
    ("variables", "shown", "said", "crashes"),
    [
        # the controller was away when the job began
        ("code=1 restarts=", "JobState=RUNNING Reason=None Restarts=3 BatchFlag=1", "to be started again", 0),
        (
            "code=1 restarts=2",
            "JobState=RUNNING Reason=None Restarts=3 BatchFlag=1",
            "started this job again already",
            0,
        ),
        ("code=85 restarts=3", "JobState=COMPLETING Reason=None Restarts=3 BatchFlag=1", "Slurm ends this job", 0),
        (
            "code=143 restarts=3",
            "JobState=COMPLETING Reason=TimeLimit Restarts=3 BatchFlag=1",
            "to be started again",
            1,
        ),
        ("code=85 restarts=3", "JobState=COMPLETING Reason=TimeLimit Restarts=3 BatchFlag=1", "to be started again", 0),
        ("code=1 restarts=0", "JobState=RUNNING Reason=None Restarts=0 BatchFlag=0", "no batch job", 0),
    ],
)
def test_who_starts_a_job_again(variables: str, shown: str, said: str, crashes: int, tmp_path: Path) -> None:
    """By what the controller says of it; the first request is refused."""
    asked = tmp_path / "asked"
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\n[ "$1" = requeue ] || exec echo {shown}\n[ -e {asked} ] || {{ touch {asked}; exit 1; }}\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    (tmp_path / "starts").touch()
    given = f"{variables} asked= newest=step-5 starts={tmp_path}/starts SLURM_JOB_ID=7"
    program = f"source slurm/common.sh; PATH={tmp_path}:$PATH; sleep() {{ :; }}; {given}; requeue ended"
    ended = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 85, ended.stderr
    assert said in ended.stdout
    assert (tmp_path / "starts").read_text().count("step-5 crashed") == crashes


def test_unknown_argument_inside_a_job() -> None:
    code, text = called("train_owt.sh", "--config")
    assert code != 0
    assert "--config needs a file" in text


def test_no_python() -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHON": "no/such/python"}
    ended = subprocess.run(["bash", "slurm/train_owt.sh"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there is no no/such/python here" in ended.stderr
    assert "bash tools/install.sh" in ended.stderr
