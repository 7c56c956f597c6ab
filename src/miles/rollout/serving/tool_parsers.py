"""Tool-call parsers and reasoning parsers: one table row for each way a model family marks them.

A tool-call parser finds blocks in a text and parses one block into calls. A block that cannot be parsed raises
MalformedToolCall, and its text then stays part of the content; nothing else is ever raised.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from miles.rollout.serving.lenient_json import (
    CODE_FENCE_NOTE,
    LenientValue,
    MalformedToolCall,
    iterate_json_values,
    parse_lenient_json,
    parse_typed_arguments,
)
from miles.rollout.serving.messages import ToolSchemas


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One tool call; ``arguments`` is the text of a JSON object, ``id`` is set where the model wrote one itself.

    ``note`` says what was tolerated to parse it.
    """

    name: str
    arguments: str
    id: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCallBlock:
    """A span of text with calls: ``body`` is the text between its markers, ``closed``: it has its end marker."""

    start: int
    stop: int
    body: str
    closed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallParser:
    """How a model family writes tool calls. ``markers`` are what a block may begin with.

    ``open_ended``: a block has no end marker and runs to the next block or the end of the text. ``bare``: a whole text
    without a marker may be a call. ``template_sign`` identifies the format in a chat template or in what it renders.
    """

    name: str
    markers: tuple[str, ...]
    find_blocks: Callable[[str], Iterator[ToolCallBlock]]
    parse_block: Callable[[str, ToolSchemas], Sequence[ToolCall]]
    open_ended: bool = False
    bare: bool = False
    template_sign: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """The markers around a model's reasoning."""

    name: str
    start: str
    end: str


THINK = ReasoningParser(name="think", start="<think>", end="</think>")
REASONING_PARSERS: Mapping[str, ReasoningParser] = {THINK.name: THINK}


# -- building calls -------------------------------------------------------------------------


def build_tool_call(
    name: Any, arguments: Any, tools: ToolSchemas, *, id: str | None = None, note: str | None = None
) -> ToolCall:
    """A call of one of the offered ``tools``; raises MalformedToolCall for any other."""
    if not isinstance(name, str) or not name:
        raise MalformedToolCall("it names no tool")
    if name not in tools:
        raise MalformedToolCall(f"there is no tool {name!r}")
    if isinstance(arguments, str):
        parsed = parse_lenient_json(arguments) if arguments.strip() else LenientValue({})
        arguments, note = parsed.value, note or parsed.note
    if arguments is not None and not isinstance(arguments, dict):
        raise MalformedToolCall("its arguments are not an object")
    return ToolCall(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False), id=id, note=note)


def _calls_from_value(value: Any, tools: ToolSchemas, note: str | None = None) -> list[ToolCall]:
    """Calls from ``{"name": ..., "arguments": {...}}`` or a list of such objects."""
    calls: list[ToolCall] = []
    for entry in value if isinstance(value, list) else [value]:
        if not isinstance(entry, dict):
            raise MalformedToolCall("it is not an object")
        inner = entry.get("function")
        function = inner if isinstance(inner, dict) else entry
        name = function.get("name", inner if isinstance(inner, str) else None)
        arguments = function.get("arguments", function.get("parameters", function.get("args")))
        calls.append(build_tool_call(name, arguments, tools, note=note))
    if not calls:
        raise MalformedToolCall("it calls nothing")
    return calls


# -- finding blocks -------------------------------------------------------------------------


def _find_between(text: str, *, starts: Sequence[str], ends: Sequence[str]) -> Iterator[ToolCallBlock]:
    """Blocks between a start marker and the next end marker; the last one may lack its end."""
    start_pattern, end_pattern = (re.compile("|".join(map(re.escape, markers))) for markers in (starts, ends))
    position = 0
    while (head := start_pattern.search(text, position)) is not None:
        tail = end_pattern.search(text, head.end())
        next_head = start_pattern.search(text, head.end())
        if tail is None or (next_head is not None and next_head.start() < tail.start()):
            # A start marker before the end marker begins the next block: this one was never closed.
            position = len(text) if next_head is None else next_head.start()
            yield ToolCallBlock(head.start(), position, text[head.end() : position], closed=False)
        else:
            yield ToolCallBlock(head.start(), tail.end(), text[head.end() : tail.start()])
            position = tail.end()


def _between(*pairs: tuple[str, str]) -> Callable[[str], Iterator[ToolCallBlock]]:
    return partial(_find_between, starts=[start for start, _ in pairs], ends=[end for _, end in pairs])


_find_tool_call_tags = _between(("<tool_call>", "</tool_call>"))
_FUNCTION_TAG = re.compile(r"<function=[^>\n]+>.*?(</function>|$)", re.DOTALL)


def _find_function_tags(text: str) -> Iterator[ToolCallBlock]:
    """``<tool_call>`` blocks, or ``<function=...>`` blocks where the outer tag is missing."""
    if "<tool_call>" in text:
        yield from _find_tool_call_tags(text)
        return
    for match in _FUNCTION_TAG.finditer(text):
        yield ToolCallBlock(match.start(), match.end(), match.group(), closed=bool(match.group(1)))


