"""Several servers as one engine: who answers what, what happens when one is lost, and everyone holding still.

Who waits for whom: a request waits until some server takes requests; whoever holds the fleet waits until no request is
under way. What a lost or held server wrote stays, and the rest is written by whichever is free next, so that every
token has the version that wrote it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum

from miles.backends.sglang.client import Client, Cut, Lost
from miles.backends.sglang.loads import Loads
from miles.backends.sglang.pace import Pace
from miles.backends.sglang.parts import Decode, Experts, Parts
from miles.core.errors import EngineError
from miles.core.protocols import Completion, Hear, Sampling
from miles.core.types import Tokens, Version

FAILURES = 8
"""How often a request is sent again after servers were lost with it."""

RETRY_SECONDS = 1.0
"""How long a request that all servers have failed waits for news of them before it is sent again."""

DRAIN_SECONDS = 10.0
_REMEMBERED = 8192


class State(StrEnum):
    """Of one server."""

    STARTING = "starting"
    SERVING = "serving"
    LEAVING = "leaving"
    ILL = "ill"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class Seat:
    """One server's place. ``why`` is what was wrong with it last."""

    name: str
    client: Client | None = None
    state: State = State.STARTING
    version: Version | None = None
    asleep: bool = False
    load: int = 0
    why: str = ""

    @property
    def open(self) -> bool:
        """Does it take requests?"""
        return self.state is State.SERVING


def label_of(version: Version) -> str:
    """What servers are told a version is called."""
    return f"{version.policy}-{version.number}"


