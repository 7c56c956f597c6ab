"""Upstream's sample and batch types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miles.hooks.compat.types import UpstreamSample as Sample

RolloutBatch = dict[str, list[Any]]
"""The data of a micro-batch by name, a list entry for each sample."""


@dataclass(frozen=True)
class ParamInfo:
    """A parameter: its name, dtype, shape, attributes, size in bytes and the rank that has it."""

    name: str
    dtype: Any
    shape: Any
    attrs: dict[str, Any]
    size: int
    src_rank: int


__all__ = ["ParamInfo", "RolloutBatch", "Sample"]
