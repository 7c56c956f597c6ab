"""Configs of well-known models, so that a run can be planned before anything is downloaded. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

# One model per line: its name, where its sizes come from, and the keys of its config.json that these depend on.
_FILE = Path(__file__).with_name("known_models.jsonl")

_SOURCE = "source"


@cache
def load_known_models() -> Mapping[str, Mapping[str, Any]]:
    """Load the configs by model name."""
    rows = ({**row} for row in _read_rows())
    return MappingProxyType({row.pop("name"): {k: v for k, v in row.items() if k != _SOURCE} for row in rows})


@cache
def load_sources() -> Mapping[str, str]:
    """Load by model name where the sizes of its config come from: packages that have them, or memory."""
    return MappingProxyType({row["name"]: row.get(_SOURCE, "") for row in _read_rows()})


@cache
def _read_rows() -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines())


def find_known_config(name: str) -> Mapping[str, Any] | None:
    """Find the config of a model by name, ignoring case and the organization in front."""
    return None if (known := _find_name(name)) is None else load_known_models()[known]


def find_source(name: str) -> str | None:
    """Find where the sizes of a model come from, by its name as in ``find_known_config``."""
    return None if (known := _find_name(name)) is None else load_sources()[known]


def _find_name(name: str) -> str | None:
    short_name = name.rstrip("/").rpartition("/")[2].lower()
    return next((known for known in load_known_models() if known.lower() == short_name), None)
