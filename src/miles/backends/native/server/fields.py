"""Read a request's JSON field by field, and refuse what is wrong as this server does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from miles.backends.native.server.refusal import Refusal, malformed
from miles.core.fields import JsonFields, strict_json


def read_json(body: bytes) -> Any:
    """The value in ``body``: strict JSON in UTF-8, with nothing in it that could not be written out again."""
    try:
        return strict_json(body)
    except ValueError as error:
        raise malformed(f"The body is not valid JSON: {error}.") from error


class Fields(JsonFields[Refusal]):
    """The fields of one JSON object; ``where`` is its name, for complaints. ``malformed``: how wrong kinds are told."""

    def __init__(self, value: Any, where: str = "", *, malformed: bool = True) -> None:
        self._malformed = malformed
        super().__init__(value, where)

    def refusal(self, message: str, param: str | None, *, form: bool) -> Refusal:
        return Refusal(message, malformed=form and self._malformed, param=param)

    def inner(self, value: Any, where: str) -> Self:
        return type(self)(value, where, malformed=self._malformed)

    def within(self, name: str, default: float, holds: Callable[[float], bool], must: str) -> float:
        """A number in a range, told as ``must``; the default has to be in it too."""
        value = self.number(name, default)
        if not holds(value):
            raise self.refusal(f"{self.path(name)} is {value:g}, but must be {must}.", self.path(name), form=False)
        return value
