"""Tools of a user's own: an async function, a finished Tool, or a list of specs with one function that runs all."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from miles.core.errors import PlugError
from miles.rollout.tools.tool import Tool

_KINDS: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


class Execute(Protocol):
    """Runs the tool ``name``; what it returns is told to the model."""

    async def __call__(self, name: str, params: dict[str, Any]) -> str: ...


def tool_of(thing: Any, asker: str) -> Tool:
    """A Tool as it is; an async function as the tool of its name, its docstring and its annotated arguments.

    >>> async def add(a: int, b: int = 0) -> str:
    ...     "Add two numbers."
    ...     return str(a + b)
    >>> tool_of(add, "add").parameters["properties"], tool_of(add, "add").parameters["required"]
    ({'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, ['a'])
    """
    if isinstance(thing, Tool):
        return thing
    if not inspect.iscoroutinefunction(thing):
        raise PlugError(f"{asker} is a {type(thing).__name__}; a tool is an async function or a miles Tool.")
    hints = typing.get_type_hints(thing)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(thing).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise PlugError(f"{asker}: the argument {name} needs a name and a type, such as {name}: str.")
        properties[name] = _schema(hints[name], f"{asker}: the argument {name}")
        if parameter.default is parameter.empty:
            required.append(name)

    async def call(arguments: Mapping[str, Any]) -> str:
        return await thing(**{name: value for name, value in arguments.items() if name in properties})

    schema = {"type": "object", "properties": properties, "required": required}
    about = inspect.cleandoc(thing.__doc__ or thing.__name__)
    return Tool(name=thing.__name__, description=about, parameters=schema, call=call)


def tools_of(specs: Sequence[Mapping[str, Any]], execute: Execute, asker: str) -> list[Tool]:
    """A tool for each spec in OpenAI's form, all run by ``execute(name, params)``."""
    found: list[Tool] = []
    for spec in specs:
        about = spec.get("function")
        if spec.get("type") != "function" or not isinstance(about, Mapping) or "name" not in about:
            raise PlugError(
                f"{asker}: a spec must be {{'type': 'function', 'function': {{'name': ...}}}}, not {spec!r}."
            )
        found.append(
            Tool(
                name=str(about["name"]),
                description=str(about.get("description", "")),
                parameters=about.get("parameters") or {"type": "object", "properties": {}},
                call=_bound(execute, str(about["name"])),
            )
        )
    return found


def _bound(execute: Execute, name: str) -> Callable[[Mapping[str, Any]], Awaitable[str]]:
    async def call(arguments: Mapping[str, Any]) -> str:
        return await execute(name, dict(arguments))

    return call


def _schema(hint: Any, asker: str) -> dict[str, Any]:
    if hint in _KINDS:
        return {"type": _KINDS[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in _KINDS:
        return {"type": _KINDS[origin]}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        some = [one for one in inner if one is not type(None)]
        if len(some) == 1:
            return _schema(some[0], asker)
    raise PlugError(f"{asker} has the type {hint}; use str, int, float, bool, list, dict or Literal[...].")
