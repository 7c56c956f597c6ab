"""A request for one engine: sent, its reply passed on as it comes, and sent again elsewhere while that is safe.

It is safe until the first byte of a reply has gone to the client: generating has no effect but its reply. The request
is sent again byte for byte, rid and all; the engine that had it is told to abort that rid first, where there is one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from miles.cluster.route.body import Key, key_of, rids_of, work_of
from miles.cluster.route.clock import Clock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.inbound import Client
from miles.cluster.route.message import JSON, Header, Refused, Request, passed_on, request_head
from miles.cluster.route.outbound import Broken, Link, Question, TooLate, call

# Another engine may do better; of these, the ones that say the engine is ill rather than busy.
_AGAIN = frozenset((429, 500, 502, 503, 504))
_ILL = frozenset((500, 502, 504))
_ABORT_SECONDS = 5.0

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a try did not end in a reply.

    ``sent``: the engine may be working on it still. ``known``: the fleet knows already, or there is nothing to know.
    ``final``: no time is left for another try. ``answered``: the status it answered with, if it did.
    """

    sentence: str
    status: int = 502
    fatal: bool = False
    sent: bool = True
    final: bool = False
    known: bool = False
    answered: int = 0


class Asked:
    """What a policy may know of a request."""

    __slots__ = ("_request", "_tokens", "work")

    def __init__(self, request: Request, tokens: int) -> None:
        self._request = request
        self._tokens = tokens
        self.work = work_of(request.body) if request.body else 1

    def key(self) -> Key:
        return key_of(self._request, self._tokens)

    def rids(self) -> list[str]:
        return rids_of(self._request) if self._request.body else []


class Attempt:
    """One try on one engine. ``done`` becomes None when the client has the whole reply, else the failure."""

    def __init__(self, trip: Trip, engine: Engine, clock: Clock, first: float) -> None:
        self.done: asyncio.Future[Failure | None] = asyncio.get_running_loop().create_future()
        self.link: Link | None = None
        self.status = 0
        self.may_refuse: Callable[[], bool] = lambda: False
        self._complete = False
        self._client = trip.client
        self._engine = engine
        self._clock = clock
        self._deadline = trip.deadline
        self._first = max(0.0, min(first, trip.deadline - clock.now()))
        self._extra = [engine.header, (b"x-miles-attempts", b"%d" % trip.tries)] if trip.tries > 1 else [engine.header]
        self._timer = clock.call_later(self._first, self._on_time)
        engine.rescues.add(self.rescue)

    def rescue(self) -> None:
        """Give up on an engine that has not begun to answer."""
        if self.status == 0:
            self._settle(Failure(sentence=f"it was given up on, because {self._engine.why}", known=True))

    def close(self) -> None:
        """No more of this: nothing of what the engine still sends gets to the client."""
        self._timer.cancel()
        self._engine.rescues.discard(self.rescue)
        if self.link is not None and not self._complete:
            self.link.drop()

    # -- the exchange ----------------------------------------------------------------------------

    def on_head(self, status: int, headers: list[Header], length: int | None) -> None:
        assert self.link is not None
        self.status = status
        if status in _AGAIN and self.may_refuse():
            self._settle(Failure(sentence=f"it answered with status {status}", answered=status, sent=False))
            return
        self._client.begin(status, passed_on(headers) + self._extra, length, self.link)

    def on_body(self, data: bytes) -> None:
        self._client.write(data)

    def flush(self) -> None:
        if self.status and not self.done.done():
            self._client.flush()

    def on_end(self) -> None:
        if not self.done.done():
            self._complete = True
            self._client.end()
            self.done.set_result(None)

    def on_failure(self, error: Exception) -> None:
        stale = isinstance(error, Broken) and error.stale  # closed while it was idle, it may be: that is no illness
        self._settle(Failure(sentence=str(error), fatal=True, known=stale))

    def _on_time(self) -> None:
        left = self._deadline - self._clock.now()
        if left <= 0:
            sentence = "the request took longer than --request-timeout-secs allows"
            self._settle(Failure(sentence=sentence, status=504, final=True))
        elif self.status:
            self._timer = self._clock.call_later(left, self._on_time)
        else:
            sentence = f"it did not begin to answer within {self._first:g} seconds"
            self._settle(Failure(sentence=sentence, status=504))

    def _settle(self, failure: Failure) -> None:
        if not self.done.done():
            self.done.set_result(failure)
            self.close()


@dataclass(slots=True, kw_only=True)
class Trip:
    """A request, who waits for it, and how far it got; it may be tried ``left`` times more."""

    request: Request
    client: Client
    asked: Asked
    deadline: float
    left: int
    tries: int = 0
    avoid: frozenset[str] = frozenset()


