"""What a chat model wrote, in parts: its reasoning, what it says, and the tools it calls."""

from __future__ import annotations

from dataclasses import dataclass

from miles.backends.native.server.tools import Call, Format, Tools
from miles.core.spelling import certain

_THINK, _THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All of a reply so far. While it is coming each only grows."""

    reasoning: str
    content: str
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a reply is to be taken apart. ``thinking``: its reasoning is marked; ``opened``: the prompt has begun it."""

    format: Format | None = None
    tools: Tools | None = None
    thinking: bool = False
    opened: bool = False

    def parts(self, text: str, *, whole: bool) -> Parts:
        """``text`` in parts; while it is not ``whole``, nothing that may turn out to be a mark is given out."""
        reasoning = ""
        if self.thinking:
            reasoning, text = self._thoughts(text, whole)
        if self.format is None or self.tools is None:
            return Parts(reasoning=reasoning, content=text, calls=())
        content, calls = _said(text, self.format, self.tools, whole)
        return Parts(reasoning=reasoning, content=content, calls=tuple(calls))

    def _thoughts(self, text: str, whole: bool) -> tuple[str, str]:
        start = text.lstrip()
        if not self.opened and not start.startswith(_THINK):
            undecided = not whole and _THINK.startswith(start)
            return "", "" if undecided else text
        thought, mark, rest = start.removeprefix(_THINK).partition(_THOUGHT)
        if mark:
            return thought.strip(), rest.lstrip()
        return thought.strip() if whole else certain(thought, (_THOUGHT,)).strip(), ""


PLAIN = Manner()


def _said(text: str, format: Format, tools: Tools, whole: bool) -> tuple[str, list[Call]]:
    if not format.marks:
        calls = list(format.read(text, tools)) if whole else []
        return ("", calls) if calls or not whole else (text, [])
    at = min((place for mark in format.marks if (place := text.find(mark)) >= 0), default=-1)
    if at < 0:
        return text if whole else certain(text, format.marks).rstrip(), []
    calls = list(format.read(text[at:], tools))
    if whole and not calls:
        return text, []
    return text[:at].rstrip(), calls