def _find_mistral(text: str) -> Iterator[ToolCallBlock]:
    marker = "[TOOL_CALLS]"
    starts = [match.start() for match in re.finditer(re.escape(marker), text)]
    for start, stop in pairwise([*starts, len(text)]):
        yield ToolCallBlock(start, stop, text[start + len(marker) : stop])


_PYTHON_TAG = "<|python_tag|>"


def _find_bare(text: str) -> Iterator[ToolCallBlock]:
    """After the python tag; or a whole text that begins like JSON or like a list of Python calls."""
    position = text.find(_PYTHON_TAG)
    if position >= 0:
        yield ToolCallBlock(position, len(text), text[position + len(_PYTHON_TAG) :])
        return
    body = text.strip()
    is_json = body.startswith(("{", "[{")) and '"name"' in body
    if is_json or re.match(r"\[\w+\(.*\)\]$", body, re.DOTALL):
        yield ToolCallBlock(0, len(text), body)
        return
    yield from _find_between(text, starts=["<function="], ends=["</function>"])


_CODE_FENCE = re.compile(r"```(?:tool_code|tool_call|json)\s*\n(.*?)(?:```|$)", re.DOTALL)


def _find_fenced(text: str) -> Iterator[ToolCallBlock]:
    """In a code fence; or a whole text that begins like JSON or like a list of Python calls."""
    fences = [
        ToolCallBlock(match.start(), match.end(), match.group(1), closed=match.group().endswith("```"))
        for match in _CODE_FENCE.finditer(text)
    ]
    yield from fences or _find_bare(text)


# -- parsing blocks -------------------------------------------------------------------------


