"""Sessions for trajectories of this process: one is opened for an agent, and its tokens become the trajectory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles.core.protocols import Engine, SamplingParams
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.session.audit import summarize_mismatches
from miles.rollout.session.branches import SamplePicker
from miles.rollout.session.match import MessageMatcher
from miles.rollout.session.server.app import SessionServer
from miles.rollout.session.server.registry import SessionEntry


class LocalSession:
    """The session of one trajectory. ``/v1/messages`` and ``/v1/chat/completions`` are below its ``base_url``."""

    def __init__(self, entry: SessionEntry, base_url: str, pick: SamplePicker | None, *, audits: bool = False) -> None:
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
        """What was sampled. Metadata gets ``engine_failure`` where a turn failed, ``notes`` on what in replies could
        not be parsed, and the mismatches of the audit, where there is one (``audit.MISMATCH``)."""
        entry = self._entry
        summary: dict[str, Any] = {} if entry.failure is None else {"engine_failure": entry.failure}
        if entry.notes:
            summary["notes"] = list(entry.notes)
        if self._audits:
            summary |= summarize_mismatches(entry.session)
        return entry.session.trajectory(
            status=status, reward=reward, metadata=summary | dict(metadata), pick=self._pick
        )


class LocalSessions:
    """Opens sessions on a started server. ``pick`` chooses which conversations are trained on; with ``audits``,
    trajectories report where their tokens differ from the chat template's."""

    def __init__(
        self,
        server: SessionServer,
        *,
        hold: bool = True,
        match: str | MessageMatcher | None = None,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        pick: SamplePicker | None = None,
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
    async def open(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> AsyncIterator[LocalSession]:
        """A session for one trajectory; when it closes, running turns are aborted and later ones refused."""
        entry = self._server.open(
            engine,
            sampling,
            prompt=prompt,
            id=f"{prompt.id}-{prompt.epoch}-{sampling.seed:x}",
            hold=self._hold,
            match=self._match,
            max_turns=self._max_turns,
            max_tokens=self._max_tokens,
        )
        try:
            yield LocalSession(entry, self._server.url(entry.key), self._pick, audits=self._audits)
        finally:
            if not entry.closed:
                self._server.close(entry.key)
