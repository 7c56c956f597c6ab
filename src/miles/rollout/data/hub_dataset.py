"""Datasets of the Hugging Face hub: which files hold a split, found in the cache or downloaded.

A split is what the ``configs`` of the dataset's README say, else the files that have its name. Where none of them can
be read (CSV, scripts), the hub's own Parquet copy of the dataset is used: the branch ``refs/convert/parquet``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from miles.cluster.hub_client import HubError, download, find_cached, list_files, list_known_files
from miles.core.errors import DataError
from miles.core.hub_names import DEFAULT_SPLIT, HubName

SUFFIXES = (".jsonl", ".parquet", ".arrow")
PARQUET_BRANCH = "refs/convert/parquet"
_README = "README.md"
# The config of a name without one, where several have no other mark.
_DEFAULT_CONFIGS = ("default", "main")
_SHARD = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})(?P<rest>\.\w+)")


def find_files(name: HubName) -> tuple[Path, ...]:
    """The files of a split in the cache, in reading order; DataError if they are not all there."""
    snapshot = find_cached(name, (_README,))
    if snapshot is not None:
        chosen = select_files(name, list_known_files(snapshot), _read_configs(snapshot.folder / _README))
        files = tuple(snapshot.folder / file for file in chosen)
        if files and all(file.is_file() for file in files) and not _is_shard_missing(chosen):
            return files
    raise DataError(f"{name} is not, or not whole, in the cache of the hub; run miles plan with it, or hf download.")


def fetch_dataset(name: HubName) -> HubName:
    """Download the files of a split unless they are in the cache; returns the name with its revision and config."""
    try:
        return replace(name, revision=_find_revision(name))
    except DataError:
        pass
    files = list_files(name)
    configs = _read_configs(download(name, (_README,)).folder / _README) if _README in files else ()
    chosen = select_files(name, files, configs)
    if chosen:
        return download(replace(name, revision=name.revision or "main"), (_README, *chosen)).name
    if name.revision is None and name.files is None:
        return _fetch_converted(name, files)
    raise _describe_missing(name, files)


def _find_revision(name: HubName) -> str:
    """The revision that a name without one has in the cache: its own, or that of the Parquet copy."""
    names = [name] if name.revision else [name, replace(name, revision=PARQUET_BRANCH)]
    for candidate in names:
        snapshot = find_cached(candidate, (_README,))
        if snapshot is not None:
            try:
                find_files(snapshot.name)
            except DataError:
                continue
            assert snapshot.name.revision is not None
            return snapshot.name.revision
    raise DataError(f"{name} is not in the cache of the hub.")


def _fetch_converted(name: HubName, files: Sequence[str]) -> HubName:
    converted = replace(name, revision=PARQUET_BRANCH)
    try:
        chosen = select_files(name, list_files(converted), ())
    except HubError:
        chosen = ()
    if not chosen:
        raise _describe_missing(name, files)
    return download(converted, chosen).name


def select_files(name: HubName, files: Sequence[str], configs: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """The files among ``files`` that hold the rows ``name`` asks for.

    >>> select_files(HubName(kind="dataset", repo="a/b", split="test"), ["test-0.parquet", "train-0.parquet"], ())
    ('test-0.parquet',)
    """
    readable = sorted(file for file in files if file.endswith(SUFFIXES))
    if name.files is not None:
        return tuple(f for f in readable if fnmatchcase(f, name.files) or f.startswith(name.files.rstrip("/") + "/"))
    split = name.split or DEFAULT_SPLIT
    patterns = list(_list_patterns(configs, name.subset, split))
    if patterns or configs:
        return tuple(file for file in readable if any(_matches(file, pattern) for pattern in patterns))
    inside = [file for file in readable if name.subset is None or name.subset in Path(file).parts[:-1]]
    named = tuple(file for file in inside if _is_named(file, split))
    if named or split != DEFAULT_SPLIT:
        if len({Path(file).parent for file in named}) < 2:
            return named
        return tuple(file for file in named if any(part in _DEFAULT_CONFIGS for part in Path(file).parts[:-1]))
    others = ("test", "validation", "valid", "dev", "eval")
    return tuple(file for file in inside if not any(_is_named(file, other) for other in others))


def _list_patterns(configs: Sequence[dict[str, Any]], subset: str | None, split: str) -> Iterator[str]:
    """The patterns of a split in the README's configs; without a name, the default config or the only one is used."""
    names = (subset,) if subset else _DEFAULT_CONFIGS
    marked = [entry for entry in configs if entry.get("default") and not subset]
    chosen = marked or [entry for name in names for entry in configs if entry.get("config_name") == name]
    if not chosen and (subset or len(configs) != 1):
        return
    chosen = chosen or list(configs)
    data = chosen[0].get("data_files", ())
    if isinstance(data, dict):
        data = [{"split": key, "path": value} for key, value in data.items()]
    for item in [data] if isinstance(data, str) else data:
        entry = {"split": DEFAULT_SPLIT, "path": item} if isinstance(item, str) else item
        if entry.get("split", DEFAULT_SPLIT) == split:
            paths = entry.get("path", ())
            yield from [paths] if isinstance(paths, str) else paths


def _matches(file: str, pattern: str) -> bool:
    return fnmatchcase(file, pattern) or fnmatchcase(file, pattern.replace("**/", ""))


def _is_named(file: str, split: str) -> bool:
    """Whether a folder or the start, end or middle of the file's name is the split."""
    parts = Path(file).with_suffix("").parts
    return split in parts[:-1] or split in re.split(r"[-_.]", parts[-1])


def _is_shard_missing(files: Sequence[str]) -> bool:
    """Whether files named NAME-00000-of-00005 are fewer than their names say."""
    found = [shard for shard in map(_SHARD.fullmatch, files) if shard is not None]
    counts = {(shard["stem"], shard["count"], shard["rest"]) for shard in found}
    return len(found) < sum(int(count) for _, count, _ in counts)


def _read_configs(readme: Path) -> Sequence[dict[str, Any]]:
    """The ``configs`` of a README's YAML header; none where it has no such header."""
    if not readme.is_file():
        return ()
    text = readme.read_text(encoding="utf-8")
    if not text.startswith("---"):
        return ()
    import yaml

    try:
        header = yaml.safe_load(text[3:].partition("\n---")[0])
    except yaml.YAMLError:
        return ()
    configs = header.get("configs") if isinstance(header, dict) else None
    return [entry for entry in configs if isinstance(entry, dict)] if isinstance(configs, list) else ()


def _describe_missing(name: HubName, files: Sequence[str]) -> DataError:
    readable = [file for file in files if file.endswith(SUFFIXES)]
    shown = ", ".join(readable[:8]) + (", ..." if len(readable) > 8 else "")
    has = f"its files are {shown}" if readable else "it has no .parquet, .jsonl or .arrow file"
    return DataError(
        f"{name} does not name a split of the dataset, or not one of its configs; {has}. Name them as in "
        f"{name.repo}:CONFIG@SPLIT, or as in hf://datasets/{name.repo}/FILE."
    )
