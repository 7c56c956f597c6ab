"""Upstream's configuration of held-out sets."""

from miles.hooks.compat.types import EvalDatasetConfig

__all__ = ["EvalDatasetConfig"]
