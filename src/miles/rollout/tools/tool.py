"""Tools: a name, a JSON schema and an async call; a Toolbox runs one trajectory's calls under limits.

A call that fails (bad arguments, a refusal, a crash, a timeout) is reported to the model, which may try again. A broken
environment (EnvironmentFailed) is nobody's mistake, and ends the trajectory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles.core.errors import HookError, MilesError, describe_error

Message = Mapping[str, Any]
"""A chat message in OpenAI's format."""

ToolResult = str | Sequence[Mapping[str, Any]] | Any
"""Text, content parts, or a ``PIL.Image``."""

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
    """An error that is reported to the model instead of a result."""


class EnvironmentFailed(Exception):
    """The environment of a trajectory broke. The trajectory is marked failed, with this message as the reason."""


class ToolTimeExceeded(Exception):
    """The tools of a trajectory have used up their time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """``parameters`` is a JSON schema of an object; ``call`` gets arguments that were parsed and type-checked.

    It returns a text, an image (a ``PIL.Image``), or content parts such as ``{"type": "image", "image": ...}``. It
    raises ToolError, or any other error, to report it to the model, and EnvironmentFailed to end the trajectory.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    call: Callable[[Mapping[str, Any]], Awaitable[ToolResult]]

    @property
    def spec(self) -> dict[str, Any]:
        """The tool in OpenAI's ``tools`` format, which chat templates use too."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Limits of a trajectory's tools: seconds per call and in total, calls per turn, length of a result."""

    call_seconds: float = 30.0
    tool_seconds: float = 300.0
    calls_per_turn: int = 16
    result_chars: int = 8192


@dataclass(slots=True)
class ToolStats:
    """Call counts and total seconds of a trajectory's tools."""

    calls: int = 0
    failures: int = 0
    seconds: float = 0.0


class Toolbox:
    """One trajectory's tools. Calls run one after the other, since one may read what the previous one wrote."""

    def __init__(self, tools: Sequence[Tool], limits: ToolLimits) -> None:
        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.name for tool in tools]
            duplicate = next(name for name in names if names.count(name) > 1)
            raise HookError(f"Two tools are called {duplicate}; leave one out, or give an MCP server a prefix.")
        self._limits = limits
        self.stats = ToolStats()

    @property
    def specs(self) -> tuple[dict[str, Any], ...]:
        return tuple(tool.spec for tool in self._tools.values())

    async def answer(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Run the calls; returns a ``tool`` message for each. Raises ToolTimeExceeded when no time is left."""
        messages: list[dict[str, Any]] = []
        for number, call in enumerate(calls):
            content = self._truncate(await self._run_call(call, number))
            name = str(call["function"]["name"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
        return messages

    async def _run_call(self, call: Mapping[str, Any], number: int) -> str | list[dict[str, Any]]:
        self.stats.calls += 1
        try:
            if number >= self._limits.calls_per_turn:
                raise ToolError(f"only {self._limits.calls_per_turn} calls are answered in one turn")
            name = str(call["function"]["name"])
            if name not in self._tools:
                raise ToolError(f"there is no tool {name}, only {', '.join(self._tools) or 'none at all'}")
            tool = self._tools[name]
            return await self._call_with_timeout(tool, parse_arguments(call["function"]["arguments"], tool.parameters))
        except ToolError as error:
            self.stats.failures += 1
            return f"Error: {error}."

    async def _call_with_timeout(self, tool: Tool, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        left = self._limits.tool_seconds - self.stats.seconds
        if left <= 0:
            raise ToolTimeExceeded
        clock = asyncio.get_running_loop().time
        start = clock()
        limit = asyncio.timeout(min(left, self._limits.call_seconds))
        try:
            async with limit:
                result = await tool.call(arguments)
        except (ToolError, EnvironmentFailed, MilesError):
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                if left <= self._limits.call_seconds:
                    raise ToolTimeExceeded from error
                raise ToolError(f"{tool.name} gave no answer within {self._limits.call_seconds:g} seconds") from error
            raise ToolError(f"{tool.name} failed with {describe_error(error)}") from error
        finally:
            self.stats.seconds += clock() - start
        return _check_result(result, tool.name)

    def _truncate(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        limit = self._limits.result_chars
        if isinstance(content, str):
            return truncate_middle(content, limit)
        return [
            {**part, "text": truncate_middle(part["text"], limit)} if part["type"] == "text" else part
            for part in content
        ]


def _check_result(result: Any, name: str) -> str | list[dict[str, Any]]:
    """A tool's result as content of a message; a user's tool is not type-checked before it runs."""
    if isinstance(result, str):
        return result
    if type(result).__module__.startswith("PIL."):
        return [{"type": "image", "image": result}]
    if not isinstance(result, list | tuple) or not result:
        raise HookError(f"The tool {name} gave a {type(result).__name__}; return text, an image, or content parts.")
    for part in result:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "image", "image_url") or (kind == "text" and not isinstance(part.get("text"), str)):
            raise HookError(
                f"The tool {name} gave a part that is neither text nor an image; return parts such as "
                '{"type": "image", "image": image}.'
            )
    return [dict(part) for part in result]


def truncate_middle(text: str, limit: int) -> str:
    """Cut the middle out of a text that is longer than function ``limit`` characters, and say how much is missing.

    >>> truncate_middle("abcdefghij", 4)
    'ab\\n[... 6 characters left out ...]\\nij'
    """
    if len(text) <= limit:
        return text
    head = limit - limit // 2
    return f"{text[:head]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - limit // 2 :]}"


def parse_arguments(arguments: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Parse a call's arguments and check them against the schema's required names and types; ToolError if invalid."""
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
    expected = schema.get("type")
    if expected is None:
        return
    types = [expected] if isinstance(expected, str) else list(expected)
    fits = any(isinstance(value, _TYPES.get(kind, (object,))) for kind in types)
    if isinstance(value, bool):  # true is no number in JSON, though it is in Python
        fits = "boolean" in types
    if not fits:
        raise ToolError(f"the argument {name} must be of type {' or '.join(types)}")
