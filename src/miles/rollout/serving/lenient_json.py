"""Lenient JSON for tool calls: exact JSON first, then common mistakes of models, with a note on what was tolerated."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CODE_FENCE_NOTE = "it stood in a code fence"
_FENCE = re.compile(r"^```\w*\s*\n?(.*?)\n?\s*```$", re.DOTALL)
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")
_VALUE_START = re.compile(r"[{\[]")


class MalformedToolCall(Exception):
    """A tool call that cannot be parsed; the message says why."""


@dataclass(frozen=True, slots=True)
class LenientValue:
    """A parsed value; ``note`` says what was tolerated to parse it."""

    value: Any
    note: str | None = None


def parse_lenient_json(text: str) -> LenientValue:
    """The one JSON value in ``text``; raises MalformedToolCall where there is none."""
    if (parsed := _load(text)) is not None:
        return parsed
    stripped = text.strip()
    for candidate, note in _repair_candidates(stripped):
        if (parsed := _load(candidate)) is not None:
            return LenientValue(parsed.value, note)
    if (parsed := _load_python_literal(stripped)) is not None:
        return LenientValue(parsed.value, "it was written as Python")
    for value, _, _ in iterate_json_values(text):
        return LenientValue(value, "there was other text around its JSON")
    raise MalformedToolCall("it is not JSON")


def iterate_json_values(text: str) -> Iterator[tuple[Any, int, int]]:
    """The JSON objects and lists in ``text`` with their start and end, up to the first incomplete one."""
    decoder, position = json.JSONDecoder(strict=False), 0
    while (match := _VALUE_START.search(text, position)) is not None:
        try:
            value, position = decoder.raw_decode(text, match.start())
        except (ValueError, RecursionError):
            return
        yield value, match.start(), position


def parse_typed_arguments(texts: Mapping[str, str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments written as plain text, each parsed by its type in the tool's JSON schema."""
    properties = schema.get("properties")
    schemas: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
    arguments: dict[str, Any] = {}
    for key, text in texts.items():
        declared = schemas.get(key)
        is_text = isinstance(declared, Mapping) and declared.get("type") == "string"
        parsed = None if is_text else _load(text)
        arguments[key] = text if parsed is None else parsed.value
    return arguments


def _repair_candidates(text: str) -> Iterator[tuple[str, str]]:
    fenced = _FENCE.match(text)
    inner = fenced.group(1) if fenced else text
    if fenced:
        yield inner, CODE_FENCE_NOTE
    yield _TRAILING_COMMA.sub(r"\1", inner), "it had a comma before a closing bracket"


def _load(text: str) -> LenientValue | None:
    try:
        return LenientValue(json.loads(text, strict=False))
    except (ValueError, RecursionError):
        return None


def _load_python_literal(text: str) -> LenientValue | None:
    try:
        value = ast.literal_eval(text)
        json.dumps(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return LenientValue(value) if isinstance(value, dict | list) else None
