"""Which rank this is, as each launcher says it."""

import pytest

from mdlm_scale.errors import ConfigError
from mdlm_scale.parallel.groups import Groups, World, world

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {"SLURM_PROCID": "3", "SLURM_NTASKS": "6", "SLURM_LOCALID": "2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, World(rank=5, size=8, local_rank=1)),
        (SLURM, World(rank=3, size=6, local_rank=2)),
        (SLURM | TORCHRUN, World(rank=5, size=8, local_rank=1)),  # torchrun inside a Slurm job
        ({}, World(rank=0, size=1, local_rank=0)),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, World()),  # a job's shell, not started by srun
    ],
    ids=["torchrun", "slurm", "torchrun in slurm", "alone", "shell of a slurm job"],
)
def test_rank_comes_from_the_launcher(environment: dict[str, str], expected: World) -> None:
    assert world(environment) == expected


@pytest.mark.parametrize("name", TORCHRUN)
def test_incomplete_launcher_names_what_is_missing(name: str) -> None:
    with pytest.raises(ConfigError, match=f"but not {name}; it must set all three"):
        world({key: value for key, value in TORCHRUN.items() if key != name})


@pytest.mark.parametrize("rank", ["8", "-1", "first"])
def test_rank_must_be_below_the_number_of_processes(rank: str) -> None:
    with pytest.raises(ConfigError, match="no rank below a number of processes"):
        world(TORCHRUN | {"RANK": rank})


def test_sum_over_one_rank_is_the_value() -> None:
    assert Groups().sum([1.5, 2.0]) == [1.5, 2.0]


@pytest.mark.parametrize("flag", [True, False])
def test_any_of_one_rank_is_its_flag(flag: bool) -> None:
    assert Groups().any(flag) is flag
