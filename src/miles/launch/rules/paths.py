"""Checks of paths and URLs in a config: prompt files, checkpoints, servers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from miles.core.errors import DataError, MilesError, UsageError
from miles.models.resolve import ModelImpl, resolve_spec
from miles.models.spec import DecoderSpec
from miles.rollout.data.paths import DataEntry, count_rows, parse_entry, read_rows, resolve_files
from miles.rollout.data.schema import Columns, raise_bad_row
from miles.rollout.data.task_suites import count_suite_rows, find_suite_problem, is_suite

_FIRST_ROWS = 8


def collect_problems(check: Callable[[Any], object], value: Any) -> Iterator[str]:
    """The problems that ``check`` raises."""
    try:
        check(value)
    except UsageError as error:
        yield from error.problems


def check_prompt_data(flag: str, word: str) -> Iterator[str]:
    """Why ``word``, given under ``flag``, cannot be read as prompts."""
    try:
        path = parse_entry(word).path
        if not is_suite(path):
            resolve_files(path)
        elif problem := find_suite_problem(path):
            yield f"{flag} {problem}"
    except UsageError as error:
        yield from error.problems
    except DataError as error:
        yield f"{flag} {error}"


def check_first_rows(word: str, columns: Columns, *, skip_bad_rows: bool) -> Iterator[str]:
    """Why the first rows of a data entry do not have ``columns``; nothing where its files cannot be found."""
    try:
        entry = parse_entry(word)
        if is_suite(entry.path):
            return
        resolve_files(entry.path)
    except (UsageError, DataError):
        return  # another rule reports it
    path = word if entry.weight is None else word.rpartition("*")[0]
    try:
        for row in islice(read_rows(path, columns, _ignore_bad_row if skip_bad_rows else raise_bad_row), _FIRST_ROWS):
            missing = [(key, flag) for key, flag in columns.required_columns if key not in row.columns]
            if missing and not skip_bad_rows:
                key, flag = missing[0]
                yield str(columns.missing_column(row.where, key, flag, row.found))
                return
    except DataError as error:
        yield str(error)


def _ignore_bad_row(error: DataError) -> None:
    """Bad rows are skipped and counted when the data is read."""


def check_url(flag: str, url: str, token_flag: str) -> Iterator[str]:
    """Why ``url``, given under ``flag``, is not valid; its secret belongs under ``token_flag``."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        parts, valid = None, False
    if parts is None or not valid:
        yield f"{flag} {url} is not a URL: write http://host:port/path."
    elif parts.username is not None or parts.password is not None:
        yield f"{flag} contains a password: put it in an environment variable and name that with {token_flag}."


def find_checkpoint_problem(folder: Path) -> str | None:
    """The end of a sentence that starts with the folder, or None when it is a checkpoint."""
    if not folder.exists():
        return "does not exist; name the folder of a Hugging Face checkpoint, or hf://ORG/NAME."
    if not folder.is_dir():
        return "is a file; name the folder it is in."
    if (folder / "config.json").is_file():
        return None
    if (newest := find_newest_checkpoint(folder)) is not None:
        return f"is a run, not a checkpoint; its newest one is {newest}."
    names = sorted(f.name for f in folder.iterdir())
    content = f"only {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}" if names else "nothing"
    return f"has no config.json, {content}; name the folder of a Hugging Face checkpoint."


def read_spec_or_none(folder: str | None, impl: ModelImpl = "auto") -> DecoderSpec | None:
    """The spec of the model in ``folder``, None where it cannot be read."""
    try:
        return None if folder is None else resolve_spec(folder, impl)
    except MilesError:
        return None


def count_prompts(words: Sequence[str]) -> int:
    """How many rows the data entries have together, after slicing; 0 where one cannot be read."""
    try:
        return sum(_count_rows(parse_entry(word)) for word in words)
    except (UsageError, DataError, OSError):
        return 0


def _count_rows(entry: DataEntry) -> int:
    rows = count_suite_rows(entry.path) if is_suite(entry.path) else count_rows(entry.path)
    return len(range(rows)[entry.rows])


def find_newest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint of a run directory; None when ``folder`` is not one, or has none."""
    found = [config.parent for config in folder.glob("checkpoints/step-*/config.json")]
    steps = {int(number): path for path in found if (number := path.name.removeprefix("step-")).isdecimal()}
    return steps[max(steps)] if steps else None


def read_key_file(flag: str, file: str) -> str:
    """The API key in a file; UsageError names the ``flag``. A command line is visible to others."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{flag} {file} cannot be read: {reason}.") from None
    if not key or not key.isprintable():
        raise UsageError(f"{flag} {file} has no key; write one on its only line.")
    return key
