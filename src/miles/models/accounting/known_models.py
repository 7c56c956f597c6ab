"""Configs of well-known models, so that a run can be planned before anything is downloaded. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

# One model per line: its name, and the keys of its config.json that its size depends on.
_FILE = Path(__file__).with_name("known_models.jsonl")


@cache
def load_known_models() -> Mapping[str, Mapping[str, Any]]:
    """Load the configs by model name."""
    rows = (json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines())
    return MappingProxyType({row.pop("name"): row for row in rows})


def find_known_config(name: str) -> Mapping[str, Any] | None:
    """Find the config of a model by name, ignoring case and the organization in front."""
    short_name = name.rstrip("/").rpartition("/")[2].lower()
    return next((config for known, config in load_known_models().items() if known.lower() == short_name), None)
