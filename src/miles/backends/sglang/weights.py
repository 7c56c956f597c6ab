"""A publication to servers: all that are there flip to the new version, or none does, and each is told what to prove.

``begin`` (names, shapes, formats) -> buckets -> ``verify`` -> ``commit``. The next bucket is brought to the host while
this one is on its way. What was committed last is kept on the host: a server that fails is put back to it, one that
joins is given it before its first request. A server that is lost on the way is dropped, and does not fail the others.

The digests of a version are of all its tensors, and all are proven; only those that are not what was committed last are
sent: of a model that is frozen in part, or trained by adapters that are merged into some matrices, those alone travel.

Servers that stage what comes (``miles serve``) go on answering until the commit; others hold still from the start.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from miles.backends.sglang.buckets import Bucket, Named, Weights, grouped, hub_named, packed
from miles.backends.sglang.carriers import Carrier, InRequests
from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.deltas import Delta
from miles.backends.sglang.fleet import Fleet, Seat, State, label_of
from miles.backends.sglang.kept import HostMemory, Kept, moved
from miles.backends.sglang.lines import KeptOtherwise, Line, alike, line_to
from miles.backends.sglang.mapped import ByMemory, send
from miles.backends.sglang.promised import Digests, Shapes
from miles.cluster.local import Run
from miles.core.errors import EngineError, MilesError, SyncError
from miles.core.types import Version
from miles.models.spec import DecoderSpec

TRIES = 5
"""How often a publication is begun, where all servers were lost, or one in a way that took the others' buckets too."""

