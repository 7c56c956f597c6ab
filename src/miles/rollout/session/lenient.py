"""JSON as models write it: read to the letter where it can be, with a word on what was overlooked where not."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_FENCE = re.compile(r"^```\w*\s*\n?(.*?)\n?\s*```$", re.DOTALL)
_COMMA = re.compile(r",(\s*[}\]])")


class Malformed(Exception):
    """A tool call that cannot be read; says why."""


@dataclass(frozen=True, slots=True)
class Read:
    """A value, and what had to be overlooked to read it."""

    value: Any
    overlooked: str | None = None


def read_json(text: str) -> Read:
    """The one JSON value in ``text``; raises Malformed where there is none."""
    found = _loads(text)
    if found is not None:
        return Read(found.value)
    for attempt, why in _attempts(text.strip()):
        if (found := _loads(attempt)) is not None:
            return Read(found.value, why)
    if (found := _literal(text.strip())) is not None:
        return Read(found.value, "it was written as Python")
    if (found := first_value(text)) is not None:
        return Read(found.value, "something stood around its JSON")
    raise Malformed("it is not JSON")


def first_value(text: str) -> Read | None:
    """The first object or list in ``text`` that is whole."""
    at = re.search(r"[{\[]", text)
    if at is None:
        return None
    try:
        return Read(json.JSONDecoder(strict=False).raw_decode(text, at.start())[0])
    except (ValueError, RecursionError):
        return None


def values_in(text: str) -> Iterator[tuple[Any, int, int]]:
    """JSON objects and lists one after the other with where they lie, as far as they are whole."""
    decoder, at, start = json.JSONDecoder(strict=False), 0, re.compile(r"[{\[]")
    while (found := start.search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            return
        yield value, found.start(), at


def typed(words: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that were written as words, each read by what the tool's schema says of it."""
    known = schema.get("properties")
    schemas: Mapping[str, Any] = known if isinstance(known, Mapping) else {}
    arguments: dict[str, Any] = {}
    for key, word in words.items():
        declared = schemas.get(key)
        is_text = isinstance(declared, Mapping) and declared.get("type") == "string"
        found = None if is_text else _loads(word)
        arguments[key] = word if found is None else found.value
    return arguments


def _attempts(text: str) -> Iterator[tuple[str, str]]:
    fenced = _FENCE.match(text)
    inner = fenced.group(1) if fenced else text
    if fenced:
        yield inner, "it stood in a fence"
    yield _COMMA.sub(r"\1", inner), "it had a comma before a closing bracket"


def _loads(text: str) -> Read | None:
    try:
        return Read(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        return None


def _literal(text: str) -> Read | None:
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return Read(value) if isinstance(value, dict | list) else None
