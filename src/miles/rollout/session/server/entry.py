"""A session as the server keeps it: whose engine answers, how tokens are drawn, how far it may go, who is waiting."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import Engine, Sampling
from miles.core.types import EMPTY, Status
from miles.rollout.session.message import Message
from miles.rollout.session.server.refusal import Refusal
from miles.rollout.session.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server allows. ``idle_seconds``: a session nobody has used for so long may be forgotten."""

    sessions: int = 4096
    idle_seconds: float = 3600.0
    turn_seconds: float = 1800.0
    body_mib: int = 64
    heartbeat_seconds: float = 10.0
    drain_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a session is opened with. ``held``: the run decides how tokens are drawn, whatever requests say of it.

    ``max_turns`` and ``max_tokens`` bound the replies of all its conversations together, and the tokens in them.
    """

    sampling: Sampling
    held: bool
    match: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    max_turns: int | None = None
    max_tokens: int | None = None


class Entry:
    """One session and what is going on in it. ``failure`` is the last turn that came to nothing, in a sentence.

    ``notes`` tell what in replies could not be read as it was meant. ``bounded``: a client opened it, so that the
    server's limits on sessions are for it.
    """

    def __init__(self, session: Session, engine: Engine, terms: Terms, now: float, *, bounded: bool) -> None:
        self.session = session
        self.engine = engine
        self.terms = terms
        self.bounded = bounded
        self.created = now
        self.used = now
        self.turns = 0
        self.written = 0
        self.aborted = False
        self.failure: str | None = None
        self.notes: list[str] = []
        self.closed = False
        self.responses: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._asked: Counter[int] = Counter()
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def running(self) -> int:
        """Turns under way."""
        return len(self._running)

    @property
    def status(self) -> Status:
        """How a trajectory of it ends as things stand, unless whoever ran the agent knows better."""
        if self.aborted:
            return Status.ABORTED
        leaves = self.session.tree.leaves()
        if not leaves:
            return Status.FAILED
        return Status.TRUNCATED if leaves[-1].nodes[-1].is_cut else Status.COMPLETED

    def check(self) -> int | None:
        """Refuse a turn beyond what the session may have; else how many tokens are left to it (None: any number)."""
        terms = self.terms
        if terms.max_turns is not None and self.turns + self.session.awaited >= terms.max_turns:
            raise Refusal(
                f"Session {self.id} has had the {terms.max_turns} turns it may have; end the agent's work here.",
                code="turn_limit",
            )
        if terms.max_tokens is None:
            return None
        if self.written >= terms.max_tokens:
            raise Refusal(
                f"Session {self.id} has written the {terms.max_tokens} tokens it may write; end the agent's work here.",
                code="token_limit",
            )
        return terms.max_tokens - self.written

    def asked_before(self, context: int) -> int:
        """How often this very context was asked before; asking counts."""
        self._asked[context] += 1
        return self._asked[context] - 1

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Have ``close`` end this, too, if it is still under way then."""
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    def close(self) -> None:
        """No turn from now on; those under way are cancelled."""
        self.closed = True
        for work in tuple(self._running):
            work.cancel()
