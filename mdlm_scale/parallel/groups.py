"""Which rank this process is, and what ranks tell each other: sums and agreement.

Launchers differ in how they say the rank: torchrun and deepspeed by RANK, WORLD_SIZE and LOCAL_RANK, srun by SLURM_*.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mdlm_scale.errors import ConfigError

_LAUNCHERS = (("RANK", "WORLD_SIZE", "LOCAL_RANK"), ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1
    local_rank: int = 0


def world(environment: Mapping[str, str] = os.environ) -> World:
    """This process among those that a launcher started; one process if none did."""
    for names in _LAUNCHERS:
        given = [name for name in names if name in environment]
        if len(given) == len(names):
            values = [environment[name] for name in names]
            if not all(value.isdecimal() for value in values) or not int(values[0]) < int(values[1]):
                raise ConfigError(f"{', '.join(names)} are {', '.join(values)}: no rank below a number of processes.")
            rank, size, local_rank = map(int, values)
            return World(rank, size, local_rank)
        if given and names[0] == "RANK":  # a shell inside a Slurm job has some of Slurm's, and that is no launcher
            missing = [name for name in names if name not in given]
            raise ConfigError(
                f"The launcher set {', '.join(given)} but not {', '.join(missing)}; it must set all three."
            )
    return World()


class Groups:
    """Collectives of the ranks of a run. With one rank, each is the identity."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value added up over the data-parallel ranks."""
        return list(values)

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; all ranks get the same answer."""
        return flag
