"""The shop's MCP server over stdio: two tools, ``stock`` and ``price``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
sys.path.insert(0, str(Path(__file__).parent))
from mcp_server import ServedTool, serve
from shop import number  # the file beside this one

ABOUT = {"stock": "How many of an item there are.", "price": "What an item costs."}

if __name__ == "__main__":
    served = {
        tool: ServedTool(description=about, argument="item", answer=partial(number, tool))
        for tool, about in ABOUT.items()
    }
    serve("shop", served)
