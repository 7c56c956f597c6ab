"""Exceptions whose message is for the user: one sentence that says what is wrong, where, and how to fix it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb


class MilesError(Exception):
    """An error whose message is meant for the user; the command line prints it without a traceback."""


class UsageError(MilesError):
    """Invalid input found before any work: one or more problems, reported together; the process exits with 2."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class CheckpointError(MilesError):
    """A checkpoint that is missing, incomplete, or has unexpected contents."""


class StorageError(MilesError):
    """A file of a run that cannot be written or read: a full disk, a missing permission, a removed directory."""


class DataError(MilesError):
    """A data file that cannot be read; names the file and the line."""


class HookError(MilesError):
    """A user hook that cannot be loaded or does not match its protocol; says which and why."""


class TrajectoryError(HookError):
    """A trajectory that cannot be trained on, such as one whose tokens are not those that were sampled; it fails
    alone."""


class HookRuntimeError(MilesError):
    """A user hook that raised while the run went on; says which, what and where."""


class SyncError(MilesError):
    """A weight update that failed its checks; every engine still serves the previous version."""


class ParityError(MilesError):
    """Engine and trainer log-probs differ by more than the configured limit."""


class ResumeError(MilesError):
    """A run directory that this command cannot resume, and why."""


class EngineError(MilesError):
    """A request the engine cannot serve (too long, empty, unknown token), or an engine that is down."""


class TrainerError(MilesError):
    """A distributed trainer that cannot continue because one of its ranks cannot."""


def describe_error(error: BaseException) -> str:
    """The type and message of an error, whatever its message does.

    >>> describe_error(KeyError("x")), describe_error(SystemExit())
    ("KeyError: 'x'", 'SystemExit')
    """
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its message raises {type(failure).__name__})"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe_os_error(error: OSError) -> str:
    """Return what the operating system refused, for which file if it says so, and the line of code that asked."""
    where = "" if error.filename is None else f" ({error.filename})"
    frames = extract_tb(error.__traceback__)
    origin = f", at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"the operating system refused: {error.strerror or describe_error(error)}{where}{origin}"


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Turn the error of a file operation in ``folder`` into one sentence for the user."""
    try:
        yield
    except OSError as error:
        what = f"a file of {folder}" if error.filename is None else error.filename
        raise StorageError(
            f"{what} cannot be used: {error.strerror or describe_error(error)}; free the disk or restore access, "
            "and the same command resumes the run"
        ) from error


def first_cause(error: BaseException) -> BaseException:
    """Return the first error inside any exception groups that wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
