"""Sessions: what was asked and answered in one is remembered, so that a request says only what is new.

A session is a tree of requests by their names. A request begins anew, or goes on behind one that has ended: its prompt
is then that one's prompt and answer with the new tokens behind. Nothing is computed twice, because the engine finds
the beginning in its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles.backends.native.answer import Answer
from miles.backends.native.server.refusal import Refusal
from miles.backends.native.server.wish import Turn
from miles.core.types import Tokens

MOST_SESSIONS = 65536


@dataclass(slots=True)
class Node:
    """One request of a session. ``answer`` is there while it may still grow."""

    prompt: Tokens
    answer: Answer | None
    written: Tokens
    children: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.answer is None or self.answer.finish is not None

    def output(self) -> Tokens:
        """What was answered so far."""
        return self.written if self.answer is None else _array(self.answer.tokens)


@dataclass(slots=True)
class Session:
    """``seconds`` without a request end it; None: only ``close`` does."""

    seconds: float | None
    seen: float
    nodes: dict[str, Node] = field(default_factory=dict)

    def forget(self, names: Sequence[str]) -> None:
        """These requests, and all that went on behind them."""
        for name in names:
            node = self.nodes.pop(name, None)
            if node is not None:
                self.forget(node.children)


class Sessions:
    """All that are open; on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._mortal: set[str] = set()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, name: str, seconds: float | None) -> bool:
        """False where there is one of this name already."""
        self._reap()
        if len(self._open) >= MOST_SESSIONS:
            raise Refusal(f"There are {MOST_SESSIONS} sessions already; close some.")
        if name in self._open:
            return False
        self._open[name] = Session(seconds, self._clock())
        if seconds is not None:
            self._mortal.add(name)
        return True

    def close(self, name: str) -> None:
        """What is under way goes on; a name that nobody has is no error."""
        self._open.pop(name, None)
        self._mortal.discard(name)

    def unfinished(self, turn: Turn) -> str | None:
        """The request under way that a turn takes the place of, and which is to be aborted."""
        node = self._find(turn).nodes.get(turn.behind or "")
        return turn.behind if turn.replace and node is not None and not node.ended else None

    def prompt_of(self, turn: Turn, tokens: list[int], begins: int | None) -> list[int]:
        """All that the model is to read; ``begins`` is the token a text begins with, and no later part of it."""
        session = self._find(turn)
        session.seen = self._clock()
        if turn.behind is None:
            if turn.replace:
                session.nodes.clear()
            return tokens
        node = session.nodes.get(turn.behind)
        if node is None:
            raise Refusal(
                f"Session {turn.session!r} has no request {turn.behind!r} to go on behind.", param="session_params.rid"
            )
        if turn.replace:
            session.forget(node.children)
            node.children.clear()
        elif not node.ended:
            raise Refusal(f"Request {turn.behind!r} has not ended yet, so that none can go on behind it.")
        before = node.prompt if turn.drop_output else np.concatenate((node.prompt, node.output()))
        if turn.offset:
            before = before[: turn.offset]
        rest = tokens[1:] if begins is not None and tokens[:1] == [begins] else tokens
        return [*before.tolist(), *rest]

    def began(self, turn: Turn, rid: str, prompt: Sequence[int], answer: Answer) -> None:
        """A turn was taken; others may go on behind it when it has ended."""
        session = self._find(turn)
        session.nodes[rid] = Node(_array(prompt), answer, _array(()))
        if turn.behind is not None and turn.behind in session.nodes:
            session.nodes[turn.behind].children.append(rid)

    def ended(self, turn: Turn, rid: str) -> None:
        """It grows no more: what it wrote is kept, and nothing else of it."""
        session = self._open.get(turn.session)
        node = None if session is None else session.nodes.get(rid)
        if session is not None and node is not None:
            node.written, node.answer = node.output(), None
            session.seen = self._clock()

    def _find(self, turn: Turn) -> Session:
        self._reap()
        session = self._open.get(turn.session)
        if session is None:
            raise Refusal(f"Session {turn.session!r} is not open.", param="session_params.id")
        return session

    def _reap(self) -> None:
        now = self._clock()
        for name in list(self._mortal):
            session = self._open[name]
            idle = session.seconds is not None and now - session.seen > session.seconds
            if idle and all(node.ended for node in session.nodes.values()):
                self.close(name)


def _array(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)
