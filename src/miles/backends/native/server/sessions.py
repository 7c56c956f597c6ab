"""SGLang's sessions: earlier requests and their outputs are stored, so that a request sends only what is new.

A session is a tree of requests by id. A request starts anew, or continues one that has ended: its prompt is then that
one's prompt and output followed by the new tokens. Nothing is computed twice, since the engine finds the prefix in its
cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles.backends.native.engine.req import RequestOutput
from miles.backends.native.server.api.request_types import SessionParams
from miles.core.types import Tokens
from miles.rollout.serving.errors import RequestError

MAX_SESSIONS = 65536


@dataclass(slots=True)
class StoredRequest:
    """One request of a session. ``output`` is set while it may still grow."""

    prompt: Tokens
    output: RequestOutput | None
    finished_tokens: Tokens
    children: list[str] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        return self.output is None or self.output.finish_reason is not None

    @property
    def output_tokens(self) -> Tokens:
        return self.finished_tokens if self.output is None else _to_array(self.output.tokens)


@dataclass(slots=True)
class EngineSession:
    """``timeout`` seconds without a request close it; None: only ``close`` does."""

    timeout: float | None
    last_used: float
    requests: dict[str, StoredRequest] = field(default_factory=dict)

    def remove(self, rids: Sequence[str]) -> None:
        """Remove these requests, and all that continued them."""
        removed = list(rids)
        while removed:
            request = self.requests.pop(removed.pop(), None)
            if request is not None:
                removed += request.children


class EngineSessions:
    """All open sessions, used on one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._sessions: dict[str, EngineSession] = {}
        self._with_timeout: set[str] = set()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, id: str, timeout: float | None) -> bool:
        """Open a session; returns False where one with this id is open."""
        self._close_idle()
        if len(self._sessions) >= MAX_SESSIONS:
            raise RequestError(f"There are {MAX_SESSIONS} sessions already; close some.")
        if id in self._sessions:
            return False
        self._sessions[id] = EngineSession(timeout, self._clock())
        if timeout is not None:
            self._with_timeout.add(id)
        return True

    def close(self, id: str) -> None:
        """Running requests continue; an unknown id is no error."""
        self._sessions.pop(id, None)
        self._with_timeout.discard(id)

    def find_replaced(self, params: SessionParams) -> str | None:
        """The running request that this one replaces, which is to be aborted."""
        request = self._find(params).requests.get(params.rid or "")
        return params.rid if params.replace and request is not None and not request.has_ended else None

    def build_prompt(self, params: SessionParams, tokens: list[int], bos_token: int | None) -> list[int]:
        """The whole prompt of a request; a continuation drops the BOS token of its own text."""
        session = self._find(params)
        session.last_used = self._clock()
        if params.rid is None:
            if params.replace:
                session.requests.clear()
            return tokens
        request = session.requests.get(params.rid)
        if request is None:
            message = f"Session {params.id!r} has no request {params.rid!r} to continue."
            raise RequestError(message, param="session_params.rid")
        if params.replace:
            session.remove(request.children)
            request.children.clear()
        elif not request.has_ended:
            raise RequestError(f"Request {params.rid!r} has not ended yet, so it cannot be continued.")
        before = request.prompt
        if not params.drop_previous_output:
            before = np.concatenate((request.prompt, request.output_tokens))
        if params.offset:
            before = before[: params.offset]
        rest = tokens[1:] if bos_token is not None and tokens[:1] == [bos_token] else tokens
        return [*before.tolist(), *rest]

    def add_request(self, params: SessionParams, rid: str, prompt: Sequence[int], output: RequestOutput) -> None:
        """Store a submitted request; others may continue it when it has ended."""
        session = self._find(params)
        session.requests[rid] = StoredRequest(_to_array(prompt), output, _to_array(()))
        if params.rid is not None and params.rid in session.requests:
            session.requests[params.rid].children.append(rid)

    def finish_request(self, params: SessionParams, rid: str) -> None:
        """The request grows no more: keep its tokens and drop its output stream."""
        session = self._sessions.get(params.id)
        request = None if session is None else session.requests.get(rid)
        if session is not None and request is not None:
            request.finished_tokens, request.output = request.output_tokens, None
            session.last_used = self._clock()

    def _find(self, params: SessionParams) -> EngineSession:
        self._close_idle()
        session = self._sessions.get(params.id)
        if session is None:
            raise RequestError(f"Session {params.id!r} is not open.", param="session_params.id")
        return session

    def _close_idle(self) -> None:
        now = self._clock()
        for id in list(self._with_timeout):
            session = self._sessions[id]
            is_idle = session.timeout is not None and now - session.last_used > session.timeout
            if is_idle and all(request.has_ended for request in session.requests.values()):
                self.close(id)


def _to_array(tokens: Sequence[int]) -> Tokens:
    return np.array(tokens, np.int32)
