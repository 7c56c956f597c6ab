"""Gemma: ``<start_of_turn>user`` or ``model``, the text trimmed, ``<end_of_turn>`` and a line's end behind each turn.

Where a template knows no tools (Gemma 2 and 3), a tool's result is written as the user's turn, and calls as JSON.
"""

import json
from typing import Any

from miles.rollout.session.families.family import Family
from miles.rollout.session.message import calls_of, function_of, text_of


def without_tools(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation for a template that knows users and models only, who take turns."""
    put: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and put and put[-1]["role"] == "user":
            put[-1]["content"] = f"{text_of(put[-1])}\n{text_of(message)}"
            continue
        calls = [json.dumps(_bare(call), ensure_ascii=False) for call in calls_of(message)]
        kept = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
        if calls:
            kept["content"] = "\n".join([*filter(None, [text_of(message)]), *calls])
        put.append(kept | {"role": "user"} if is_result else kept)
    return put


def _bare(call: Any) -> dict[str, Any]:
    function = function_of(call)
    return {"name": function.get("name"), "parameters": function.get("arguments")}


GEMMA = Family(
    name="gemma",
    signs=("<start_of_turn>user", "<end_of_turn>"),
    closes=("<end_of_turn>",),
    heads=("<start_of_turn>",),
    stops=("<eos>",),
    calls="gemma",
    differs=("whitespace",),
    adapt=without_tools,
)
