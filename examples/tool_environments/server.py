"""An MCP server over stdio with one tool, which knows the numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from environment import hidden  # the file beside this one

SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOL = {"name": "look_up", "description": "The number behind two letters.", "inputSchema": SCHEMA}


def result(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """What a request is answered with."""
    if method == "initialize":
        about = {"name": "numbers", "version": "1"}
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": hidden(str(params["arguments"]["key"]))}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            reply = result(message["method"], message.get("params", {}))
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": reply}), flush=True)
