"""Model information of the HTTP server: names, paths, Hugging Face config and sampling defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(slots=True, kw_only=True)
class ModelInfo:
    """The served model. ``model_path`` follows updates from disk; ``sampling_defaults`` are the model's own."""

    model_path: str = "model"
    tokenizer_path: str = "model"
    served_model_name: str = "model"
    config: Mapping[str, Any] = field(default_factory=dict)
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    created: int = 0


def load_model_info(
    folder: Path, config: Mapping[str, Any], name: str | None, *, created: int, use_model_defaults: bool
) -> ModelInfo:
    """The information of a checkpoint folder."""
    return ModelInfo(
        model_path=str(folder),
        tokenizer_path=str(folder),
        served_model_name=name or str(folder),
        config=config,
        sampling_defaults=load_sampling_defaults(folder) if use_model_defaults else {},
        created=created,
    )


def load_sampling_defaults(folder: Path) -> dict[str, float]:
    """The sampling parameters in ``generation_config.json``, where there is one."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    values = {name: config.get(name) for name in _SAMPLING_FIELDS}
    defaults = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    if defaults.get("top_k") == 0:
        del defaults["top_k"]
    return defaults
