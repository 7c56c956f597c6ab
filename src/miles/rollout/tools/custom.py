"""User-defined tools: an async function, a Tool, or a list of specs run by member function."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from miles.core.errors import HookError
from miles.rollout.tools.tool import Tool

_JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}


class ExecuteToolFn(Protocol):
    """Runs the tool ``name``; the model reads what it returns."""

    async def __call__(self, name: str, params: dict[str, Any]) -> str: ...


def tool_from_function(tool_or_function: Any, source: str) -> Tool:
    """Convert an async function to a Tool, from its name, docstring and annotated arguments; return a Tool as it is.

    >>> async def add(a: int, b: int = 0) -> str:
    ...     "Add two numbers."
    ...     return str(a + b)
    >>> tool_from_function(add, "add").parameters["properties"], tool_from_function(add, "add").parameters["required"]
    ({'a': {'type': 'integer'}, 'b': {'type': 'integer'}}, ['a'])
    """
    if isinstance(tool_or_function, Tool):
        return tool_or_function
    if not inspect.iscoroutinefunction(tool_or_function):
        raise HookError(
            f"{source} is a {type(tool_or_function).__name__}; a tool is an async function or a miles Tool."
        )
    hints = typing.get_type_hints(tool_or_function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in inspect.signature(tool_or_function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) or name not in hints:
            raise HookError(f"{source}: the argument {name} needs a name and a type, such as {name}: str.")
        properties[name] = _schema(hints[name], f"{source}: the argument {name}")
        if parameter.default is parameter.empty:
            required.append(name)

    async def call(arguments: Mapping[str, Any]) -> str:
        return await tool_or_function(**{name: value for name, value in arguments.items() if name in properties})

    schema = {"type": "object", "properties": properties, "required": required}
    function = inspect.cleandoc(tool_or_function.__doc__ or tool_or_function.__name__)
    return Tool(name=tool_or_function.__name__, description=function, parameters=schema, call=call)


def tools_from_specs(specs: Sequence[Mapping[str, Any]], execute: ExecuteToolFn, source: str) -> list[Tool]:
    """Build a tool for each spec in OpenAI's format, all run by ``execute(name, params)``."""
    tools: list[Tool] = []
    for spec in specs:
        function = spec.get("function")
        if spec.get("type") != "function" or not isinstance(function, Mapping) or "name" not in function:
            raise HookError(
                f"{source}: a spec must be {{'type': 'function', 'function': {{'name': ...}}}}, not {spec!r}."
            )
        tools.append(
            Tool(
                name=str(function["name"]),
                description=str(function.get("description", "")),
                parameters=function.get("parameters") or {"type": "object", "properties": {}},
                call=_bind_name(execute, str(function["name"])),
            )
        )
    return tools


def _bind_name(execute: ExecuteToolFn, name: str) -> Callable[[Mapping[str, Any]], Awaitable[str]]:
    async def call(arguments: Mapping[str, Any]) -> str:
        return await execute(name, dict(arguments))

    return call


def _schema(hint: Any, source: str) -> dict[str, Any]:
    if hint in _JSON_TYPES:
        return {"type": _JSON_TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _JSON_TYPES:
        return {"type": _JSON_TYPES[origin]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        members = [member for member in arguments if member is not type(None)]
        if len(members) == 1:
            return _schema(members[0], source)
    raise HookError(f"{source} has the type {hint}; use str, int, float, bool, list, dict or Literal[...].")
