"""The sessions that are open: found by id, bounded in number, forgotten when nobody has used them for long."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Iterator

from miles.core.protocols import Engine
from miles.core.types import Prompt
from miles.rollout.session.match import Match
from miles.rollout.session.render import Renderer
from miles.rollout.session.server.entry import Entry, Limits, Terms
from miles.rollout.session.server.refusal import Refusal
from miles.rollout.session.session import Session

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Sessions:
    """Used on one event loop. ``clock`` counts seconds; which of them does not matter."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        limits: Limits,
        max_context_len: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.draining = False
        self.clock = clock
        self._renderer = renderer
        self._max_context_len = max_context_len
        self._open: dict[str, Entry] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._turns = 0

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, id: object) -> bool:
        return id in self._open

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._open.values()))

    @property
    def turns(self) -> int:
        """Turns under way in all of them."""
        return self._turns

    def open(
        self,
        engine: Engine,
        match: Match,
        terms: Terms,
        *,
        id: str | None = None,
        prompt: Prompt | None = None,
        bounded: bool,
    ) -> Entry:
        """A new session; of ``bounded`` ones, at the limit, one that was not used for long makes room."""
        if self.draining:
            raise going_down()
        if id is not None and not _ID.fullmatch(id):
            raise Refusal("id must be 1 to 128 letters, digits, dots, dashes and underscores.", param="id")
        if id in self._open:
            raise Refusal(
                f"There is a session {id} already; leave id out to get one of its own.", status=409, param="id"
            )
        if bounded and self._bounded >= self.limits.sessions:
            self._forget()
        if bounded and self._bounded >= self.limits.sessions:
            raise Refusal(
                f"{self._bounded} sessions are open, which is the limit; delete those that are done with.",
                status=429,
                again=True,
            )
        name = id or uuid.uuid4().hex
        session = Session(name, self._renderer, match=match, prompt=prompt, max_context_len=self._max_context_len)
        self._open[name] = entry = Entry(session, engine, terms, self.clock(), bounded=bounded)
        return entry

    def find(self, id: str) -> Entry:
        """The session of that id; to look for it is to use it."""
        entry = self._open.get(id)
        if entry is None:
            raise Refusal(
                f"There is no session {id[:128]}: it was never opened, was deleted, or nobody used it for long.",
                status=404,
            )
        entry.used = self.clock()
        return entry

    @property
    def _bounded(self) -> int:
        return sum(entry.bounded for entry in self._open.values())

    def close(self, id: str) -> Entry:
        """Take a session out; its turns under way are aborted."""
        entry = self.find(id)
        del self._open[id]
        entry.close()
        return entry

    def close_all(self) -> None:
        for id in tuple(self._open):
            self.close(id)

    def enter(self) -> None:
        """A turn begins."""
        self._turns += 1
        self._quiet.clear()

    def leave(self) -> None:
        """A turn has ended, however it did."""
        self._turns -= 1
        if not self._turns:
            self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no turn is under way."""
        await self._quiet.wait()

    def _forget(self) -> None:
        before = self.clock() - self.limits.idle_seconds
        for entry in self:
            if entry.bounded and entry.used < before and not entry.running:
                self.close(entry.id)


def going_down() -> Refusal:
    """What is said while the server ends."""
    return Refusal("The session server is shutting down and takes nothing new.", status=503)
