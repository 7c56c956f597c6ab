"""DeepSeek V3, V3.1 and R1: ``<｜User｜>`` and ``<｜Assistant｜>``, the end of the sentence behind each answer.

Behind tool results the assistant goes on without a head. R1 and V3.1 begin a turn with thoughts, and their templates
leave out those of earlier turns. R1's writes the frame of calls and of results in the first round only.
"""

from typing import Any

from miles.rollout.session.families.family import Family


def calls_alone(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A message of calls and no text: V3's template writes calls only where there is no content at all."""
    return [m | {"content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]


DEEPSEEK = Family(
    name="deepseek",
    signs=("<｜User｜>", "<｜Assistant｜>"),
    closes=("<｜end▁of▁sentence｜>",),
    heads=("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),
    inner=(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"),
        *("<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    ),
    calls="deepseek",
    thinking=True,
    passing=frozenset(("thinking",)),
    arguments_as_text=True,
    differs=("boundary", "whitespace", "thinking"),
    adapt=calls_alone,
    thoughts=r"(?:<think>.*?)?</think>|<think>.*$",
)
