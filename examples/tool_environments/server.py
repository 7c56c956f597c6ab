"""An MCP server over stdio with one tool, which knows the numbers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from environment import hidden  # the file beside this one
from mcp_server import ServedTool, serve

if __name__ == "__main__":
    look_up = ServedTool(description="The number behind two letters.", argument="key", answer=hidden)
    serve("numbers", {"look_up": look_up})
