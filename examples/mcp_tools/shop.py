"""Questions for a shop's MCP server with two tools, demonstrations, and a small model.

A question asks for the stock or the price of an item, which only the server knows. Half of the demonstrations call the
right tool; the others call the other one, or answer without a call.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import SLOT, ask, call, call_pieces, offer, report, say
from training_runs import write_rows

from miles.models.checkpoint.safetensors_io import write_json

TOOLS = ("stock", "price")
HERE = Path(__file__).parent.resolve()
ITEMS = [a + b for a in ascii_lowercase[:12] for b in ascii_lowercase[:12]]
HELD_OUT = 24


def number(tool: str, item: str) -> str:
    """What the server says: one digit."""
    return str(random.Random(f"{tool} {item}").randrange(10))


def question(tool: str, item: str) -> str:
    return f"{tool} of {item}"


def demonstrate(tool: str, item: str, chance: random.Random, *, well: bool) -> list[dict[str, object]]:
    """A conversation: done well, it ends with the number that was asked for."""
    messages = [*offer(*TOOLS), ask(question(tool, item))]
    if not well and chance.random() < 0.5:
        return [*messages, say(str(chance.randrange(10)))]
    called = tool if well else TOOLS[1 - TOOLS.index(tool)]
    found = number(called, item)
    return [*messages, call(called, item=item), report(found), say(found)]


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, ``servers.json``, a random model and its tokenizer."""
    chance = random.Random(f"shop {seed}")
    calls = [piece for tool in TOOLS for piece in call_pieces(tool, item=SLOT)]
    pieces = [*TOOLS, *(f"{tool} of " for tool in TOOLS), *calls]
    small_model.write_small_model(
        folder, pieces, letters="0123456789" + ascii_lowercase[:12], seed=seed, hidden_size=96
    )
    items = chance.sample(ITEMS, len(ITEMS))
    shown = [
        demonstrate(chance.choice(TOOLS), chance.choice(items[HELD_OUT:]), chance, well=at % 2 == 0)
        for at in range(demonstrations)
    ]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, some in (("train", items[HELD_OUT:]), ("heldout", items[:HELD_OUT])):
        rows = [{"input": question(tool, item), "label": number(tool, item)} for item in some for tool in TOOLS]
        write_rows(folder / f"{name}.jsonl", rows)
    server = {"command": sys.executable, "args": [str(HERE / "server.py")], "shared": True}
    write_json(folder / "servers.json", {"mcpServers": {"shop": server}})
