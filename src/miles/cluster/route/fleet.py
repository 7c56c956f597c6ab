"""The engines together: who is open, who waits for one, and how an engine goes from one state to the next.

    starting ──well──▶ healthy ◀──passes in a row── probation ◀──well── quarantined
                          └── failures in a row, or no connection ──▶ quarantined   (and from probation: at once)
    any ──DELETE──▶ draining;   well, but with other weights than those who serve ──▶ outdated, until they match

A request that finds no engine open waits in line; whoever opens an engine calls ``Fleet.serve_waiting``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from miles.cluster.route.clock import Clock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine, State
from miles.cluster.route.message import Refused
from miles.cluster.route.openings import Openings
from miles.cluster.route.outbound import Address, Pool
from miles.cluster.route.policy import POLICIES, Ask

_SERVING = (State.HEALTHY, State.PROBATION)


@dataclass(eq=False, slots=True)
class _Waiting:
    """A request in line."""

    ask: Ask
    avoid: frozenset[str]
    seat: asyncio.Future[Engine] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Fleet:
    """Every engine by its id, in the order in which they joined."""

    def __init__(self, config: RouteConfig, clock: Clock, tell: Callable[[str], None]) -> None:
        self.engines: dict[str, Engine] = {}
        self.waiting: deque[_Waiting] = deque()
        self.outstanding = 0
        self.refused = 0
        self.on_change: Callable[[Engine], None] = lambda engine: None
        self.on_empty: Callable[[Engine], None] = lambda engine: None
        self._config = config
        self._clock = clock
        self._tell = tell
        self._policy = POLICIES[config.policy](config)
        self._openings = Openings()

    # -- joining and leaving ------------------------------------------------------------------

    def add(self, url: str, *, ranks: int | None = None) -> Engine:
        """A new engine, or one that is known already and is looked at afresh."""
        address = Address.of(url)
        known = self.engines.get(address.name)
        if known is not None:
            if known.state is State.DRAINING:
                raise Refused(409, f"{known} is about to leave; add it when it has left.")
            known.ranks = ranks or known.ranks
            known.missed = None
            known.failed_in_a_row, known.quarantine_secs = 0, 0.0
            if known.state not in _SERVING:
                self._enter(known, State.STARTING, "it was added again")
            return known
        engine = Engine(Pool(address, self._clock, self._config.connect_timeout_secs), ranks=ranks)
        self.engines[engine.id] = engine
        self._openings.join(engine)
        self._policy.joined(engine.id)
        self.on_change(engine)
        return engine

    def find(self, name: str) -> Engine:
        """An engine by its id or its URL."""
        if name not in self.engines and "://" in name:
            name = Address.of(name).name
        if name not in self.engines:
            raise Refused(404, f"There is no engine {name}; GET /engines lists them.")
        return self.engines[name]

    def drain(self, engine: Engine) -> None:
        self._enter(engine, State.DRAINING, "it is to leave")

    def remove(self, engine: Engine) -> None:
        """Forget an engine; what it still has is cut off."""
        del self.engines[engine.id]
        self._openings.leave(engine)
        self._policy.left(engine.id)
        engine.state = State.DRAINING
        self.on_change(engine)
        self.rescue(engine)
        engine.pool.close("the engine has been removed")
        self._tell(f"Engine {engine.id} has left.")

    # -- choosing -----------------------------------------------------------------------------

    def serving(self) -> list[Engine]:
        return [engine for engine in self.engines.values() if engine.state in _SERVING]

    def has_other(self, avoid: frozenset[str]) -> bool:
        """Whether an engine that is not to be avoided is open."""
        return self._openings.others(avoid)

    def pick(self, ask: Ask, avoid: frozenset[str] = frozenset()) -> Engine | None:
        """An open engine, one not to be avoided if there is any, already charged with the work; None if none is."""
        if self.outstanding >= self._config.max_concurrent_requests:
            return None
        if not len(self._openings):
            return None
        if avoid:
            with self._openings.without(avoid) as others:
                engine = self._policy.choose(others, ask)
        else:
            engine = self._policy.choose(self._openings, ask)
        engine.begin(ask.work)
        self._openings.note(engine)
        self.outstanding += 1
        return engine

    async def wait(self, ask: Ask, avoid: frozenset[str], seconds: float) -> Engine:
        """Stand in line for an engine; refused when the line is full or the wait too long."""
        if len(self.waiting) >= self._config.queue_size:
            self.refused += 1
            raise Refused(503, f"{self._shortage()} and {len(self.waiting)} requests wait already.", RETRY_AFTER)
        place = _Waiting(ask, avoid)
        self.waiting.append(place)
        seconds = min(seconds, self._config.queue_timeout_secs)
        timer = self._clock.call_later(seconds, self._turn_away, place, f"within {seconds:g} seconds")
        try:
            return await place.seat
        except asyncio.CancelledError:
            if place.seat.done() and not place.seat.cancelled() and place.seat.exception() is None:
                self.release(place.seat.result(), ask, 0.0)  # given a seat in the moment the client left
            raise
        finally:
            timer.cancel()
            if place in self.waiting:
                self.waiting.remove(place)

    def abort_waiting(self, rid: str | None) -> None:
        """Turn those in line away that have this rid; all of them for None."""
        for place in list(self.waiting):
            if (rid is None or rid in place.ask.rids()) and not place.seat.done():
                place.seat.set_exception(Refused(503, "The request was aborted while it waited for an engine."))
                self.waiting.remove(place)

    def release(self, engine: Engine, ask: Ask, seconds: float) -> None:
        """A request has ended on an engine, in whatever way."""
        engine.end(ask.work, seconds)
        self._openings.note(engine)
        self.outstanding -= 1
        if self.waiting:
            self.serve_waiting()
        if engine.outstanding == 0 and engine.state is State.DRAINING:
            self.on_empty(engine)

    def serve_waiting(self) -> None:
        """Give engines to those who wait, in their order, as long as one is open."""
        while self.waiting:
            place = self.waiting[0]
            if not place.seat.done():
                engine = self.pick(place.ask, place.avoid)
                if engine is None:
                    return
                place.seat.set_result(engine)
            self.waiting.popleft()

    def _turn_away(self, place: _Waiting, when: str) -> None:
        if not place.seat.done():
            self.refused += 1
            place.seat.set_exception(Refused(503, f"{self._shortage()}; none came free {when}.", RETRY_AFTER))

    def _shortage(self) -> str:
        if not self.engines:
            return "The router has no engines (POST /engines adds one)"
        if self.outstanding >= self._config.max_concurrent_requests:
            return f"{self.outstanding} requests are at the engines, which is all there may be"
        states = ", ".join(f"{engine.id} is {engine.state.value}" for engine in self.engines.values())
        return f"No engine is free to take the request ({states})"

    # -- well and ill --------------------------------------------------------------------------

    def succeeded(self, engine: Engine) -> None:
        """A request or a probe went well."""
        engine.failed_in_a_row = 0
        if engine.state is State.PROBATION:
            engine.passed_in_a_row += 1
            if engine.passed_in_a_row >= self._config.health_success_threshold:
                engine.quarantine_secs = 0.0
                self._enter(engine, State.HEALTHY, "it has proved itself")

    def failed(self, engine: Engine, why: str, *, fatal: bool = False, answers: bool = False) -> None:
        """A request or a probe went wrong; ``fatal`` when there was no connection, or it broke.

        An engine that ``answers``, if only with an error, stays in service when no other is: the fault may be the
        request's.
        """
        engine.failures += 1
        engine.failed_in_a_row += 1
        if engine.state not in _SERVING or (answers and self.serving() == [engine]):
            return
        if fatal or engine.state is State.PROBATION or engine.failed_in_a_row >= self._config.health_failure_threshold:
            self.quarantine(engine, why)

    def quarantine(self, engine: Engine, why: str) -> None:
        """Out of service, for twice as long as the last time if that was just now."""
        longest = self._config.max_quarantine_secs
        engine.quarantine_secs = min(longest, 2 * engine.quarantine_secs or self._config.quarantine_secs)
        engine.until = self._clock.now() + engine.quarantine_secs
        engine.quiet.clear()  # if it comes back as another process, it was told nothing
        self._enter(engine, State.QUARANTINED, why)

    def admit(self, engine: Engine) -> None:
        """A probe found an engine well that was not in service: let it in, if it serves what the others serve."""
        if engine.missed is not None:
            self._enter(engine, State.OUTDATED, engine.missed)
            return
        versions = {other.weight_version for other in self.serving()}
        if self._config.require_same_weights and len(versions) == 1 and engine.weight_version not in versions:
            (serving,) = versions
            why = f"it has weight version {engine.weight_version}, but the engines that serve have {serving}"
            self._enter(engine, State.OUTDATED, why)
            return
        engine.passed_in_a_row = engine.failed_in_a_row = 0
        was_ill = engine.quarantine_secs > 0
        self._enter(engine, State.PROBATION if was_ill else State.HEALTHY, "it is well again" if was_ill else "")

    def rescue(self, engine: Engine) -> None:
        """Have what an engine has not begun to answer tried elsewhere."""
        for call in list(engine.rescues):
            call()

    def _enter(self, engine: Engine, state: State, why: str) -> None:
        if engine.state is state and engine.why == why:
            return
        engine.state, engine.why = state, why
        self._openings.note(engine)
        self._tell(f"Engine {engine.id} is {state.value}{f': {why}' if why else ''}.")
        self.on_change(engine)
        if engine.open:
            self.serve_waiting()


RETRY_AFTER = ((b"retry-after", b"1"),)
