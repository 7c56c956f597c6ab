"""What the server says of the model it serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(slots=True, kw_only=True)
class Card:
    """A model's names and papers. ``model_path`` follows updates from disk; ``defaults`` are its own for sampling."""

    model_path: str = "model"
    tokenizer_path: str = "model"
    served_model_name: str = "model"
    config: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = 0


def card_of(folder: Path, config: Mapping[str, Any], name: str | None, *, created: int, own_defaults: bool) -> Card:
    """The card of a checkpoint folder."""
    return Card(
        model_path=str(folder),
        tokenizer_path=str(folder),
        served_model_name=name or str(folder),
        config=config,
        defaults=defaults_in(folder) if own_defaults else {},
        created=created,
    )


def defaults_in(folder: Path) -> dict[str, float]:
    """How the maker of the model would sample from it, where ``generation_config.json`` says so."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    given = json.loads(file.read_text(encoding="utf-8"))
    found = {name: given.get(name) for name in _SAMPLING}
    found = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
    if found.get("top_k") == 0:
        del found["top_k"]
    return found
