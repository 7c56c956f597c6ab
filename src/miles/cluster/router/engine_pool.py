"""Engine pool of the router: open engines, the queue of waiting requests, and the state transitions of engines.

    starting ──healthy──▶ healthy ◀──successes in a row── probation ◀──healthy── quarantined
                             └── failures in a row, or no connection ──▶ quarantined   (from probation: at once)
    any ──DELETE──▶ draining;   healthy, but with other weights than the serving engines ──▶ outdated, until they match

A request that finds no open engine waits in the queue; a change that opens an engine calls ``dispatch_waiting``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from miles.cluster.least_loaded import LeastLoadedIndex
from miles.cluster.router.config import RouterConfig
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_client import ConnectionPool, EngineAddress
from miles.cluster.router.http_types import Clock, HttpError
from miles.cluster.router.policy import POLICIES, RoutingInfo

_SERVING = (EngineState.HEALTHY, EngineState.PROBATION)
RETRY_AFTER = ((b"retry-after", b"1"),)


@dataclass(eq=False, slots=True)
class _WaitingRequest:
    info: RoutingInfo
    avoid: frozenset[str]
    assigned: asyncio.Future[RoutedEngine] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RouterEnginePool:
    """Every engine by its name, in the order in which they were added."""

    def __init__(self, config: RouterConfig, clock: Clock, log: Callable[[str], None]) -> None:
        self._index = LeastLoadedIndex[RoutedEngine]()
        self.engines = self._index.members
        self.waiting: deque[_WaitingRequest] = deque()
        self.outstanding = 0
        self.refused = 0
        self.on_change: Callable[[RoutedEngine], None] = lambda engine: None
        self.on_idle: Callable[[RoutedEngine], None] = lambda engine: None
        self._config = config
        self._clock = clock
        self._log = log
        self._policy = POLICIES[config.policy](config)

    # -- adding and removing engines ----------------------------------------------------------

    def add(self, url: str, *, ranks: int | None = None) -> RoutedEngine:
        """Add an engine; one that is known already is checked again."""
        address = EngineAddress.parse(url)
        known = self.engines.get(address.name)
        if known is not None:
            if known.state is EngineState.DRAINING:
                raise HttpError(409, f"{known} is draining; add it again after it has left.")
            known.ranks = ranks or known.ranks
            known.missed_update = None
            known.consecutive_failures = 0
            known.quarantine_secs = 0.0
            if known.state not in _SERVING:
                self._set_state(known, EngineState.STARTING, "it was added again")
            return known
        connections = ConnectionPool(address, self._clock, self._config.connect_timeout_secs)
        engine = RoutedEngine(connections, ranks=ranks)
        self._index.add(engine)
        self._policy.add_engine(engine.name)
        self.on_change(engine)
        return engine

    def find(self, name: str) -> RoutedEngine:
        """An engine by its name or its URL."""
        if name not in self.engines and "://" in name:
            name = EngineAddress.parse(name).name
        if name not in self.engines:
            raise HttpError(404, f"There is no engine {name}; GET /engines lists them.")
        return self.engines[name]

    def drain(self, engine: RoutedEngine) -> None:
        self._set_state(engine, EngineState.DRAINING, "it is being removed")

    def remove(self, engine: RoutedEngine) -> None:
        """Remove an engine; its remaining requests are aborted."""
        self._index.remove(engine)
        self._policy.remove_engine(engine.name)
        engine.state = EngineState.DRAINING
        self.on_change(engine)
        self.retry_unanswered(engine)
        engine.connections.close("the engine has been removed")
        self._log(f"Engine {engine.name} has left.")

    # -- choosing -----------------------------------------------------------------------------

    def serving(self) -> list[RoutedEngine]:
        return [engine for engine in self.engines.values() if engine.state in _SERVING]

    def has_other(self, avoid: frozenset[str]) -> bool:
        """Whether an engine is open that is not to be avoided."""
        return self._index.has_other(avoid)

    def pick(self, info: RoutingInfo, avoid: frozenset[str] = frozenset()) -> RoutedEngine | None:
        """Choose an open engine, if possible not one to avoid, and add the request to its load; None if none is."""
        if self.outstanding >= self._config.max_concurrent_requests:
            return None
        if not len(self._index):
            return None
        if avoid:
            with self._index.excluding(avoid) as others:
                engine = self._policy.choose(others, info)
        else:
            engine = self._policy.choose(self._index, info)
        engine.start_request(info.work)
        self._index.update(engine)
        self.outstanding += 1
        return engine

    async def wait(self, info: RoutingInfo, avoid: frozenset[str], seconds: float) -> RoutedEngine:
        """Wait in the queue for an engine; fails if the queue is full or the wait too long."""
        if len(self.waiting) >= self._config.queue_size:
            self.refused += 1
            message = f"{self._describe_shortage()} and {len(self.waiting)} requests are waiting already."
            raise HttpError(503, message, RETRY_AFTER)
        request = _WaitingRequest(info, avoid)
        self.waiting.append(request)
        seconds = min(seconds, self._config.queue_timeout_secs)
        timer = self._clock.call_later(seconds, self._time_out, request, seconds)
        try:
            return await request.assigned
        except asyncio.CancelledError:
            assigned = request.assigned
            if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
                self.release(assigned.result(), info, 0.0)  # assigned just when the client disconnected
            raise
        finally:
            timer.cancel()
            if request in self.waiting:
                self.waiting.remove(request)

    def abort_waiting(self, rid: str | None) -> None:
        """Abort the waiting requests with this rid; all of them for None."""
        for request in list(self.waiting):
            if (rid is None or rid in request.info.rids()) and not request.assigned.done():
                error = HttpError(503, "The request was aborted while it waited for an engine.")
                request.assigned.set_exception(error)
                self.waiting.remove(request)

    def release(self, engine: RoutedEngine, info: RoutingInfo, seconds: float) -> None:
        """A request has ended on an engine, successfully or not."""
        engine.finish_request(info.work, seconds)
        self._index.update(engine)
        self.outstanding -= 1
        if self.waiting:
            self.dispatch_waiting()
        if engine.outstanding == 0 and engine.state is EngineState.DRAINING:
            self.on_idle(engine)

    def dispatch_waiting(self) -> None:
        """Assign engines to waiting requests, in order, while one is open."""
        while self.waiting:
            request = self.waiting[0]
            if not request.assigned.done():
                engine = self.pick(request.info, request.avoid)
                if engine is None:
                    return
                request.assigned.set_result(engine)
            self.waiting.popleft()

    def _time_out(self, request: _WaitingRequest, seconds: float) -> None:
        if not request.assigned.done():
            self.refused += 1
            message = f"{self._describe_shortage()}; none became free within {seconds:g} seconds."
            request.assigned.set_exception(HttpError(503, message, RETRY_AFTER))

    def _describe_shortage(self) -> str:
        if not self.engines:
            return "The router has no engines (POST /engines adds one)"
        if self.outstanding >= self._config.max_concurrent_requests:
            return f"{self.outstanding} requests are at the engines, the limit of --max-concurrent-requests"
        states = ", ".join(f"{engine.name} is {engine.state.value}" for engine in self.engines.values())
        return f"No engine is free to take the request ({states})"

    # -- health --------------------------------------------------------------------------------

    def record_success(self, engine: RoutedEngine) -> None:
        """A request or a health check succeeded."""
        engine.consecutive_failures = 0
        if engine.state is EngineState.PROBATION:
            engine.consecutive_successes += 1
            if engine.consecutive_successes >= self._config.health_success_threshold:
                engine.quarantine_secs = 0.0
                self._set_state(engine, EngineState.HEALTHY, "it has passed its probation")

    def record_failure(self, engine: RoutedEngine, why: str, *, fatal: bool = False, responds: bool = False) -> None:
        """A request or a health check failed; ``fatal`` if there was no connection, or it broke.

        An engine that ``responds``, if only with an error, stays in service when no other is: the request may be the
        cause.
        """
        engine.failures += 1
        engine.consecutive_failures += 1
        if engine.state not in _SERVING or (responds and self.serving() == [engine]):
            return
        threshold = self._config.health_failure_threshold
        if fatal or engine.state is EngineState.PROBATION or engine.consecutive_failures >= threshold:
            self.quarantine(engine, why)

    def quarantine(self, engine: RoutedEngine, why: str) -> None:
        """Take an engine out of service, for twice as long as the last time if it has not recovered since."""
        longest = self._config.max_quarantine_secs
        engine.quarantine_secs = min(longest, 2 * engine.quarantine_secs or self._config.quarantine_secs)
        engine.quarantined_until = self._clock.now() + engine.quarantine_secs
        engine.suspended.clear()  # it may come back as another process, which was not suspended
        self._set_state(engine, EngineState.QUARANTINED, why)

    def admit(self, engine: RoutedEngine) -> None:
        """A health check of an engine out of service succeeded: put it in service if it has the right weights."""
        if engine.missed_update is not None:
            self._set_state(engine, EngineState.OUTDATED, engine.missed_update)
            return
        versions = {other.weight_version for other in self.serving()}
        if self._config.require_same_weights and len(versions) == 1 and engine.weight_version not in versions:
            (serving,) = versions
            why = f"it has weight version {engine.weight_version}, but the serving engines have {serving}"
            self._set_state(engine, EngineState.OUTDATED, why)
            return
        engine.consecutive_successes = engine.consecutive_failures = 0
        if engine.quarantine_secs > 0:
            self._set_state(engine, EngineState.PROBATION, "it is healthy again")
        else:
            self._set_state(engine, EngineState.HEALTHY, "")

    def retry_unanswered(self, engine: RoutedEngine) -> None:
        """Have the requests that an engine has not begun to answer retried elsewhere."""
        for retry in list(engine.retry_callbacks):
            retry()

    def _set_state(self, engine: RoutedEngine, state: EngineState, why: str) -> None:
        if not self._index.set_state(engine, state, why):
            return
        self._log(f"Engine {engine.name} is {state.value}{f': {why}' if why else ''}.")
        if state in (EngineState.QUARANTINED, EngineState.DRAINING):
            engine.connections.close_idle(0.0)
        self.on_change(engine)
        if engine.open:
            self.dispatch_waiting()