class Forwarder:
    """Requests on their way."""

    def __init__(
        self, fleet: Fleet, config: RouteConfig, clock: Clock, spawn: Spawn, engine_key: tuple[Header, ...]
    ) -> None:
        self.retries = 0
        self.aborts_of_all = 0
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._spawn = spawn
        self._engine_key = engine_key

    async def __call__(self, request: Request, client: Client, *, again: bool = True) -> None:
        """Serve a request by one engine; without ``again`` it is sent once at most."""
        trip = Trip(
            request=request,
            client=client,
            asked=Asked(request, self._config.prefix_tokens),
            deadline=self._clock.now() + self._config.request_timeout_secs,
            left=self._config.max_retries if again else 0,
        )
        aborts, aborting = self.aborts_of_all, dict[str, asyncio.Task[None]]()
        while True:
            engine = None if self._fleet.waiting else self._fleet.pick(trip.asked, trip.avoid)
            if engine is None:
                engine = await self._fleet.wait(trip.asked, trip.avoid, trip.deadline - self._clock.now())
            began = self._clock.now()
            try:
                if engine.id in aborting:  # else its abort could hit this try
                    await aborting.pop(engine.id)
                failure = await self._try(engine, trip)
            except asyncio.CancelledError:
                self._abort(engine, request)
                raise
            finally:
                self._fleet.release(engine, trip.asked, self._clock.now() - began)
            if failure is None:
                return
            task = self._abort(engine, request) if failure.sent else None
            if client.started:
                client.cut()
                return
            if self.aborts_of_all != aborts:
                raise Refused(503, "The request was aborted while it was to be tried again.")
            if trip.left == 0 or failure.final:
                raise Refused(failure.status, f"Engine {engine.id} did not answer: {failure.sentence}.")
            if task is not None:
                aborting[engine.id] = task
            trip.left -= 1
            trip.avoid |= {engine.id}
            engine.retried += 1
            self.retries += 1

    async def _try(self, engine: Engine, trip: Trip) -> Failure | None:
        """One try, on a connection that is open already or on a new one; tells the fleet how it went."""
        trip.tries += 1
        head = self._head(engine, trip.request)
        others = trip.avoid | {engine.id}
        attempt = Attempt(trip, engine, self._clock, self._config.first_byte_timeout_secs)
        attempt.may_refuse = lambda: trip.left > 0 and self._fleet.has_other(others)
        try:
            # An engine may close an idle connection in the moment it is used, so the last try is on a new one.
            attempt.link = (engine.pool.take() if trip.left else None) or await engine.pool.connect()
            if not attempt.done.done():  # it took no deadline or rescue to get here
                attempt.link.ask(head, trip.request.body, attempt)
            failure = await attempt.done
        except Broken as broken:
            failure = Failure(sentence=str(broken), fatal=True, sent=False)
        finally:
            attempt.close()
        self._judge(engine, attempt.status, failure)
        return failure

    def _judge(self, engine: Engine, status: int, failure: Failure | None) -> None:
        answered = status if failure is None else failure.answered
        if answered in _ILL:
            self._fleet.failed(engine, f"it answered with status {answered}", answers=True)
        elif failure is None or answered:
            self._fleet.succeeded(engine)
        elif not failure.known:
            self._fleet.failed(engine, failure.sentence, fatal=failure.fatal)

    def _head(self, engine: Engine, request: Request) -> bytes:
        headers = passed_on(request.headers)
        if self._engine_key:
            headers = [*(header for header in headers if header[0] != b"authorization"), *self._engine_key]
        where = engine.pool.address
        return request_head(request.method, where.prefix + request.target, where.authority, headers, len(request.body))

    def _abort(self, engine: Engine, request: Request) -> asyncio.Task[None] | None:
        """Tell an engine to stop what it may still be doing for a request that has ids."""
        rids = rids_of(request) if request.body else []
        return self._spawn(self._abort_each(engine, request, rids)) if rids else None

    async def _abort_each(self, engine: Engine, request: Request, rids: list[str]) -> None:
        key = self._engine_key or tuple(header for header in request.headers if header[0] == b"authorization")
        for rid in rids:
            body = json.dumps({"rid": rid}).encode()
            question = Question(method=b"POST", target=b"/abort_request", headers=(JSON, *key), body=body)
            try:
                await call(engine.pool, self._clock, _ABORT_SECONDS, question)
            except (Broken, TooLate):
                return  # whether it is ill, its health will tell
