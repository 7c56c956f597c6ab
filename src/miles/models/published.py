"""Sizes of well-known models, so that a run can be planned before anything is downloaded. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

# One model a line: its name, and those keys of its config.json that a size depends on.
_FILE = Path(__file__).with_name("published.jsonl")


@cache
def published() -> Mapping[str, Mapping[str, Any]]:
    """Configs by the name people know a model by, case aside from what is written here."""
    rows = (json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines())
    return MappingProxyType({row.pop("name"): row for row in rows})


def config_named(name: str) -> Mapping[str, Any] | None:
    """The config of the model of that name, whoever's folder stands before it and however it is capitalised."""
    wanted = name.rstrip("/").rpartition("/")[2].lower()
    return next((config for known, config in published().items() if known.lower() == wanted), None)
