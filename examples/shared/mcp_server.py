"""An MCP server over stdio in plain JSON-RPC: tools with one text argument each, which answer with a text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedTool:
    """A tool of the server: what it is for, the name of its argument, and the function that answers."""

    description: str
    argument: str
    answer: Callable[[str], str]


def serve(name: str, tools: Mapping[str, ServedTool]) -> None:
    """Answer requests on standard input until it is closed."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            reply = _result(name, tools, message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": reply}), flush=True)


def _result(name: str, tools: Mapping[str, ServedTool], method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "initialize":
        about = {"name": name, "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [_describe(tool, served) for tool, served in tools.items()]}
    if method == "tools/call":
        served = tools[params["name"]]
        return {"content": [{"type": "text", "text": served.answer(str(params["arguments"][served.argument]))}]}
    return {}


def _describe(name: str, served: ServedTool) -> dict[str, Any]:
    properties = {served.argument: {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": [served.argument]}
    return {"name": name, "description": served.description, "inputSchema": schema}
