"""Sessions for attempts of this process: one is opened for an agent, and its tokens are the attempt's trajectory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from miles.core.protocols import Engine, Sampling
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.session.audit import mismatch_of
from miles.rollout.session.match import Match
from miles.rollout.session.server.app import SessionServer
from miles.rollout.session.server.entry import Entry
from miles.rollout.session.session import Pick


class Seat:
    """One session, as an attempt sees it. ``base_url`` has ``/v1/messages``, ``/v1/chat/completions`` behind it."""

    def __init__(self, entry: Entry, base_url: str, pick: Pick | None, *, audits: bool = False) -> None:
        self._entry = entry
        self._audits = audits
        self._pick = pick
        self.base_url = base_url

    @property
    def id(self) -> str:
        return self._entry.id

    def trajectory(
        self, *, status: Status, reward: Reward | None = None, metadata: Mapping[str, Any] = EMPTY
    ) -> Trajectory:
        """What was sampled. The metadata has ``engine_failure`` where a turn came to nothing, and ``notes`` on what in
        replies could not be read; and what an audit found, where there is one (``audit.MISMATCH``)."""
        entry = self._entry
        told: dict[str, Any] = {} if entry.failure is None else {"engine_failure": entry.failure}
        if entry.notes:
            told["notes"] = list(entry.notes)
        if self._audits:
            told |= mismatch_of(entry.session)
        return entry.session.trajectory(status=status, reward=reward, metadata=told | dict(metadata), pick=self._pick)


class Seats:
    """Opens sessions on a server that has been started. ``pick`` says which of its conversations are trained on; with
    ``audits``, trajectories tell where their tokens are not those of the chat template."""

    def __init__(
        self,
        server: SessionServer,
        *,
        hold: bool = True,
        match: str | Match | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        pick: Pick | None = None,
        audits: bool = False,
    ) -> None:
        self._server = server
        self._hold = hold
        self._match = match
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._pick = pick
        self._audits = audits

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> AsyncIterator[Seat]:
        """A session for one attempt; when it closes, turns under way are aborted and later ones refused."""
        entry = self._server.open(
            engine,
            sampling,
            prompt=prompt,
            id=self._free(f"{prompt.id}-{prompt.epoch}-{sampling.seed:x}"),
            hold=self._hold,
            match=self._match,
            metadata=prompt.metadata,
            max_turns=self._max_turns,
            max_tokens=self._max_tokens,
        )
        try:
            yield Seat(entry, self._server.url(entry.id), self._pick, audits=self._audits)
        finally:
            if not entry.closed:
                self._server.close(entry.id)

    def _free(self, name: str) -> str:
        """The name an attempt has in every run, or, while another of that name is open, one with a number behind it."""
        names = (name if n == 1 else f"{name}-{n}" for n in count(1))
        return next(each for each in names if each not in self._server.sessions)
