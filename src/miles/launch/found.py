"""What lies on disk where a config points: prompt files, checkpoints, and why a path is not one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from miles.core.errors import MilesError, UsageError
from miles.models.choice import ModelImpl, chosen_spec
from miles.models.spec import DecoderSpec
from miles.rollout.files import split_slice


def told(check: Callable[[Any], object], value: Any) -> Iterator[str]:
    """What ``check`` complains of, instead of it being raised."""
    try:
        check(value)
    except UsageError as error:
        yield from error.problems


def why_not_data(flag: str, path: str) -> Iterator[str]:
    """What keeps ``path`` from being a prompt file, named under ``flag``."""
    problems = list(told(split_slice, path))
    yield from problems
    if problems:
        return
    file = Path(split_slice(path)[0])
    if file.suffix not in (".jsonl", ".parquet"):
        yield f"{flag} {file} is not a .jsonl or .parquet file."
    elif not file.is_file():
        yield f"{flag} {file} does not exist{_neighbours(file)}."


def _neighbours(file: Path) -> str:
    """What lies where a missing file was looked for."""
    if not file.parent.is_dir():
        return f", nor does the folder {file.parent}"
    there = sorted(f.name for f in file.parent.iterdir() if f.suffix in (".jsonl", ".parquet"))
    return f"; {file.parent} holds {', '.join(there[:5])}{', ...' if len(there) > 5 else ''}" if there else ""


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


def prompts_in(path: str) -> int:
    """How many rows a prompt file, or a slice of it, holds; 0 where it cannot be read."""
    try:
        name, part = split_slice(path)
        return len(range(_parquet_rows(name) if name.endswith(".parquet") else _lines(name))[part])
    except (UsageError, OSError):
        return 0


def _lines(name: str) -> int:
    with Path(name).open("rb") as stream:
        return sum(1 for line in stream if line.strip())


def _parquet_rows(name: str) -> int:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(name).metadata.num_rows
    except ArrowException:
        return 0


def newest_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint of a run directory; None when ``folder`` is not one, or has none."""
    found = [config.parent for config in folder.glob("checkpoints/step-*/config.json")]
    return max(found, key=lambda checkpoint: int(checkpoint.name.removeprefix("step-")), default=None)