class Fleet:
    """Implements core.protocols.Engine and EngineControl. ``trouble`` hears, at once, of a server that failed."""

    def __init__(
        self,
        names: Sequence[str],
        *,
        ends: frozenset[int],
        decode: Decode | None = None,
        experts: Experts | None = None,
    ) -> None:
        self.seats: tuple[Seat, ...] = ()
        self._loads = Loads[Seat]()
        for name in names:
            self.seat(name)
        self.trouble: Callable[[Seat, Lost], None] = lambda seat, why: None
        self.pace = Pace()
        self.retried = 0
        self.experts = experts
        self._ends, self._decode = ends, decode
        self._mates: OrderedDict[int, Seat] = OrderedDict()
        self._news = asyncio.Event()
        self._doors = asyncio.Event()
        self._holds = 0
        self._asleep = False
        self._aborts = 0
        self._turn = asyncio.Lock()

    # -- Engine -----------------------------------------------------------------------------

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        """Continue ``tokens`` on whichever server is free, and on another where that one is lost."""
        return await self.generate_aloud(tokens, sampling, lambda tokens: None)

    async def generate_aloud(self, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion:
        """``generate``, with ``hear`` told tokens as they come, from whichever server."""
        prompt = tokens.tolist()
        parts = Parts(prompt, sampling, ends=self._ends, decode=self._decode, experts=self.experts)
        key, aborts, failures = hash(tokens.tobytes()), self._aborts, 0
        failed: set[Seat] = set()
        while True:
            seat = await self._choose(key, failed)
            client, version = seat.client, seat.version
            assert client is not None and version is not None
            self._bear(seat, +1)
            began = time.monotonic()
            try:
                reply, trouble = await client.attempt(parts.so_far, parts.rest, hear)
            finally:
                self._bear(seat, -1)
            if trouble is None:
                there = [each.name for each in self.serving()]
                taken = time.monotonic() - began
                self.pace.note(seat.name, len(reply.tokens), taken, serving=there, version=version.number)
            if reply.label is not None and reply.label != label_of(version):
                raise EngineError(
                    f"{seat.name} was given {label_of(version)} and answers with weights it calls {reply.label}; "
                    "nobody but this run may change the weights of its servers"
                )
            parts.add(reply, version)
            if parts.reason is not None:
                return parts.completion(parts.reason)
            if self._aborts != aborts:
                return parts.completion("abort")
            if trouble is not None and not isinstance(trouble, Cut):
                failures += 1
                self.retried += 1
                failed.add(seat)
                self.trouble(seat, trouble)
                if failures > FAILURES:
                    raise EngineError(f"a request was lost with {failures} servers, the last time because {trouble}")

    async def _choose(self, key: int, failed: set[Seat]) -> Seat:
        """A server that takes requests: the one that had the same prompt, unless others have far less to do.

        One that ``failed`` this request is asked again only when all have, and after a while: whoever looks after it
        needs that to find out.
        """
        while True:
            least = None if self._holds else self._least(failed)
            if least is not None:
                mate = self._mates.get(key)
                fits = mate is not None and mate.open and mate not in failed and mate.load <= 2 * least.load + 4
                seat = mate if mate is not None and fits else least
                self._mates[key] = seat
                self._mates.move_to_end(key)
                if len(self._mates) > _REMEMBERED:
                    self._mates.popitem(last=False)
                return seat
            if failed and not self._holds and any(seat.open for seat in self.seats):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), RETRY_SECONDS)
                failed.clear()
                continue
            if all(seat.state is State.GONE for seat in self.seats):
                raise EngineError(f"no server is left: {'; '.join(f'{s.name}: {s.why}' for s in self.seats)}")
            await self._doors.wait()

    def _least(self, failed: set[Seat]) -> Seat | None:
        least = self._loads.least()
        if least is None or least not in failed:
            return least
        others = (seat for seat in self.seats if seat.open and seat not in failed)
        return min(others, key=lambda seat: seat.load, default=None)

    def _bear(self, seat: Seat, change: int) -> None:
        seat.load += change
        self._loads.note(seat)

    async def news(self) -> None:
        """Wait until something changes."""
        await self._news.wait()

    def told(self) -> None:
        """Something has changed: whoever waits looks again, requests only where there may be an answer for them."""
        news, self._news = self._news, asyncio.Event()
        news.set()
        if not self._holds or all(seat.state is State.GONE for seat in self.seats):
            doors, self._doors = self._doors, asyncio.Event()
            doors.set()

    # -- seats ------------------------------------------------------------------------------

    def seat(self, name: str) -> Seat:
        """A place for one more server, which starts."""
        seat = Seat(name)
        self.seats = (*self.seats, seat)
        self._loads.note(seat)
        return seat

    async def empty(self, seat: Seat, seconds: float) -> None:
        """A server is to leave: it takes no more requests, and those it has may end there for so long.

        What has not ended then goes on elsewhere, as it does when everyone is told to hold still before.
        """
        seat.state = State.LEAVING
        self.told()
        if seat.client is not None:
            await seat.client.finished(seconds)

    def remove(self, seat: Seat) -> None:
        """A server has left: its place is no more."""
        self.drop(seat, "it was told to leave", gone=True)
        self.seats = tuple(each for each in self.seats if each is not seat)
        self.told()

    def serving(self) -> list[Seat]:
        return [seat for seat in self.seats if seat.state is State.SERVING]

    def admit(self, seat: Seat, client: Client, version: Version) -> None:
        """A server has the weights of ``version`` and takes requests from now on."""
        seat.asleep = seat.asleep and seat.client is client
        seat.client, seat.version, seat.state, seat.why = client, version, State.SERVING, ""
        self._loads.note(seat)
        self.told()

    def drop(self, seat: Seat, why: str, *, gone: bool = False) -> None:
        """A server takes no more requests; those it has go on elsewhere."""
        seat.state, seat.why = State.GONE if gone else State.ILL, why
        if seat.client is not None:
            seat.client.cut()
        self.told()

    # -- holding still ----------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Does nobody get an answer just now?"""
        return self._holds > 0

    async def hold(self) -> None:
        """No request is under way when this returns, and none begins before as many ``release``."""
        self._holds += 1
        async with self._turn:
            await self._hurry()
            await self._each(self._still)

    async def release(self) -> None:
        assert self._holds > 0, "hold comes first"
        if self._holds == 1:
            async with self._turn:
                await self._each(lambda client: client.resume())
        self._holds -= 1
        self.told()

    async def _hurry(self) -> None:
        """What servers that leave have under way goes on elsewhere."""
        for seat in self.seats:
            if seat.state is State.LEAVING and seat.client is not None:
                await seat.client.finished(0.0)

    async def _still(self, client: Client) -> None:
        await client.pause("abort")
        await client.drained(DRAIN_SECONDS)

    async def _each(self, word: Callable[[Client], Awaitable[object]]) -> None:
        """Tell every server; one that is lost meanwhile is told of, and not waited for."""
        await asyncio.gather(*(self._one(seat, word) for seat in self.serving()))

    async def _one(self, seat: Seat, word: Callable[[Client], Awaitable[object]]) -> None:
        assert seat.client is not None
        try:
            await word(seat.client)
        except Lost as error:
            self.drop(seat, str(error))
            self.trouble(seat, error)

    # -- EngineControl ----------------------------------------------------------------------

    async def pause(self) -> None:
        await self.hold()

    async def resume(self) -> None:
        await self.release()

    async def abort(self) -> None:
        """End every request with what it has."""
        self._aborts += 1
        await self._hurry()
        await self._each(lambda client: client.abort())

    async def sleep(self) -> None:
        """Give the caches' memory back, on every server."""
        if not self._asleep:
            self._asleep = True
            await self.hold()
            for seat in self.serving():
                await self._one(seat, lambda client: client.sleep())
                seat.asleep = True

    async def wake(self) -> None:
        if self._asleep:
            for seat in self.serving():
                if seat.asleep:
                    await self._one(seat, lambda client: client.wake())
                    seat.asleep = False
            self._asleep = False
            await self.release()

    async def health(self) -> Mapping[str, float]:
        return {
            "engines": float(len(self.seats)),
            "engines_serving": float(len(self.serving())),
            "running": float(sum(seat.load for seat in self.seats)),
            "requests_retried": float(self.retried),
        }
