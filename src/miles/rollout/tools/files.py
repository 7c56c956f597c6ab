"""File tools: read, write, list and grep, all within a trajectory's workspace."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatch
from typing import Any

from miles.rollout.tools.tool import Tool, ToolError
from miles.rollout.tools.workspace import Workspace

_MAX_LINES = 200  # of what a search finds
_MAX_LINE_CHARS = 400
_MAX_PATTERN_CHARS = 200


def build_file_tools(workspace: Workspace) -> list[Tool]:
    """``read_file``, ``write_file``, ``list_files`` and ``grep``."""
    text = {"type": "string"}
    path = {"type": "string", "description": "A path from the workspace's root, such as notes/plan.txt."}

    async def read(arguments: Mapping[str, Any]) -> str:
        lines = _read_text(workspace, arguments["path"]).splitlines(keepends=True)
        first = max(1, arguments.get("first_line", 1))
        return "".join(lines[first - 1 : arguments.get("last_line", len(lines))])

    async def write(arguments: Mapping[str, Any]) -> str:
        data = arguments["content"].encode(errors="replace")
        workspace.write(arguments["path"], data)
        return f"Wrote {len(data)} bytes to {arguments['path']}."

    async def names(arguments: Mapping[str, Any]) -> str:
        pattern = arguments.get("pattern", "*")
        found = [name for name in workspace.names() if fnmatch(name, pattern)]
        return "\n".join(f"{name} ({(workspace.root / name).stat().st_size} bytes)" for name in found) or "No files."

    async def grep(arguments: Mapping[str, Any]) -> str:
        return _grep_files(workspace, arguments["text"], arguments.get("pattern", "*"))

    line = {"type": "integer", "minimum": 1}
    pattern = {"type": "string", "description": "Which paths, such as *.py; all when absent."}
    return [
        _tool(
            "read_file",
            "Read a text file of the workspace, or some of its lines.",
            {"path": path, "first_line": line, "last_line": line},
            ["path"],
            read,
        ),
        _tool(
            "write_file",
            "Write a text file of the workspace; one that is there is replaced.",
            {"path": path, "content": text},
            ["path", "content"],
            write,
        ),
        _tool("list_files", "List the files of the workspace.", {"pattern": pattern}, [], names),
        _tool(
            "grep",
            "Find the lines of the workspace's files that contain a text.",
            {"text": {"type": "string", "description": "What the lines contain, to the letter."}, "pattern": pattern},
            ["text"],
            grep,
        ),
    ]


def _tool(
    name: str,
    description: str,
    properties: Mapping[str, Any],
    required: list[str],
    call: Callable[[Mapping[str, Any]], Awaitable[str]],
) -> Tool:
    schema = {"type": "object", "properties": properties, "required": required}
    return Tool(name=name, description=description, parameters=schema, call=call)


def _read_text(workspace: Workspace, name: str) -> str:
    data = workspace.read(name)
    if b"\0" in data[:4096]:
        raise ToolError(f"{name!r} is not text")
    return data.decode(errors="replace")


def _grep_files(workspace: Workspace, text_to_find: str, pattern: str) -> str:
    """Search for literal text: a regular expression written by a model may never finish matching."""
    if not text_to_find or len(text_to_find) > _MAX_PATTERN_CHARS:
        raise ToolError(f"the text must have 1 to {_MAX_PATTERN_CHARS} characters")
    regex = re.compile(re.escape(text_to_find), re.IGNORECASE)
    lines: list[str] = []
    for name in workspace.names():
        if not fnmatch(name, pattern):
            continue
        data = workspace.read(name)
        if b"\0" in data[:4096]:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            if regex.search(line):
                lines.append(f"{name}:{number}: {line[:_MAX_LINE_CHARS]}")
            if len(lines) == _MAX_LINES:
                return "\n".join([*lines, "[... and perhaps more ...]"])
    return "\n".join(lines) or "No line contains it."
