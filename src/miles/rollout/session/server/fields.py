"""Read a request's JSON field by field, and refuse what is wrong as sessions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from miles.core.fields import JsonFields, strict_json
from miles.rollout.session.server.refusal import Refusal


def read_json(body: bytes) -> Any:
    """The value in ``body``: strict JSON in UTF-8, with nothing in it that could not be written out again."""
    try:
        return strict_json(body)
    except ValueError as error:
        raise Refusal(f"The body is not valid JSON: {error}.") from error


class Fields(JsonFields[Refusal]):
    """The fields of one JSON object; ``where`` is its name, for complaints."""

    def refusal(self, message: str, param: str | None, *, form: bool) -> Refusal:
        return Refusal(message, param=param)

    def only(self, known: frozenset[str], what: str) -> None:
        """Refuse fields nobody would look at."""
        for name in self:
            if name not in known:
                raise Refusal(f"{what} has no {name}; it may have {', '.join(sorted(known))}.", param=self.path(name))

    def within(self, name: str, holds: Callable[[float], bool], must: str) -> float | None:
        """A number in a range, told as ``must``."""
        value = self.maybe_number(name)
        if value is not None and not holds(value):
            raise self.refuse(name, must, form=False)
        return value
