"""Text of tokens as they come: never half a character, never the beginning of what may become a stop string.

A tokenizer may spell a token differently behind another (a space, a character in several tokens), so tokens are always
spelled behind a few known ones: what comes out beyond those is the new text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Spell = Callable[[Sequence[int]], str]

BEHIND = 5
_BROKEN = "�"


class Spelling:
    """The text of one answer. ``prompt`` gives it its first context; ``stops`` are held back when they may begin."""

    def __init__(self, spell: Spell, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._spell = spell
        self._tokens = [int(token) for token in prompt[-BEHIND:]]
        self._context = 0  # where the known tokens begin that the next ones are spelled behind
        self._known = self._first = len(self._tokens)
        self._known_text: str | None = None
        self._parts: list[str] = []
        self._stops = tuple(stops)

    def add(self, tokens: Sequence[int]) -> None:
        """Tokens that were written."""
        self._tokens.extend(int(token) for token in tokens)

    def text(self) -> str:
        """What is certain so far."""
        new = self._new()
        if new and not new.endswith(_BROKEN):
            self._parts.append(new)
            self._context, self._known, self._known_text = self._known, len(self._tokens), None
            new = ""
        whole = self._settled() + new.rstrip(_BROKEN)
        return certain(whole, self._stops)

    def last(self, *, stop: str | None, trim: bool, drop: int = 0) -> str:
        """All of it, without the last ``drop`` tokens; up to a stop string, or with it where it is not trimmed."""
        if drop:
            del self._tokens[len(self._tokens) - drop :]
            if len(self._tokens) < self._known:  # too much was settled: spell it anew
                self._parts, self._context, self._known, self._known_text = [], 0, self._first, None
        whole = self._settled() + (self._new() if len(self._tokens) > self._known else "")
        at = -1 if stop is None else whole.find(stop)
        if stop is None or at < 0:
            return whole
        return whole[:at] if trim else whole[: at + len(stop)]

    def _settled(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def _new(self) -> str:
        if self._known_text is None:
            known = self._tokens[self._context : self._known]
            self._known_text = self._spell(known) if known else ""
        return self._spell(self._tokens[self._context :])[len(self._known_text) :]


def certain(text: str, marks: Sequence[str]) -> str:
    """``text`` without an end that is the beginning of one of ``marks``, but not all of it."""
    for length in range(min(len(text), max(map(len, marks), default=1) - 1), 0, -1):
        tail = text[len(text) - length :]
        if any(len(mark) > length and mark.startswith(tail) for mark in marks):
            return text[: len(text) - length]
    return text
