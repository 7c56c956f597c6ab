"""gpt-oss: harmony's messages and channels (analysis: thoughts, commentary: calls, final: the answer).

An answer ends with ``<|return|>`` and a call with ``<|call|>``, both sampled; the template writes ``<|end|>`` for an
earlier answer, and leaves out its analysis. A turn is several messages, so ``<|end|>`` alone does not end it.
"""

from __future__ import annotations

import re
from typing import Any

from miles.core.spelling import certain
from miles.rollout.session.calls import Call, Tools, made
from miles.rollout.session.families.family import Family
from miles.rollout.session.lenient import Malformed
from miles.rollout.session.speech import Parts

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|$)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TO = re.compile(r"\bto=([^\s<]+)")
_ENDS = re.compile(r"<\|(?:end|return|call)\|>")
_MARKS = ("<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


def channels(text: str, tools: Tools, whole: bool) -> Parts:
    """A turn's messages by their channels; what stands in none is content."""
    if "<|message|>" not in text:
        return Parts(content=_plain(text)) if whole else Parts()  # what comes may say that this was no message
    thoughts: list[str] = []
    said: list[str] = []
    calls: list[Call] = []
    notes: list[str] = []
    told = whole  # behind a commentary there may be more thoughts, behind the final answer there are none
    at = 0
    for found in _MESSAGE.finditer(text):
        head, body = text[at : found.start()], found.group(1)
        at = found.end()
        ended = whole or at < len(text)
        channel, to = _CHANNEL.search(head), _TO.search(head)
        if to is not None and (channel is None or channel.group(1) != "final"):
            if ended:
                _call(to.group(1), body, tools, calls, said, notes)
            continue
        told = told or (channel is not None and channel.group(1) == "final")
        into = thoughts if channel is not None and channel.group(1) == "analysis" else said
        into.append(body if ended else certain(body, _MARKS))
    return Parts(
        reasoning="\n".join(thoughts).strip(),
        content="\n".join(said).strip() if told else "",
        calls=tuple(calls),
        notes=tuple(notes),
    )


def _call(to: str, body: str, tools: Tools, calls: list[Call], said: list[str], notes: list[str]) -> None:
    try:
        call = made(to.removeprefix("functions."), body, tools)
    except Malformed as error:
        notes.append(f"A tool call could not be read and was left in the text: {error}.")
        said.append(body)
        return
    calls.append(call)
    if call.note:
        notes.append(f"A call of {call.name} was read though {call.note}.")


def _plain(text: str) -> str:
    return _ENDS.sub("", text).strip()


def with_thoughts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Its template takes thoughts under ``thinking``, and beside a call either them or a text."""
    for message in messages:
        if thought := message.pop("reasoning_content", None):
            message["thinking"] = thought
            if message.get("tool_calls"):
                message["content"] = ""
    return messages


HARMONY = Family(
    name="harmony",
    signs=("<|start|>user<|message|>",),
    closes=("<|end|>", "<|return|>", "<|call|>"),
    heads=("<|start|>",),
    calls=None,
    thinking=True,
    differs=("boundary", "thinking", "tool_calls"),
    speech=channels,
    adapt=with_thoughts,
    wording=r"<\|channel\|>commentary|<\|constrain\|>|json(?=<\|message\|>)",
    thoughts=r"(?:assistant)?<\|channel\|>analysis<\|message\|>.*?(?=<\|end\|>|$)",
)
