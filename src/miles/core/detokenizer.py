"""Incremental detokenizer: decodes a token stream without partial characters or partial stop strings.

How a token decodes may depend on the tokens before it (a space, a character made of several tokens), so new tokens are
always decoded together with a few previous ones; the text beyond the previous tokens' text is new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

DecodeFn = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 5
_REPLACEMENT_CHAR = "�"


class IncrementalDetokenizer:
    """The text of one response. ``prompt`` is the initial context; a partial stop string is held back."""

    def __init__(self, decode: DecodeFn, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._tokens = [int(token) for token in prompt[-CONTEXT_TOKENS:]]
        self._context = 0  # start of the context tokens that are decoded together with new ones
        self._decoded = self._prompt_end = len(self._tokens)
        self._context_text: str | None = None
        self._parts: list[str] = []
        self._stops = tuple(stops)

    def add(self, tokens: Sequence[int]) -> None:
        """Append sampled tokens."""
        self._tokens.extend(int(token) for token in tokens)

    def text(self) -> str:
        """Return the text that later tokens cannot change."""
        new = self._pending_text()
        if new and not new.endswith(_REPLACEMENT_CHAR):
            self._parts.append(new)
            self._context = self._decoded
            self._decoded = len(self._tokens)
            self._context_text = None
            new = ""
        text = self._finished_text() + new.rstrip(_REPLACEMENT_CHAR)
        return strip_partial_stop(text, self._stops)

    def last(self, *, stop: str | None, trim: bool, drop: int = 0) -> str:
        """Return the text without the last ``drop`` tokens, cut at the stop string (which stays unless ``trim``)."""
        if drop:
            del self._tokens[len(self._tokens) - drop :]
            if len(self._tokens) < self._decoded:  # dropped tokens were decoded already: decode again
                self._parts = []
                self._context = 0
                self._decoded = self._prompt_end
                self._context_text = None
        text = self._finished_text() + (self._pending_text() if len(self._tokens) > self._decoded else "")
        at = -1 if stop is None else text.find(stop)
        if stop is None or at < 0:
            return text
        return text[:at] if trim else text[: at + len(stop)]

    def _finished_text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def _pending_text(self) -> str:
        if self._context_text is None:
            context = self._tokens[self._context : self._decoded]
            self._context_text = self._decode(context) if context else ""
        return self._decode(self._tokens[self._context :])[len(self._context_text) :]


def strip_partial_stop(text: str, stops: Sequence[str]) -> str:
    """Return ``text`` without a suffix that is a proper prefix of one of ``stops``."""
    for length in range(min(len(text), max(map(len, stops), default=1) - 1), 0, -1):
        tail = text[len(text) - length :]
        if any(len(stop) > length and stop.startswith(tail) for stop in stops):
            return text[: len(text) - length]
    return text
