"""What a grader gives, and what it raises when it was given nothing to grade by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Score = float | Mapping[str, float]
"""One number; or several by name, of which ``score`` is the value and all are parts of the reward."""

Metadata = Mapping[str, Any]
"""The prompt's metadata column, as the data file gave it."""


class BadLabel(ValueError):
    """A label or metadata by which no reply can be graded: the data's fault. The message names no prompt."""


class GradingError(Exception):
    """A grade that could not be given: the grader hung, died or was not answered. The attempt stays unscored."""


class Refused(GradingError):
    """An answer that would be the same if one asked again."""