# How often a server may turn out to have other weights than it was given before all are sent everything each time.
_DOUBTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What went out: the digests of the version, and, where it went over the host, what was sent, in buckets."""

    digests: Mapping[str, int]
    buckets: Sequence[Bucket] | None
    bytes: int


class ServerPublication:
    """Implements core.protocols.WeightSync for the servers of a ``fleet``."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        weights: Weights,
        spec: DecoderSpec,
        carrier: Carrier,
        run: Run,
        bucket_bytes: int,
        seconds: float,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._fleet, self._weights, self._spec, self._carrier = fleet, weights, spec, carrier
        self._run, self._bucket_bytes, self._seconds, self._tell = run, bucket_bytes, seconds, tell
        self._kept: Kept | None = None
        self._host = HostMemory()
        self._turn = asyncio.Lock()
        self._opened: dict[Seat, Client] = {}
        self._said: set[str] = set()
        self._doubts = 0

    @property
    def committed(self) -> Version | None:
        """The version all serving servers have."""
        return None if self._kept is None else self._kept.version

    async def publish(self, version: Version, only: Collection[str] | None = None) -> Mapping[str, float]:
        """Give every server the weights as they are now; returns wall-clock readings, and how many bytes each was sent.

        ``only``: names of the weights of which alone any has changed; the others are not even looked at, and servers
        prove that they have them as they were.
        """
        started = time.perf_counter()
        tensors = await self._run(self._weights)
        every = grouped(hub_named(self._spec, tensors), self._bucket_bytes)
        some: list[list[Named]] | None = None
        if only is not None and self._kept is not None:
            chosen = {name: tensor for name, tensor in tensors.items() if name in only}
            some = grouped(hub_named(self._spec, chosen), self._bucket_bytes)
        described = time.perf_counter()
        readings: dict[str, float] = {}
        spare = self._doubts < _DOUBTS
        for attempt in range(TRIES):
            await self._somebody(version)
            try:
                async with self._turn:
                    # A server that waits for its first weights has none to keep.
                    groups = every if some is None or self._opened else some
                    readings = await self._transaction(version, groups, whole=groups is every, spare=spare)
                break
            except KeptOtherwise as error:
                spare = False
                self._doubts += 1
                self._tell(f"{error}; all servers are sent all weights{self._from_now_on()}.")
            except SyncError:
                if not (isinstance(self._carrier, Delta) and self._carrier.again()):
                    raise
            except Lost as error:
                if attempt == TRIES - 1:
                    raise SyncError(f"{_called(version)} was not published: {error}") from error
                await self._look_round()
        else:
            raise SyncError(f"{_called(version)} was not published in {TRIES} tries")
        kept = readings.get("publish/keep", 0.0)
        transfer = time.perf_counter() - described - kept
        return {"publish/describe": described - started, "publish/transfer": transfer, **readings}

    async def join(self, seat: Seat, client: Client) -> None:
        """A server is there: it gets what was committed last and takes requests; or waits for the first version."""
        async with self._turn:
            if self._kept is None:
                self._opened[seat] = client
                self._fleet.told()
                return
            line = await line_to(seat, client, self._seconds)
            await self._put(line, self._kept)
            self._fleet.admit(seat, client, self._kept.version)

    def leave(self, seat: Seat) -> None:
        """A server that had joined is no longer there."""
        self._opened.pop(seat, None)

    # -- the transaction --------------------------------------------------------------------

    async def _transaction(
        self, version: Version, groups: Sequence[Sequence[Named]], *, whole: bool, spare: bool
    ) -> dict[str, float]:
        lines = await self._lines()
        if not lines:
            raise Lost(self._nobody())
        async with AsyncExitStack() as held:
            if any(line.still for line in lines):
                await self._hold(held)
            begun = lines
            before = self._there_already(lines) if whole and spare else {}
            try:
                shapes = Shapes({name: tensor for group in groups for name, tensor in group})
                shapes.whole, shapes.keeps = whole, bool(before)
                lines = await self._each(lines, lambda line: line.begin(shapes))
                lines, sent = await self._sent(lines, groups, before)
                rest = {} if whole or self._kept is None else self._kept.digests
                lines = await self._verified(lines, Digests({**rest, **sent.digests}))
            except MilesError as error:
                await self._rollback(begun)
                if isinstance(error, Lost | SyncError):
                    raise
                raise SyncError(
                    f"{_called(version)} was refused: {error}; every server is on the version before"
                ) from (error)
            if not self._fleet.held:
                await self._hold(held)
            await self._commit(lines, version)
            readings = {"publish/bytes": float(sent.bytes)}
            if sent.buckets is not None:
                self._keep(version, sent.buckets, whole=whole and not before)
                return readings
        # Servers go on already; the trainer waits until its weights, which it is going to change, are kept.
        started = time.perf_counter()
        kept = self._kept
        if whole:
            self._kept = None  # its memory is written over
        if kept is not None and before:
            self._kept = await asyncio.to_thread(kept.renewed, version, groups, sent.digests)
        else:
            memory = self._host if whole else HostMemory()
            self._keep(version, await asyncio.to_thread(memory.keep, groups, sent.digests), whole=whole)
        return {**readings, "publish/keep": time.perf_counter() - started}

    def _there_already(self, lines: Sequence[Line]) -> Mapping[str, int]:
        """The digests of what all these have; none where one has never been given the last version, or nobody has."""
        kept = self._kept
        if kept is None or any(line.seat in self._opened or line.seat.version != kept.version for line in lines):
            return {}
        return kept.digests

    def _from_now_on(self) -> str:
        return " from now on" if self._doubts == _DOUBTS else ""

    def _keep(self, version: Version, buckets: Sequence[Bucket], *, whole: bool) -> None:
        """Whoever joins from now on gets this."""
        before = None if whole else self._kept
        fresh = Kept(version=version, buckets=tuple(buckets))
        self._kept = fresh if before is None else before.changed(version, buckets)

    async def _sent(
        self, lines: list[Line], groups: Sequence[Sequence[Named]], before: Mapping[str, int]
    ) -> tuple[list[Line], Sent]:
        carrier = self._carrier
        if isinstance(carrier, ByMemory) and await carrier.reaches(lines, groups):
            lines, digests = await send(groups, lines, self._each, before)
            size = sum(t.nbytes for group in groups for name, t in group if digests[name] != before.get(name))
            return lines, Sent(digests=digests, buckets=None, bytes=size)
        if isinstance(carrier, Delta) and self._kept is not None:
            carrier.since(self._kept.version, self._kept.tensors)
        changes = carrier.sent if isinstance(carrier, Delta) else 0
        lines, buckets, digests = await self._buckets(lines, groups, before)
        size = sum(tensor.nbytes for bucket in buckets for tensor in bucket.tensors.values())
        if isinstance(carrier, Delta) and carrier.sent > changes:
            size = carrier.sent - changes
        return lines, Sent(digests=digests, buckets=buckets, bytes=size)

    async def _hold(self, held: AsyncExitStack) -> None:
        await self._fleet.hold()
        held.push_async_callback(self._fleet.release)

    async def _buckets(
        self, lines: list[Line], groups: Sequence[Sequence[Named]], before: Mapping[str, int]
    ) -> tuple[list[Line], list[Bucket], dict[str, int]]:
        """Send all that is not as ``before``, the next being packed while one is sent; that, and the digests of all."""
        await self._carrier.begin(lines, self._each)
        buckets: list[Bucket] = []
        digests: dict[str, int] = {}
        coming = asyncio.create_task(asyncio.to_thread(packed, groups[0]))
        try:
            for i in range(len(groups)):
                bucket = await coming
                if i + 1 < len(groups):
                    coming = asyncio.create_task(asyncio.to_thread(packed, groups[i + 1]))
                digests |= bucket.digests
                bucket = moved(bucket, before) if before else bucket
                if bucket.tensors:
                    await self._carrier.carry(bucket, lines, self._each)
                bucket.forget()
                buckets.append(bucket)
                lines = self._left(lines)
        finally:
            await asyncio.gather(coming, return_exceptions=True)
        await self._carrier.end(lines, self._each)
        return self._left(lines), buckets, digests

    async def _verified(self, lines: list[Line], digests: Digests) -> list[Line]:
        proofs: list[tuple[Line, str | None]] = []

        async def verify(line: Line) -> None:
            proofs.append((line, await line.verify(digests)))

        lines = await self._each(lines, verify)
        alike(proofs)
        for line, proof in proofs:
            self._say_what_was_verified(line, proof, len(digests))
        return lines

    async def _commit(self, lines: Sequence[Line], version: Version) -> None:
        """From here on the version is the new one: a server that does not take it is dropped, and started again."""

        async def commit(line: Line) -> None:
            try:
                await line.commit(label_of(version))
            except EngineError as error:
                raise Lost(f"{line.seat.name} did not commit: {error}") from error

        await self._told(lines, commit)
        for line in self._there(lines):
            self._opened.pop(line.seat, None)
            self._fleet.admit(line.seat, line.client, version)

    async def _rollback(self, lines: Sequence[Line]) -> None:
        """Servers that stage forget; those that were written over are given what was there before."""
        kept = self._kept

        async def back(line: Line) -> None:
            try:
                await line.rollback()
                if line.still and kept is not None:
                    await self._put(line, kept)
            except EngineError as error:
                raise Lost(f"{line.seat.name} could not be put back: {error}") from error

        await self._told([line for line in lines if line.seat.state is not State.ILL], back)

    async def _put(self, line: Line, kept: Kept) -> None:
        """One server alone, as it was committed."""
        await line.begin(kept.shapes)
        alone = InRequests()
        for bucket in kept.buckets:
            await alone.carry(bucket, [line], _all)
            bucket.forget()
        await line.verify(kept.digests)
        await line.commit(label_of(kept.version))

    # -- servers ----------------------------------------------------------------------------

    async def _lines(self) -> list[Line]:
        """Servers that take requests, and those that wait for their first weights."""
        there = {seat: seat.client for seat in self._fleet.serving() if seat.client is not None} | self._opened
        made: list[Line] = []

        async def open_(seat: Seat, client: Client) -> None:
            try:
                made.append(await line_to(seat, client, self._seconds))
            except EngineError as error:
                self._drop(seat, error if isinstance(error, Lost) else Lost(str(error)))

        await asyncio.gather(*(open_(seat, client) for seat, client in there.items()))
        return sorted(made, key=lambda line: line.seat.name)

    async def _each(self, lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> list[Line]:
        """Tell all at once, of whom some must be left; who is lost is dropped, and the first refusal raised."""
        await self._told(lines, word)
        return self._left(lines)

    async def _told(self, lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> None:
        """The first refusal is raised when all have answered."""
        results = await asyncio.gather(*(word(line) for line in lines), return_exceptions=True)
        refusals: list[BaseException] = []
        for line, result in zip(lines, results, strict=True):
            if isinstance(result, Lost):
                self._drop(line.seat, result)
            elif isinstance(result, BaseException):
                refusals.append(result)
        if refusals:
            raise refusals[0]

    def _there(self, lines: Sequence[Line]) -> list[Line]:
        return [line for line in lines if line.seat.state is State.SERVING or line.seat in self._opened]

    def _left(self, lines: Sequence[Line]) -> list[Line]:
        left = self._there(lines)
        if not left:
            raise Lost(self._nobody())
        return left

    async def _somebody(self, version: Version) -> None:
        """Wait until some server is there: one that was lost is on its way back, or given up for good."""
        while not (self._fleet.serving() or self._opened):
            if all(seat.state is State.GONE for seat in self._fleet.seats):
                raise SyncError(f"{_called(version)} was not published: {self._nobody()}")
            await self._fleet.news()

    def _drop(self, seat: Seat, why: Lost) -> None:
        self._opened.pop(seat, None)
        self._fleet.drop(seat, str(why))
        self._fleet.trouble(seat, why)

    async def _look_round(self) -> None:
        """Drop whoever does not answer: some server was lost with what all of them were sent."""
        for seat, client in [*((s, s.client) for s in self._fleet.serving()), *self._opened.items()]:
            why = None if client is None else await client.healthy(10.0, generate=False)
            if why is not None:
                self._drop(seat, Lost(why))

    def _nobody(self) -> str:
        told = [f"{seat.name}: {seat.why}" for seat in self._fleet.seats if seat.why]
        return f"no server is there to take it ({'; '.join(told) or 'none has started'})"

    def _say_what_was_verified(self, line: Line, proof: str | None, count: int) -> None:
        if line.seat.name in self._said:
            return
        self._said.add(line.seat.name)
        if not line.still:
            self._tell(f"{line.seat.name} proves the digest of each of {count} tensors before it takes new weights.")
        elif proof is not None:
            self._tell(f"{line.seat.name} takes weights in place; its checksum of them must be that of the others.")
        else:
            self._tell(
                f"{line.seat.name} takes weights in place and has no digests: names and shapes of {count} tensors are "
                "checked before they are sent, and that it took each bucket after."
            )

    async def close(self) -> None:
        await self._carrier.close()


async def _all(lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> None:
    await asyncio.gather(*map(word, lines))


def _called(version: Version) -> str:
    return f"{version.policy} version {version.number}"
