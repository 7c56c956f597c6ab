"""An instruction's settings, read with complaints that name what is missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles.rollout.reward.score import BadLabel

Settings = Mapping[str, Any]
Check = Callable[[str, Settings], bool]
"""Does the reply do as it was told?"""

_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "less than": lambda count, bound: count < bound,
    "at least": lambda count, bound: count >= bound,
    "at most": lambda count, bound: count <= bound,
    "more than": lambda count, bound: count > bound,
    "exactly": lambda count, bound: count == bound,
}


def whole(settings: Settings, key: str) -> int:
    """A whole number; data files often hold it as 3.0."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise BadLabel(f"an instruction needs a whole number in {key}, and has {value!r}")
    return int(value)


def text(settings: Settings, key: str) -> str:
    """A text that is not empty."""
    value = settings.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadLabel(f"an instruction needs a text in {key}, and has {value!r}")
    return value


def texts(settings: Settings, key: str) -> list[str]:
    """One or more texts."""
    value = settings.get(key)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise BadLabel(f"an instruction needs a list of texts in {key}, and has {value!r}")
    return list(value)


def holds(count: int, settings: Settings, bound: str, relation: str) -> bool:
    """Whether a count stands in the relation that the settings name to the bound they name."""
    name = text(settings, relation).strip().lower()
    if name not in _RELATIONS:
        raise BadLabel(f"an instruction's {relation} is {name!r}, and must be one of {', '.join(_RELATIONS)}")
    return _RELATIONS[name](count, whole(settings, bound))
