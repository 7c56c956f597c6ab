"""Tool calls in a model's own words: a format for each way families write them.

A format finds blocks in a text, and reads one block into calls. A block that cannot be read raises Malformed, and what
a model wrote then stays what it said; nothing else is ever raised.
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

from miles.rollout.session.lenient import Malformed, Read, read_json, typed, values_in

Tools = Mapping[str, Mapping[str, Any]]
"""The tools a request offers: name -> the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call; ``arguments`` is the text of a JSON object. ``id`` where the model itself wrote one."""

    name: str
    arguments: str
    id: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of text that holds calls. ``body`` stands between its marks; not ``closed``: no last one."""

    start: int
    stop: int
    body: str
    closed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """How a family writes calls: ``find`` their blocks, ``read`` one. ``marks`` are what a block may begin with.

    ``endless``: a block may go on as long as the text does; ``bare``: without a mark, all of a text may be a call.
    """

    name: str
    marks: tuple[str, ...]
    find: Callable[[str], Iterator[Block]]
    read: Callable[[str, Tools], Sequence[Call]]
    endless: bool = False
    bare: bool = False


# -- making a call --------------------------------------------------------------------------


def made(name: Any, arguments: Any, tools: Tools, *, id: str | None = None, note: str | None = None) -> Call:
    """A call of a tool that was offered."""
    if not isinstance(name, str) or not name:
        raise Malformed("it names no tool")
    if name not in tools:
        raise Malformed(f"there is no tool {name!r}")
    if isinstance(arguments, str):
        read = read_json(arguments) if arguments.strip() else Read({})
        arguments, note = read.value, note or read.overlooked
    if arguments is not None and not isinstance(arguments, dict):
        raise Malformed("its arguments are not an object")
    return Call(name=name, arguments=json.dumps(arguments or {}, ensure_ascii=False), id=id, note=note)


def from_value(value: Any, tools: Tools, note: str | None = None) -> list[Call]:
    """Calls from ``{"name": ..., "arguments": {...}}`` or a list of such."""
    calls: list[Call] = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict):
            raise Malformed("it is not an object")
        inner = each.get("function")
        each = inner if isinstance(inner, dict) else each
        name = each.get("name", inner if isinstance(inner, str) else None)
        arguments = each.get("arguments", each.get("parameters", each.get("args")))
        calls.append(made(name, arguments, tools, note=note))
    if not calls:
        raise Malformed("it calls nothing")
    return calls


# -- finding blocks -------------------------------------------------------------------------


def _between(text: str, *, opens: Sequence[str], closes: Sequence[str]) -> Iterator[Block]:
    """Blocks between one of ``opens`` and the next of ``closes``; a last one may be open."""
    start, stop = (re.compile("|".join(map(re.escape, marks))) for marks in (opens, closes))
    at = 0
    while (head := start.search(text, at)) is not None:
        tail = stop.search(text, head.end())
        again = start.search(text, head.end())
        if tail is None or (again is not None and again.start() < tail.start()):
            # A mark before this block is closed begins the next one: this one was never closed.
            end = len(text) if again is None else again.start()
            yield Block(head.start(), end, text[head.end() : end], closed=False)
            at = end
        else:
            yield Block(head.start(), tail.end(), text[head.end() : tail.start()])
            at = tail.end()


def _between_marks(*pairs: tuple[str, str]) -> Callable[[str], Iterator[Block]]:
    return partial(_between, opens=[a for a, _ in pairs], closes=[b for _, b in pairs])


# -- the formats ----------------------------------------------------------------------------


def _json_body(body: str, tools: Tools) -> Sequence[Call]:
    read = read_json(body)
    return from_value(read.value, tools, read.overlooked)


_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|$)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)(?:</parameter>|(?=<parameter=)|$)", re.DOTALL)


