"""Fields of a JSON request: typed access, with one sentence for a field that is missing or has another type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from miles.rollout.serving.errors import RequestError

__all__ = ["Fields"]

D = TypeVar("D")


class _Required:
    """The default of a field that must be there."""


_REQUIRED = _Required()


class Fields:
    """The fields of one JSON object; ``where`` names it in messages."""

    def __init__(self, values: object, where: str = "the body") -> None:
        if not isinstance(values, Mapping):
            raise RequestError(f"{where} must be a JSON object.", status=422)
        self._values: Mapping[str, Any] = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def _get(self, name: str, default: object, wanted: str) -> Any:
        value = self._values.get(name)
        if value is None:
            if isinstance(default, _Required):
                raise RequestError(f"{self._where} has no {name}, which must be {wanted}.", status=422)
            return default
        return value

    def _refuse(self, name: str, wanted: str) -> RequestError:
        return RequestError(f"{name} in {self._where} must be {wanted}.", status=422)

    def text(self, name: str, default: D | _Required = _REQUIRED) -> str | D:
        """Return a text."""
        value = self._get(name, default, "a text")
        if name in self and not isinstance(value, str):
            raise self._refuse(name, "a text")
        return value

    def integer(self, name: str, default: int | _Required = _REQUIRED, *, least: int, most: int = 1 << 62) -> int:
        """Return a whole number between two bounds."""
        wanted = f"a whole number, {least} or more" if most == 1 << 62 else f"a whole number from {least} to {most}"
        value = self._get(name, default, wanted)
        if name in self and (type(value) is not int or not least <= value <= most):
            raise self._refuse(name, wanted)
        return value

    def number(self, name: str, default: float | _Required = _REQUIRED, *, least: float = -math.inf) -> float:
        """Return a finite number."""
        wanted = "a number" if least == -math.inf else f"a number, {least:g} or more"
        value = self._get(name, default, wanted)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < least:
            raise self._refuse(name, wanted)
        return float(value)

    def flag(self, name: str, default: bool | _Required = _REQUIRED) -> bool:
        """Return true or false."""
        value = self._get(name, default, "true or false")
        if not isinstance(value, bool):
            raise self._refuse(name, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object, or None."""
        value = self._get(name, None, "an object")
        if value is not None and not isinstance(value, Mapping):
            raise self._refuse(name, "an object")
        return None if value is None else dict(value)

    def texts(self, name: str) -> list[str]:
        """Return a list of texts; without it, none."""
        value = self._get(name, [], "a list of texts")
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._refuse(name, "a list of texts")
        return value

    def inner(self, name: str) -> Fields:
        """Return the fields of an object inside."""
        return Fields(self._get(name, _REQUIRED, "an object"), f"{name} in {self._where}")

    def items(self, name: str) -> list[Any]:
        """Return a list of anything."""
        value = self._get(name, _REQUIRED, "a list")
        if not isinstance(value, list):
            raise self._refuse(name, "a list")
        return value

    def raw(self, name: str) -> Any:
        """Return a field as it is, or None."""
        return self._values.get(name)
