"""Resolve names in a config: models of the hub or of an object store become folders of a cache, datasets are pinned.

A run records names, not folders: ``describe_names`` is the way back, and ``read_pins`` gives a resumed run the
revisions that it was started with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from miles.cluster.hub_client import HubError, fetch_model, name_from_folder
from miles.config.provenance import flatten_values
from miles.config.schema import Dataclass, Option, get_options
from miles.core.errors import DataError, UsageError
from miles.core.hub_names import HubName, parse_hub_name, split_entry
from miles.launch.hub.object_store import stage_checkpoint, url_from_folder

Root = TypeVar("Root", bound=Dataclass)
Pins = Mapping[tuple[str, str], str]
"""Revisions by kind and repository."""

_PINNED_MODEL = re.compile(r'"hf://([\w.-]+(?:/[\w.-]+)?)@([0-9a-f]{40})"')
_PINNED_DATASET = re.compile(
    r'"(?:hf://datasets/)?([\w.-]+/[\w.-]+)(?::[\w.-]+)?(?:@[\w.-]+)?@([0-9a-f]{40})(?:[@/*][^"]*)?"'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingDownload:
    """Files of the hub that a run would download, and how large they are."""

    name: str
    size: int


@dataclass(slots=True)
class NameResolver:
    """Resolves names; collects problems, the options that have one, and what was left out without ``weights``."""

    weights: bool = True
    pins: Pins = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    downloads: dict[str, PendingDownload] = field(default_factory=dict)

    def resolve(self, config: Root) -> Root:
        """The config with its hub names resolved; a name that cannot be is left, with its problem."""
        return _map_names(config, self._resolve_or_note)

    def resolve_model(self, text: str) -> str:
        """The folder of a model; HubError if its name is on the hub and it can be neither found nor downloaded."""
        if "://" in text and not text.startswith("hf://"):
            folder, missing = stage_checkpoint(text, weights=self.weights)
            if missing:
                self.downloads[text] = PendingDownload(name=text, size=missing)
            return str(folder)
        name = parse_hub_name("model", text)
        if name is None:
            return text
        found = fetch_model(self._pin(name), weights=self.weights)
        if found.missing_bytes:
            self.downloads[name.repo] = PendingDownload(name=str(found.name), size=found.missing_bytes)
        return str(found.folder)

    def resolve_dataset(self, text: str) -> str:
        """A data entry with the revision of its dataset, whose files are in the cache afterwards."""
        entry, tail = split_entry(text)
        name = parse_hub_name("dataset", entry)
        if name is None:
            return text
        from miles.rollout.data.hub_dataset import fetch_dataset

        return f"{fetch_dataset(self._pin(name))}{tail}"

    def _pin(self, name: HubName) -> HubName:
        return replace(name, revision=name.revision or self.pins.get((name.kind, name.repo)))

    def _resolve_or_note(self, option: Option, text: str) -> str:
        try:
            return self.resolve_model(text) if option.hub == "model" else self.resolve_dataset(text)
        except (HubError, DataError, UsageError) as error:
            self.problems.append(f"{option.flag} {text}: {error}")
            self.invalid.add(option.name)
            return text


def resolve_model(text: str, *, weights: bool = True) -> str:
    """The folder of a model given on the command line; UsageError if its name on the hub cannot be resolved."""
    try:
        return NameResolver(weights=weights).resolve_model(text)
    except HubError as error:
        raise UsageError(str(error)) from error


def describe_names(config: Root) -> Root:
    """The config with the name and revision, or the URL, of each model whose folder is in a cache."""
    return _map_names(config, lambda _, text: describe_name(text))


def describe_name(folder: str) -> str:
    """The name and revision, or the URL, of a folder of the caches; any other path as it is."""
    name = name_from_folder(folder)
    return url_from_folder(folder) or folder if name is None else str(name)


def read_pins(run: Path) -> dict[tuple[str, str], str]:
    """The revisions of the models and datasets in the config of a run; none where there is no run."""
    try:
        text = (run / "config.toml").read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        return {}
    models = {("model", repo): revision for repo, revision in _PINNED_MODEL.findall(text)}
    return models | {("dataset", repo): revision for repo, revision in _PINNED_DATASET.findall(text)}


def _map_names(config: Root, change: Callable[[Option, str], str]) -> Root:
    """The config with ``change`` applied to every text that may be a name on the hub."""
    changed: dict[str, dict[str, Any]] = {}
    values = flatten_values(config)
    for option in get_options(type(config)).values():
        if option.hub is not None and values[option.name]:
            value = _map_value(option, values[option.name], change)
            if value != values[option.name]:
                changed.setdefault(option.section, {})[option.name] = value
    sections = {section: replace(getattr(config, section), **own) for section, own in changed.items()}
    return replace(config, **sections)


def _map_value(option: Option, value: Any, change: Callable[[Option, str], str]) -> Any:
    if isinstance(value, str):
        return change(option, value)
    if isinstance(value, dict):  # a rule refuses what is not a table of tables
        return {
            name: {key: change(option, v) if key in option.inner and isinstance(v, str) else v for key, v in t.items()}
            if isinstance(t, dict)
            else t
            for name, t in value.items()
        }
    every = 2 if option.path == "pairs" else 1
    return tuple(change(option, item) if i % every == every - 1 else item for i, item in enumerate(value))