def _spelled_out(body: str, tools: Tools) -> Sequence[Call]:
    """``<function=name><parameter=key>value</parameter></function>``; or JSON inside, as some write it."""
    found = _FUNCTION.search(body)
    if found is None:
        return _json_body(body, tools)
    name, inside = found.group(1).strip(), found.group(2)
    if "<parameter=" not in inside and inside.strip():
        read = read_json(inside)
        return [made(name, read.value, tools, note=read.overlooked)]
    words = {key.strip(): value.removeprefix("\n").removesuffix("\n") for key, value in _PARAMETER.findall(inside)}
    return [made(name, typed(words, tools.get(name, {})), tools)]


_PAIR = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)(?:</arg_value>|$)", re.DOTALL)


def _keyed(body: str, tools: Tools) -> Sequence[Call]:
    """``name<arg_key>key</arg_key><arg_value>value</arg_value>``; or JSON, as some write it."""
    name = body.partition("<arg_key>")[0].strip()
    if name.startswith("{"):
        return _json_body(body, tools)
    words = {key.strip(): value for key, value in _PAIR.findall(body)}
    return [made(name, typed(words, tools.get(name, {})), tools)]


def _fenced(body: str, tools: Tools) -> Sequence[Call]:
    """DeepSeek's: ``function<sep>name`` and a fenced block, or ``name<sep>{...}``."""
    head, mark, rest = body.partition("<｜tool▁sep｜>")
    if not mark:
        return _json_body(body, tools)
    if head.strip() == "function":
        name, _, rest = rest.lstrip().partition("\n")
    else:
        name = head
    read = read_json(rest) if rest.strip() else Read({})
    fenced = read.overlooked == "it stood in a fence"  # that is how they are taught
    return [made(name.strip(), read.value, tools, note=None if fenced else read.overlooked)]


def _numbered(body: str, tools: Tools) -> Sequence[Call]:
    """Kimi's: ``functions.name:0<|tool_call_argument_begin|>{...}``; the head is the call's id."""
    head, mark, rest = body.partition("<|tool_call_argument_begin|>")
    if not mark:
        raise Malformed("it has no arguments")
    id = head.strip()
    name = id.removeprefix("functions.").rpartition(":")[0] or id.removeprefix("functions.")
    read = read_json(rest) if rest.strip() else Read({})
    return [made(name, read.value, tools, id=id, note=read.overlooked)]


_INVOKE = re.compile(r"<invoke name=\"?([^\">]+)\"?>(.*?)(?:</invoke>|(?=<invoke )|$)", re.DOTALL)
_NAMED = re.compile(r"<parameter name=\"?([^\">]+)\"?[^>]*>(.*?)(?:</parameter>|(?=<parameter )|$)", re.DOTALL)


def _invoked(body: str, tools: Tools) -> Sequence[Call]:
    """MiniMax's: ``<invoke name="f"><parameter name="k">v</parameter></invoke>``, or a line of JSON for each."""
    found = _INVOKE.findall(body)
    if found:
        return [
            made(name, typed({k: v.strip("\n") for k, v in _NAMED.findall(inside)}, tools.get(name, {})), tools)
            for name, inside in found
        ]
    calls = [call for value, _, _ in values_in(body) for call in from_value(value, tools)]
    if not calls:
        raise Malformed("it calls nothing")
    return calls


def _listed(body: str, tools: Tools) -> Sequence[Call]:
    """Mistral's: ``[TOOL_CALLS] [{...}, {...}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each."""
    name, mark, rest = body.partition("[ARGS]")
    return [made(name.strip(), read_json(rest).value, tools)] if mark else _json_body(body, tools)


def _find_listed(text: str) -> Iterator[Block]:
    starts = [found.start() for found in re.finditer(re.escape("[TOOL_CALLS]"), text)]
    for start, stop in pairwise([*starts, len(text)]):
        yield Block(start, stop, text[start + len("[TOOL_CALLS]") : stop])


_PYTHON = "<|python_tag|>"


