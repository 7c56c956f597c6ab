"""What a user is told when something is wrong: one sentence, naming what, where and the mend."""

from collections.abc import Sequence


class MilesError(Exception):
    """An error whose message is meant for the user; the command line prints it without a traceback."""


class UsageError(MilesError):
    """Bad input found before any work: one or more sentences, all shown at once; the process exits with 2."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(MilesError):
    """A checkpoint that is missing, incomplete, or does not say what was expected."""


class DataError(MilesError):
    """A prompt file that cannot be read; names the file and the line."""


class PlugError(MilesError):
    """A plug that does not load or does not fit its door; says which and why."""


class SyncError(MilesError):
    """A weight publication that failed its checks; every engine is still on the version before."""


class ParityError(MilesError):
    """Engine and trainer disagree by more than was allowed."""


class ResumeError(MilesError):
    """A run directory that cannot be continued by this command, and why."""


class EngineError(MilesError):
    """A request the engine cannot serve (too long, empty, unknown token), or an engine that is not serving."""


class TrainerError(MilesError):
    """A trainer of several ranks that cannot go on, because one of them cannot."""


def first_cause(error: BaseException) -> BaseException:
    """The error that happened first, out of the groups it may be wrapped in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
