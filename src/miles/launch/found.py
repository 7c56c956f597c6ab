"""What lies where a config points: prompt files, checkpoints, servers, and why a path or an address is not one."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles.core.errors import DataError, MilesError, UsageError
from miles.models.choice import ModelImpl, chosen_spec
from miles.models.spec import DecoderSpec
from miles.rollout.files import Entry, count_rows, entry_of, files_of
from miles.rollout.generated import is_generated, task_of, why_not


def told(check: Callable[[Any], object], value: Any) -> Iterator[str]:
    """What ``check`` complains of, instead of it being raised."""
    try:
        check(value)
    except UsageError as error:
        yield from error.problems


def why_not_data(flag: str, word: str) -> Iterator[str]:
    """What keeps ``word`` from being prompts to read, named under ``flag``."""
    try:
        path = entry_of(word).path
        if not is_generated(path):
            files_of(path)
        elif found := why_not(path):
            yield f"{flag} {found}"
    except UsageError as error:
        yield from error.problems
    except DataError as error:
        yield f"{flag} {error}"


def why_not_an_address(flag: str, url: str, token: str) -> Iterator[str]:
    """What keeps ``url``, given under ``flag``, from being one to ask; ``token`` is where its secret belongs."""
    try:
        parts = urlsplit(url)
        whole = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        parts, whole = None, False
    if parts is None or not whole:
        yield f"{flag} {url} is not an address: write http://host:port/path."
    elif parts.username is not None or parts.password is not None:
        yield f"{flag} holds a password for all to see: put it in an environment variable and name that by {token}."


def why_not_a_checkpoint(folder: Path) -> str | None:
    """The end of a sentence that starts with the folder, or None when it is a checkpoint."""
    if not folder.exists():
        return "does not exist; name the local folder of a Hugging Face checkpoint."
    if not folder.is_dir():
        return "is a file; name the folder it is in."
    if (folder / "config.json").is_file():
        return None
    if (newest := newest_checkpoint(folder)) is not None:
        return f"is a run, not a checkpoint; its newest one is {newest}."
    there = sorted(f.name for f in folder.iterdir())
    found = f"only {', '.join(there[:6])}{', ...' if len(there) > 6 else ''}" if there else "nothing"
    return f"has no config.json, {found}; name the folder of a Hugging Face checkpoint."


def spec_or_none(folder: str | None, impl: ModelImpl = "auto") -> DecoderSpec | None:
    """The spec of the model in ``folder`` for whom ``--model-impl`` names, where there is one that can be read."""
    try:
        return None if folder is None else chosen_spec(folder, impl)
    except MilesError:
        return None


def prompts_in(words: Sequence[str]) -> int:
    """How many rows the entries of data hold together, slices counted as such; 0 where one cannot be read."""
    try:
        return sum(_rows_of(entry_of(word)) for word in words)
    except (UsageError, DataError, OSError):
        return 0


def _rows_of(entry: Entry) -> int:
    rows = task_of(entry.path).size if is_generated(entry.path) else count_rows(entry.path)
    return len(range(rows)[entry.rows])


def newest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint of a run directory; None when ``folder`` is not one, or has none."""
    found = [config.parent for config in folder.glob("checkpoints/step-*/config.json")]
    return max(found, key=lambda checkpoint: int(checkpoint.name.removeprefix("step-")), default=None)
