"""What a family is: how its config is read and written, and what its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.models.spec import DecoderSpec


def nothing(spec: DecoderSpec, hf_name: str) -> bool:
    """No tensor may be left over."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family. ``models`` says which models people know belong to it.

    ``write`` makes a config out of a spec, for families that are also made from nothing here; a model that was loaded
    is saved with the config it came with. The first of ``architectures`` is written. ``names`` is laid over
    ``layouts.names.NAMES``. ``spare`` says which tensors a checkpoint may carry that this decoder does not compute.
    """

    model_type: str
    architectures: tuple[str, ...]
    models: str
    read: Callable[[Mapping[str, Any]], DecoderSpec]
    write: Callable[[DecoderSpec], dict[str, Any]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    spare: Callable[[DecoderSpec, str], bool] = nothing
