"""The open sessions: found by a secret key, limited in number, closed when idle; and the state of each."""

from __future__ import annotations

import asyncio
import re
import secrets
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import Engine, SamplingParams
from miles.core.types import EMPTY, Prompt, Status
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.messages import Message
from miles.rollout.session.match import MessageMatcher
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.session import Session

_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """What the server allows. ``idle_seconds``: a session that was unused for so long may be closed."""

    sessions: int = 4096
    idle_seconds: float = 3600.0
    turn_seconds: float = 1800.0
    body_mib: int = 64
    heartbeat_seconds: float = 10.0
    drain_seconds: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What a session is opened with. ``hold``: requests cannot change how its tokens are sampled.

    ``max_turns`` and ``max_tokens`` limit the replies of all its conversations together, and their tokens. Of
    ``metadata`` only the keys in ``visible_metadata`` are shown at the session's URL, which the agent knows.
    """

    sampling: SamplingParams
    hold: bool
    match: str
    metadata: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    visible_metadata: tuple[str, ...] = ()
    max_turns: int | None = None
    max_tokens: int | None = None


class SessionEntry:
    """One session and its running turns. ``failure`` says why the last failed turn failed.

    ``id`` is a name for people: the same in every run, recorded, and known to others. ``key`` is the secret in the
    session's URL, new each time; whoever has it may use the session, so it is never logged or recorded.

    ``notes`` say what in replies could not be parsed as it was meant. ``limited``: a client opened it over HTTP, so
    the server's limit on sessions applies to it.
    """

    def __init__(
        self, session: Session, engine: Engine, settings: SessionSettings, now: float, *, limited: bool
    ) -> None:
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self.session = session
        self.engine = engine
        self.settings = settings
        self.limited = limited
        self.last_used = now
        self.num_turns = 0
        self.num_tokens = 0
        self.aborted = False
        self.failure: str | None = None
        self.notes: list[str] = []
        self.closed = False
        self.responses: OrderedDict[str, tuple[Message, ...]] = OrderedDict()
        self._requested: Counter[int] = Counter()
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def status(self) -> Status:
        """The status of its trajectory so far, unless whoever runs the agent knows better."""
        if self.aborted:
            return Status.ABORTED
        leaves = self.session.tree.leaves()
        if not leaves:
            return Status.FAILED
        return Status.TRUNCATED if leaves[-1].nodes[-1].is_truncated else Status.COMPLETED

    def check_limits(self) -> int | None:
        """Refuse a turn over the session's limits; else the number of tokens left to it (None: unlimited)."""
        settings = self.settings
        if settings.max_turns is not None and self.num_turns + self.session.num_pending >= settings.max_turns:
            raise RequestError(
                f"Session {self.id} has used all of its {settings.max_turns} turns; end the agent's work here.",
                code="turn_limit",
            )
        if settings.max_tokens is None:
            return None
        if self.num_tokens >= settings.max_tokens:
            raise RequestError(
                f"Session {self.id} has used all of its {settings.max_tokens} tokens; end the agent's work here.",
                code="token_limit",
            )
        return settings.max_tokens - self.num_tokens

    def count_request(self, context_hash: int) -> int:
        """How often this very context was requested before; the call itself counts."""
        self._requested[context_hash] += 1
        return self._requested[context_hash] - 1

    def watch(self, work: asyncio.Future[Any]) -> None:
        """Have ``close`` cancel ``work`` if it is still running."""
        self._running.add(work)
        work.add_done_callback(self._running.discard)

    def close(self) -> None:
        """Take no more turns; running ones are cancelled."""
        self.closed = True
        for work in tuple(self._running):
            work.cancel()


class SessionRegistry:
    """All open sessions, used on one event loop. ``clock`` is a monotonic clock in seconds."""

    def __init__(
        self,
        renderer: ChatRenderer,
        *,
        limits: SessionLimits,
        max_context_len: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.limits = limits
        self.draining = False
        self.clock = clock
        self._renderer = renderer
        self._max_context_len = max_context_len
        self._entries: dict[str, SessionEntry] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SessionEntry]:
        return iter(tuple(self._entries.values()))

    @property
    def num_turns(self) -> int:
        """Running turns of all sessions."""
        return self._num_turns

    def open(
        self,
        engine: Engine,
        match: MessageMatcher,
        settings: SessionSettings,
        *,
        id: str | None = None,
        prompt: Prompt | None = None,
        limited: bool,
    ) -> SessionEntry:
        """A new session named ``id``, or a random name; at the limit, an idle ``limited`` one is closed for it."""
        if self.draining:
            raise shutdown_error()
        if id is not None and not _ID.fullmatch(id):
            raise RequestError("id must be 1 to 128 letters, digits, dots, dashes and underscores.", param="id")
        if limited and self._count_limited() >= self.limits.sessions:
            self._close_idle()
        if limited and self._count_limited() >= self.limits.sessions:
            raise RequestError(
                f"{self._count_limited()} sessions are open, which is the limit; delete those that are finished.",
                status=429,
                retryable=True,
            )
        name = id or uuid.uuid4().hex
        session = Session(name, self._renderer, match=match, prompt=prompt, max_context_len=self._max_context_len)
        entry = SessionEntry(session, engine, settings, self.clock(), limited=limited)
        self._entries[entry.key] = entry
        return entry

    def find(self, key: str) -> SessionEntry:
        """The session of that key; this counts as a use."""
        entry = self._entries.get(key)
        if entry is None:
            raise RequestError(
                "There is no session at this URL: it was never opened, was deleted, or was idle for too long.",
                status=404,
            )
        entry.last_used = self.clock()
        return entry

    def close(self, key: str) -> SessionEntry:
        """Remove a session; its running turns are aborted."""
        entry = self.find(key)
        del self._entries[key]
        entry.close()
        return entry

    def close_all(self) -> None:
        for key in tuple(self._entries):
            self.close(key)

    def start_turn(self) -> None:
        self._num_turns += 1
        self._idle.clear()

    def finish_turn(self) -> None:
        self._num_turns -= 1
        if not self._num_turns:
            self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no turn is running."""
        await self._idle.wait()

    def _count_limited(self) -> int:
        return sum(entry.limited for entry in self._entries.values())

    def _close_idle(self) -> None:
        before = self.clock() - self.limits.idle_seconds
        for entry in self:
            if entry.limited and entry.last_used < before and not entry.num_running:
                self.close(entry.key)


def shutdown_error() -> RequestError:
    return RequestError("The session server is shutting down and takes no new requests.", status=503)