def _find_bare(text: str) -> Iterator[Block]:
    """Behind the python tag; or all of a text that begins like JSON or like a list of Python calls."""
    at = text.find(_PYTHON)
    if at >= 0:
        yield Block(at, len(text), text[at + len(_PYTHON) :])
        return
    body = text.strip()
    looks = body.startswith(("{", "[{")) and '"name"' in body
    if looks or re.match(r"\[\w+\(.*\)\]$", body, re.DOTALL):
        yield Block(0, len(text), body)
        return
    yield from _between(text, opens=["<function="], closes=["</function>"])


_FENCED = re.compile(r"```(?:tool_code|tool_call|json)\s*\n(.*?)(?:```|$)", re.DOTALL)


def _find_fenced(text: str) -> Iterator[Block]:
    """In a fence; or all of a text that begins like JSON or like a list of Python calls."""
    fences = [
        Block(found.start(), found.end(), found.group(1), closed=found.group().endswith("```"))
        for found in _FENCED.finditer(text)
    ]
    yield from fences or _find_bare(text)


def _bare(body: str, tools: Tools) -> Sequence[Call]:
    """Llama's: ``{"name": ..., "parameters": {...}}``, several with semicolons, or calls as Python writes them."""
    body = body.strip()
    if not body.startswith(("{", "[{")):
        name, mark, rest = body.partition(">")
        if mark and name in tools:
            return [made(name, rest, tools)]
        return _python(body, tools)
    values = list(values_in(body))
    if not values:
        return _json_body(body, tools)
    between = [body[a:b] for (_, _, a), (_, b, _) in pairwise(values)]
    left = "".join([*between, body[values[-1][2] :]]).replace(";", "").replace(",", "").strip()
    note = "something stood around its JSON" if left else None
    return [call for value, _, _ in values for call in from_value(value, tools, note)]


def _python(body: str, tools: Tools) -> Sequence[Call]:
    try:
        tree = ast.parse(body, mode="eval").body
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise Malformed("it is neither JSON nor a call") from error
    nodes = tree.elts if isinstance(tree, ast.List) else [tree]
    if not nodes:
        raise Malformed("it calls nothing")
    return [_python_call(node, tools) for node in nodes]


def _python_call(node: ast.expr, tools: Tools) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise Malformed("it is not a call with named arguments")
    try:
        words = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
        arguments = json.loads(json.dumps(words))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise Malformed("its arguments are not plain values") from error
    name = ast.unparse(node.func)
    return made(name.removesuffix(".call") if name not in tools else name, arguments, tools)


_TAGS = ("<tool_call>", "</tool_call>")
FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(name="qwen", marks=("<tool_call>",), find=_between_marks(_TAGS), read=_json_body),
        Format(
            name="qwen3_coder",
            marks=("<tool_call>", "<function="),
            find=_between_marks(_TAGS),
            read=_spelled_out,
        ),
        Format(name="glm", marks=("<tool_call>",), find=_between_marks(_TAGS), read=_keyed),
        Format(name="mistral", marks=("[TOOL_CALLS]",), find=_find_listed, read=_listed, endless=True),
        Format(
            name="deepseek",
            marks=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            find=_between_marks(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),
            read=_fenced,
        ),
        Format(
            name="kimi",
            marks=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            find=_between_marks(("<|tool_call_begin|>", "<|tool_call_end|>")),
            read=_numbered,
        ),
        Format(
            name="minimax",
            marks=("<minimax:tool_call>", "<tool_calls>"),
            find=_between_marks(("<minimax:tool_call>", "</minimax:tool_call>"), ("<tool_calls>", "</tool_calls>")),
            read=_invoked,
        ),
        Format(
            name="gemma",
            marks=("```", _PYTHON, '{"name"', "<function="),
            find=_find_fenced,
            read=_bare,
            endless=True,
            bare=True,
        ),
        Format(
            name="llama3",
            marks=(_PYTHON, '{"name"', "<function="),
            find=_find_bare,
            read=_bare,
            endless=True,
            bare=True,
        ),
    )
}
SECTIONS = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
"""Marks around all of the blocks, which say nothing more once the calls are read."""
