"""A tool is a name, a schema and an async call; a toolbox answers one attempt's calls, within limits.

What goes wrong has two sides. A call that fails (bad arguments, a refusal, a crash, no answer in time) is text for the
model, which may do better. A world that is broken (EnvironmentFailed) is nobody's mistake, and ends the attempt.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.core.errors import MilesError, PlugError

Message = Mapping[str, Any]
"""A chat message in OpenAI's form."""

_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class ToolError(Exception):
    """What a tool tells the model instead of a result."""


class EnvironmentFailed(Exception):
    """The world an attempt was made in broke; says how. The attempt is marked failed, with this as its reason."""


class ToolTimeUp(Exception):
    """The tools of an attempt have used all the time they have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """``parameters`` is a JSON schema of an object; ``call`` gets what was parsed and checked against its types.

    It raises ToolError, or anything else, to be heard by the model, and EnvironmentFailed to end the attempt.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[Mapping[str, Any]], Awaitable[str]]

    @property
    def spec(self) -> dict[str, Any]:
        """As OpenAI's ``tools`` want it, and as chat templates do."""
        about = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": about}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Bounds of an attempt's tools: seconds of one call and of all together, calls of one turn, length of a result."""

    call_seconds: float = 30.0
    tool_seconds: float = 300.0
    calls_per_turn: int = 16
    result_chars: int = 8192


@dataclass(slots=True)
class Tally:
    """What an attempt's tools have done so far."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


class Toolbox:
    """One attempt's tools. Calls are made one after the other: one may read what the one before it wrote."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            twice = next(name for name in names if names.count(name) > 1)
            raise PlugError(f"Two tools are called {twice}; leave one out, or give an MCP server a prefix.")
        self._limits = limits
        self.tally = Tally()

    @property
    def specs(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.spec for tool in self._tools.values())

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A message of the role ``tool`` for each call; ToolTimeUp when there is no time left to make one."""
        said: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            text = await self._result(call, number)
            name = str(call["function"]["name"])
            said.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": self._cut(text)})
        return said

    async def _result(self, call: Mapping[str, Any], number: int) -> str:
        self.tally.calls += 1
        try:
            if number >= self._limits.calls_per_turn:
                raise ToolError(f"only {self._limits.calls_per_turn} calls are answered in one turn")
            name = str(call["function"]["name"])
            if name not in self._tools:
                raise ToolError(f"there is no tool {name}, only {', '.join(self._tools) or 'none at all'}")
            tool = self._tools[name]
            return await self._timed(tool, parsed(call["function"]["arguments"], tool.parameters))
        except ToolError as error:
            self.tally.failures += 1
            return f"Error: {error}."

    async def _timed(self, tool: Tool, arguments: Mapping[str, Any]) -> str:
        left = self._limits.tool_seconds - self.tally.seconds
        if left <= 0:
            raise ToolTimeUp
        clock = asyncio.get_running_loop().time
        began = clock()
        limit = asyncio.timeout(min(left, self._limits.call_seconds))
        try:
            async with limit:
                result = await tool.call(arguments)
        except (ToolError, EnvironmentFailed, MilesError):
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                if left <= self._limits.call_seconds:
                    raise ToolTimeUp from error
                raise ToolError(f"{tool.name} gave no answer within {self._limits.call_seconds:g} seconds") from error
            raise ToolError(f"{tool.name} failed with {type(error).__name__}: {error}") from error
        finally:
            self.tally.seconds += clock() - began
        if not isinstance(result, str):  # a plug is not type-checked before it runs
            raise PlugError(f"The tool {tool.name} gave a {type(result).__name__}; return text.")
        return result

    def _cut(self, text: str) -> str:
        return cut(text, self._limits.result_chars)


def cut(text: str, most: int) -> str:
    """At most about ``most`` characters: what is too long loses its middle, and says how much.

    >>> cut("abcdefghij", 4)
    'ab\\n[... 6 characters left out ...]\\nij'
    """
    if len(text) <= most:
        return text
    head = most - most // 2
    return f"{text[:head]}\n[... {len(text) - most} characters left out ...]\n{text[len(text) - most // 2 :]}"


def parsed(arguments: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as an object with what the schema requires, of the types it names; else ToolError."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ToolError(f"the arguments are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise ToolError("the arguments must be one JSON object")
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in arguments:
            raise ToolError(f"the argument {name} is missing")
    for name, value in arguments.items():
        if name not in known:
            if schema.get("additionalProperties", True) is False:
                raise ToolError(f"there is no argument {name}, only {', '.join(known) or 'none'}")
            continue
        _check(name, value, known[name])
    return arguments


def _check(name: str, value: Any, schema: Any) -> None:
    if not isinstance(schema, Mapping):
        return
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"the argument {name} must be one of {', '.join(map(str, schema['enum']))}")
    wanted = schema.get("type")
    if wanted is None:
        return
    kinds = [wanted] if isinstance(wanted, str) else list(wanted)
    fits = any(isinstance(value, _TYPES.get(kind, (object,))) for kind in kinds)
    if isinstance(value, bool):  # JSON's true is no number, though Python's is
        fits = "boolean" in kinds
    if not fits:
        raise ToolError(f"the argument {name} must be of type {' or '.join(kinds)}")