def _parse_json(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    parsed = parse_lenient_json(body)
    return _calls_from_value(parsed.value, tools, parsed.note)


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def _parse_function_tag(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``<function=name><parameter=key>value</parameter></function>``, or JSON inside as some models write it."""
    match = _FUNCTION.search(body)
    if match is None:
        return _parse_json(body, tools)
    name, inside = match.group(1).strip(), match.group(2)
    if "<parameter=" not in inside and inside.strip():
        parsed = parse_lenient_json(inside)
        return [build_tool_call(name, parsed.value, tools, note=parsed.note)]
    texts = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(inside)}
    return [build_tool_call(name, parse_typed_arguments(texts, tools.get(name, {})), tools)]


_ARG_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL)


def _parse_glm(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>``, or JSON as some models write it."""
    name = body.partition("<arg_key>")[0].strip()
    if name.startswith("{"):
        return _parse_json(body, tools)
    texts = {key.strip(): value for key, value in _ARG_PAIR.findall(body)}
    return [build_tool_call(name, parse_typed_arguments(texts, tools.get(name, {})), tools)]


def _parse_deepseek(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``function<sep>name`` and a code fence, or ``name<sep>{...}``."""
    head, separator, rest = body.partition("<｜tool▁sep｜>")
    if not separator:
        return _parse_json(body, tools)
    if head.strip() == "function":
        name, _, rest = rest.lstrip().partition("\n")
    else:
        name = head
    parsed = parse_lenient_json(rest) if rest.strip() else LenientValue({})
    note = None if parsed.note == CODE_FENCE_NOTE else parsed.note  # the fence is part of this format
    return [build_tool_call(name.strip(), parsed.value, tools, note=note)]


def _parse_kimi(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``functions.name:0<|tool_call_argument_begin|>{...}``; the head is the call's id."""
    head, separator, rest = body.partition("<|tool_call_argument_begin|>")
    if not separator:
        raise MalformedToolCall("it has no arguments")
    id = head.strip()
    name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
    parsed = parse_lenient_json(rest) if rest.strip() else LenientValue({})
    return [build_tool_call(name, parsed.value, tools, id=id, note=parsed.note)]


_INVOKE = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)(?:</invoke>|(?=<invoke )|$)", re.DOTALL)
_NAMED_PARAMETER = re.compile(
    r"<parameter name=\"?([^\">]+)\"?[^>]*>(.*?)(?:</parameter>|(?=<parameter )|$)", re.DOTALL
)


def _parse_minimax(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``<invoke name="f"><parameter name="k">v</parameter></invoke>``, or one JSON object per line."""
    calls: list[ToolCall] = []
    for name, inside in _INVOKE.findall(body):
        texts = {key: value.strip("\n") for key, value in _NAMED_PARAMETER.findall(inside)}
        calls.append(build_tool_call(name, parse_typed_arguments(texts, tools.get(name, {})), tools))
    if not calls:
        calls = [call for value, _, _ in iterate_json_values(body) for call in _calls_from_value(value, tools)]
    if not calls:
        raise MalformedToolCall("it calls nothing")
    return calls


def _parse_mistral(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``[TOOL_CALLS] [{...}, {...}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""
    name, separator, rest = body.partition("[ARGS]")
    if not separator:
        return _parse_json(body, tools)
    return [build_tool_call(name.strip(), parse_lenient_json(rest).value, tools)]


def _parse_bare(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    """``{"name": ..., "parameters": {...}}``, several separated by semicolons, or calls written as Python."""
    body = body.strip()
    if not body.startswith(("{", "[{")):
        name, separator, rest = body.partition(">")
        if separator and name in tools:
            return [build_tool_call(name, rest, tools)]
        return _parse_python(body, tools)
    values = list(iterate_json_values(body))
    if not values:
        return _parse_json(body, tools)
    between = [body[end:start] for (_, _, end), (_, start, _) in pairwise(values)]
    other = "".join([*between, body[values[-1][2] :]]).replace(";", "").replace(",", "").strip()
    note = "there was other text around its JSON" if other else None
    return [call for value, _, _ in values for call in _calls_from_value(value, tools, note)]


def _parse_python(body: str, tools: ToolSchemas) -> Sequence[ToolCall]:
    try:
        tree = ast.parse(body, mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise MalformedToolCall("it is neither JSON nor a call") from error
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if not nodes:
        raise MalformedToolCall("it calls nothing")
    return [_parse_python_call(node, tools) for node in nodes]


def _parse_python_call(node: ast.expr, tools: ToolSchemas) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise MalformedToolCall("it is not a call with named arguments")
    try:
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        arguments = json.loads(json.dumps(keywords))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise MalformedToolCall("its arguments are not plain values") from error
    name = ast.unparse(node.func)
    return build_tool_call(name.removesuffix(".call") if name not in tools else name, arguments, tools)


# -- the table ------------------------------------------------------------------------------

TOOL_CALL_PARSERS: Mapping[str, ToolCallParser] = {
    parser.name: parser
    for parser in (
        ToolCallParser(
            name="qwen3_coder",
            markers=("<tool_call>", "<function="),
            find_blocks=_find_function_tags,
            parse_block=_parse_function_tag,
            template_sign="<parameter=",
        ),
        ToolCallParser(
            name="glm",
            markers=("<tool_call>",),
            find_blocks=_find_tool_call_tags,
            parse_block=_parse_glm,
            template_sign="<arg_key>",
        ),
        ToolCallParser(
            name="minimax",
            markers=("<minimax:tool_call>", "<tool_calls>"),
            find_blocks=_between(("<minimax:tool_call>", "</minimax:tool_call>"), ("<tool_calls>", "</tool_calls>")),
            parse_block=_parse_minimax,
            template_sign="<minimax:tool_call>",
        ),
        ToolCallParser(
            name="kimi",
            markers=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            find_blocks=_between(("<|tool_call_begin|>", "<|tool_call_end|>")),
            parse_block=_parse_kimi,
            template_sign="<|tool_call_begin|>",
        ),
        ToolCallParser(
            name="deepseek",
            markers=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            find_blocks=_between(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
            parse_block=_parse_deepseek,
            template_sign="tool▁call▁begin",
        ),
        ToolCallParser(
            name="mistral",
            markers=("[TOOL_CALLS]",),
            find_blocks=_find_mistral,
            parse_block=_parse_mistral,
            open_ended=True,
            template_sign="[TOOL_CALLS]",
        ),
        ToolCallParser(
            name="qwen",
            markers=("<tool_call>",),
            find_blocks=_find_tool_call_tags,
            parse_block=_parse_json,
            template_sign="<tool_call>",
        ),
        ToolCallParser(
            name="llama3",
            markers=(_PYTHON_TAG, '{"name"', "<function="),
            find_blocks=_find_bare,
            parse_block=_parse_bare,
            open_ended=True,
            bare=True,
            template_sign='{"name": function name, "parameters"',
        ),
        ToolCallParser(
            name="gemma",
            markers=("```", _PYTHON_TAG, '{"name"', "<function="),
            find_blocks=_find_fenced,
            parse_block=_parse_bare,
            open_ended=True,
            bare=True,
        ),
    )
}
"""Parsers by name; in the order in which signs are looked up, the more particular before the more general."""

JSON_LIST_PARSER = ToolCallParser(name="json", markers=(), find_blocks=_find_bare, parse_block=_parse_bare, bare=True)
"""For a forced tool choice: the grammar leaves a JSON list of calls and nothing else."""

SECTION_MARKERS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
"""Markers around all blocks together; they are dropped once the calls are parsed."""


def detect_tool_parser(template: str) -> ToolCallParser | None:
    """The parser whose sign occurs in a chat template, or in what the template rendered; None where none does."""
    signs = ((parser, parser.template_sign) for parser in TOOL_CALL_PARSERS.values())
    return next((parser for parser, sign in signs if sign is not None and sign in template), None)


def build_tool_list_schema(tools: ToolSchemas, *, parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of at least one call to these tools, spaced as models have seen it most."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": schema or {"type": "object"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, schema in tools.items()
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    }
    return schema if parallel else schema | {"maxItems": 1}
