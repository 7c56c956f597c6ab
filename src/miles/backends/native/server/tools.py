"""Tool calls in a model's own words: which format a chat template teaches it, and the calls in what it wrote.

A parser gets the text from the first mark of its format on, all of it that there is so far, and returns the calls that
are complete. So the same code reads a finished answer and one that is still coming.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Tools = Mapping[str, Mapping[str, Any]]
"""The tools a request offers: name -> the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a family of models writes calls: they begin with one of ``marks``; without marks all of the text is calls."""

    name: str
    marks: tuple[str, ...]
    read: Callable[[str, Tools], Iterator[Call]]


def call_of(value: Any, tools: Tools) -> Call | None:
    """A call from ``{"name": ..., "arguments": {...}}``; None unless it names a tool that was offered."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in tools:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        return Call(name=value["name"], arguments=arguments)
    return Call(name=value["name"], arguments=json.dumps(arguments or {}, ensure_ascii=False))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _objects(text: str) -> Iterator[Any]:
    """JSON values one after the other, with anything but a brace or bracket between them, as far as they are whole."""
    decoder, at = json.JSONDecoder(), 0
    while (found := re.compile(r"[{\[]").search(text, at)) is not None:
        try:
            value, at = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            return
        yield value


def _calls(values: Iterator[Any], tools: Tools) -> Iterator[Call]:
    for value in values:
        for each in value if isinstance(value, list) else [value]:
            if (call := call_of(each, tools)) is not None:
                yield call


def _tagged(text: str, tools: Tools) -> Iterator[Call]:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, one a call."""
    blocks = re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL)
    return _calls((_json(block) for block in blocks), tools)


def _listed(text: str, tools: Tools) -> Iterator[Call]:
    """``[TOOL_CALLS] [{...}, {...}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each."""
    if "[ARGS]" not in text:
        yield from _calls(_objects(text.replace("[TOOL_CALLS]", " ", 1)), tools)
        return
    for part in text.split("[TOOL_CALLS]")[1:]:
        name, _, rest = part.partition("[ARGS]")
        for arguments in _objects(rest):
            yield from _calls(iter([{"name": name.strip(), "arguments": arguments}]), tools)
            break


def _bare(text: str, tools: Tools) -> Iterator[Call]:
    """``{"name": ..., "parameters": {...}}``, several with a semicolon between, maybe behind a mark."""
    return _calls(_objects(text), tools)


def _fenced(text: str, tools: Tools) -> Iterator[Call]:
    """DeepSeek's: between its own marks, ``function<sep>name`` and a fenced block, or ``name<sep>{...}``."""
    for block in re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL):
        head, _, rest = block.partition("<｜tool▁sep｜>")
        name = rest.partition("\n")[0].strip() if head.strip() == "function" else head.strip()
        arguments = next(_objects(rest), None)
        yield from _calls(iter([{"name": name, "arguments": arguments}]), tools)


def _spelled_out(text: str, tools: Tools) -> Iterator[Call]:
    """``<function=name><parameter=key>value</parameter></function>``: values are words, typed by the tool's schema."""
    for name, inside in re.findall(r"<function=([^>\n]+)>(.*?)</function>", text, re.DOTALL):
        pairs = re.findall(r"<parameter=([^>\n]+)>(.*?)</parameter>", inside, re.DOTALL)
        yield from _typed(name.strip(), {key.strip(): _unpadded(value) for key, value in pairs}, tools)


def _keyed(text: str, tools: Tools) -> Iterator[Call]:
    """``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``: values as above."""
    for block in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.DOTALL):
        pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", block, re.DOTALL)
        name = block.partition("<arg_key>")[0].strip()
        yield from _typed(name, {key.strip(): value for key, value in pairs}, tools)


def _unpadded(value: str) -> str:
    return value.removeprefix("\n").removesuffix("\n")


def _typed(name: str, words: Mapping[str, str], tools: Tools) -> Iterator[Call]:
    if name not in tools:
        return
    known = tools[name].get("properties")
    schemas: Mapping[str, Any] = known if isinstance(known, dict) else {}
    arguments: dict[str, Any] = {}
    for key, word in words.items():
        schema = schemas.get(key)
        is_text = isinstance(schema, dict) and schema.get("type") == "string"
        value = None if is_text else _json(word)
        arguments[key] = word if value is None and word.strip() != "null" else value
    yield Call(name=name, arguments=json.dumps(arguments, ensure_ascii=False))


FORMATS: Mapping[str, Format] = {
    made.name: made
    for made in (
        Format(name="qwen3_coder", marks=("<tool_call>", "<function="), read=_spelled_out),
        Format(name="glm", marks=("<tool_call>",), read=_keyed),
        Format(name="qwen", marks=("<tool_call>",), read=_tagged),
        Format(name="mistral", marks=("[TOOL_CALLS]",), read=_listed),
        Format(name="deepseek", marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"), read=_fenced),
        Format(name="llama3", marks=("<|python_tag|>", '{"name"'), read=_bare),
    )
}
FORCED = Format(name="json", marks=(), read=_bare)
"""What a tool choice that leaves no choice makes a model write: a JSON list of calls and nothing else."""

_SIGNS = {
    "qwen3_coder": "<parameter=",
    "glm": "<arg_key>",
    "qwen": "<tool_call>",
    "mistral": "[TOOL_CALLS]",
    "deepseek": "tool▁call▁begin",
    "llama3": '{"name": function name, "parameters"',
}


def format_in(template: str) -> Format | None:
    """The format a chat template shows the model; None where it shows none that is known."""
    return next((FORMATS[name] for name, sign in _SIGNS.items() if sign in template), None)


def forced_schema(tools: Tools, *, parallel: bool) -> dict[str, Any]:
    """The schema of a JSON list of calls to these tools, at least one; spaced as models have seen it most."""
    each = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    found: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": each[0] if len(each) == 1 else {"anyOf": each},
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }
    return found if parallel else found | {"maxItems": 1}
