"""Standalone recipe: one file that says what a recipe and all it includes say, to be adapted. No torch."""

from __future__ import annotations

import json
import os.path
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.config.files import ABOUT, Layer
from miles.config.provenance import resolve_paths
from miles.config.schema import get_options, get_passthroughs, get_sections
from miles.launch.config import Config


def format_standalone(layers: Sequence[Layer], header: Iterable[str]) -> str:
    """The text of a recipe without includes: comments, description, and every value of ``layers``; later ones win.

    Comments beside values are kept. Relative paths become absolute, since they are relative to the file they are in.
    """
    lines = [f"# {line}".rstrip() for line in header]
    about = {key: value for layer in layers for key, value in layer.about.items()}
    if about:
        lines += ["", f"[{ABOUT}]", *(f"{key} = {format_toml(value)}" for key, value in about.items())]
    sections = _collect_lines(layers)
    for section in get_sections(Config):
        if section in sections:
            lines += ["", f"[{section}]", *sections[section].values()]
    return "\n".join(lines).strip("\n") + "\n"


def _collect_lines(layers: Sequence[Layer]) -> dict[str, dict[str, str]]:
    """Lines by section and key."""
    owners = {name: option.section for name, option in get_options(Config).items()}
    owners |= {field: section for section, field in get_passthroughs(Config).values()}
    sections: dict[str, dict[str, str]] = {}
    for layer in layers:
        source = Path(layer.label).read_text(encoding="utf-8").splitlines() if Path(layer.label).is_file() else []
        for key, value in _iter_values(layer.values, owners):
            sections.setdefault(owners[key], {})[key] = _format_line(layer, key, value, source)
    return sections


def _iter_values(values: Mapping[str, Any], owners: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key not in owners and isinstance(value, dict):
            yield from value.items()
        else:
            yield key, value


def _format_line(layer: Layer, key: str, value: Any, source: Sequence[str]) -> str:
    """The line of the file, with its comment, where it says the same; else the value is formatted."""
    option = get_options(Config).get(key)
    folder = os.path.abspath(os.path.dirname(layer.label))
    given = tuple(value) if isinstance(value, list) else value
    resolved = given if option is None or option.text else resolve_paths(option, given, folder)
    if resolved != given:
        return f"{key} = {format_toml(resolved)}"
    for line in source:
        if line.startswith(key) and _parse_line(line) == {key: value}:
            return line.rstrip()
    return f"{key} = {format_toml(value)}"


def _parse_line(line: str) -> dict[str, Any] | None:
    try:
        return tomllib.loads(line)
    except tomllib.TOMLDecodeError:  # a line of a value that has several
        return None


def format_toml(value: Any) -> str:
    """A value in TOML; tables inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_format_key(key)} = {format_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)


def _format_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else format_toml(key)
