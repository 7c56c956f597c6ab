"""Several servers as one engine: who answers what, what happens when one is lost, and everyone holding still.

Who waits for whom: a request waits until some server takes requests; whoever holds the fleet waits until no token is
drawn. What a lost server wrote stays, and the rest is written by whichever is free next. A held one may keep its
requests where it tells which weights drew which token (``miles serve``); else they end with what they have, and go on
as those of a lost one do. So every token has the version that wrote it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from miles.backends.sglang.client import Client, Cut, Lost, PauseMode
from miles.backends.sglang.loads import Loads
from miles.backends.sglang.pace import Pace
from miles.backends.sglang.parts import Decode, Experts, Parts
from miles.backends.sglang.reply import Reply
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


def _known(since: Version, newest: Version) -> dict[str, Version]:
    """What servers may call weights that a request met which began under ``since``, and the versions these are."""
    versions = [since._replace(number=number) for number in range(since.number, max(since.number, newest.number) + 1)]
    return {label_of(version): version for version in versions}


def _written(seat: Seat, since: Version, newest: Version, reply: Reply) -> list[tuple[Version, int]]:
    """Which versions drew a reply's tokens, by a server that had ``since`` when it was asked, and how many each.

    One label is that of the last token alone: then nothing may have changed meanwhile.
    """
    runs, known = reply.runs, _known(since, newest)
    if runs is None:
        runs, known = [] if reply.label is None else [(reply.label, len(reply.tokens))], _known(since, since)
    found = [(known[label], count) for label, count in runs if label in known]
    if len(found) < len(runs) or found != sorted(found, key=lambda run: run[0]):
        wrong = next((label for label, _ in runs if label not in known), runs[0][0])
        raise EngineError(
            f"{seat.name} was given {label_of(since)} and answers with weights it calls {wrong}; "
            "nobody but this run may change the weights of its servers"
        )
    return found or [(since, len(reply.tokens))]


class Fleet:
    """Implements core.protocols.Engine and EngineControl. ``trouble`` hears, at once, of a server that failed.

    ``mode`` is what new weights do to requests under way, at servers that can keep them.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        ends: frozenset[int],
        decode: Decode | None = None,
        experts: Experts | None = None,
        mode: PauseMode = "abort",
    ) -> None:
        self.seats: tuple[Seat, ...] = ()
        self._loads = Loads[Seat]()
        for name in names:
            self.seat(name)
        self.trouble: Callable[[Seat, Lost], None] = lambda seat, why: None
        self.tell: Callable[[str], None] = lambda sentence: None
        self.mode: PauseMode = mode
        self.pace = Pace()
        self.retried = 0
        self.experts = experts
        self._ends, self._decode = ends, decode
        self._mates: OrderedDict[int, Seat] = OrderedDict()
        self._said: set[str] = set()
        self._newest = Version(number=-1)
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
            # A server may go on, and have ended an answer, before others have taken the version too.
            while self._holds and any(label not in _known(version, self._newest) for label, _ in reply.runs or ()):
                await self.news()
            parts.add(reply, _written(seat, version, self._newest, reply))
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
        self._newest = max(self._newest, version, key=lambda each: each.number)
        self._loads.note(seat)
        self._say_what_becomes_of_requests(seat.name, keeps=client.keeps)
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

    async def hold(self, mode: PauseMode = "abort", late: Collection[Client] = ()) -> None:
        """No token is drawn when this returns, and no request begins before as many ``release``.

        ``in_place`` and ``retract`` leave requests with servers that can keep them; others have none under way. Those
        of ``late`` that have nothing under way are left to whoever holds: the next word to them must pause them.
        """
        self._holds += 1
        async with self._turn:
            await self._hurry()
            await self._each(lambda client: self._still(client, mode, late=client in late))

    async def release(self, going: Collection[Client] = ()) -> None:
        """``going`` go on already."""
        assert self._holds > 0, "hold comes first"
        if self._holds == 1:
            async with self._turn:
                await self._each(lambda client: self._on(client, going=client in going))
        self._holds -= 1
        self.told()

    @asynccontextmanager
    async def last(self) -> AsyncIterator[bool]:
        """Meanwhile nobody has servers hold still or go on but who asks: may they go on when this one lets them?"""
        async with self._turn:
            yield self._holds == 1

    async def _hurry(self) -> None:
        """What servers that leave have under way goes on elsewhere."""
        for seat in self.seats:
            if seat.state is State.LEAVING and seat.client is not None:
                await seat.client.finished(0.0)

    async def _on(self, client: Client, *, going: bool) -> None:
        if not going:
            await client.resume()

    async def _still(self, client: Client, mode: PauseMode, *, late: bool = False) -> None:
        if late and not client.flying:
            return
        if mode != "abort" and client.keeps:
            await client.pause(mode)
            return
        await client.pause("abort")
        await client.drained(DRAIN_SECONDS)

    def _say_what_becomes_of_requests(self, name: str, *, keeps: bool) -> None:
        if self.mode == "abort" or name in self._said:
            return
        self._said.add(name)
        if keeps:
            self.tell(f"{name} keeps its requests while new weights come (--pause-generation-mode {self.mode}).")
        else:
            self.tell(
                f"{name} tells one weight version a reply: when new weights come its requests end with what they have "
                f"and are asked again (abort), whatever --pause-generation-mode {self.mode} says."
            )

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
