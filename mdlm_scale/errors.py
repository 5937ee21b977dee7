"""What a user may see go wrong: each error is one message (what is, what must be, what to do) and an exit code."""

from collections.abc import Iterable

EXIT_FAILURE = 1
EXIT_USER_MISTAKE = 2
EXIT_RUN_AGAIN = 85  # saved, unfinished: start me again with the same command


class UserError(Exception):
    """A fault that is told without a traceback; its message is the whole story."""

    exit_code = EXIT_USER_MISTAKE

    def __init__(self, *faults: str) -> None:
        super().__init__(*faults)
        self.faults = faults  # each a sentence of its own

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return self.faults[0]
        return f"{len(self.faults)} faults:\n" + "\n".join(f"  - {fault}" for fault in self.faults)


class ConfigError(UserError):
    """The configuration, or the way it was called, is wrong."""


class DataError(UserError):
    """The text, the tokens or the tokenizer are wrong."""


class FetchError(DataError):
    """Data that was there cannot be had now: a failure and not a mistake, so that a script may try again."""

    exit_code = EXIT_FAILURE


class CheckpointError(UserError):
    """A checkpoint or a run directory cannot be used."""


class TrainingError(UserError):
    """The run itself went wrong: nothing the user typed, so a failure and not a mistake."""

    exit_code = EXIT_FAILURE


class PeerError(UserError):
    """Another rank failed, and so this one ends, with that one's message and exit code."""

    def __init__(self, rank: int, message: str, exit_code: int) -> None:
        super().__init__(f"ended by the failure of rank {rank}: {message}")
        self.rank, self.message, self.exit_code = rank, message, exit_code


def raise_if_any(faults: Iterable[str], error: type[UserError] = ConfigError) -> None:
    """Raise one `error` that lists every fault, or return if there is none."""
    if found := list(faults):
        raise error(*found)
