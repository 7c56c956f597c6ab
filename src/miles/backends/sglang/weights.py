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

from torch import Tensor

from miles.backends.sglang.adapters import OfAdapters
from miles.backends.sglang.buckets import Bucket, Named, Weights, grouped, hub_named, packed
from miles.backends.sglang.carriers import Carrier, InRequests
from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.deltas import Delta
from miles.backends.sglang.direct import Direct, Stale
from miles.backends.sglang.fleet import Fleet, Seat, State, label_of
from miles.backends.sglang.kept import HostMemory, Kept, moved
from miles.backends.sglang.lines import KeptOtherwise, Line, alike, line_to, what_was_verified
from miles.backends.sglang.mapped import ByMemory, send
from miles.backends.sglang.present import Present, called
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
        self._there = Present(fleet, seconds)
        self._said: set[str] = set()
        self._doubts = 0
        self._direct = Direct(spec, carrier.show, tell) if isinstance(carrier, ByMemory) else None

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
        resident = self._direct is not None and self._direct.resident(tensors)
        described = time.perf_counter()
        readings: dict[str, float] = {}
        spare = self._doubts < _DOUBTS
        for attempt in range(TRIES):
            await self._there.somebody(version)
            try:
                async with self._turn:
                    lines = await self._writers(tensors) if resident and only is None else None
                    if lines is not None:
                        readings = await self._in_place(version, lines, tensors, spare=spare)
                    else:
                        groups, whole = self._groups(tensors, only)
                        readings = await self._transaction(version, groups, whole=whole, spare=spare)
                break
            except KeptOtherwise as error:
                spare = False
                self._doubts += 1
                self._tell(f"{error}; all servers are sent all weights{self._from_now_on()}.")
            except Stale as error:
                assert self._direct is not None
                self._direct.forget()
                resident = False
                self._tell(f"{error}; its weights go through windows this time.")
            except SyncError:
                if not (isinstance(self._carrier, Delta) and self._carrier.again()):
                    raise
            except Lost as error:
                if attempt == TRIES - 1:
                    raise SyncError(f"{called(version)} was not published: {error}") from error
                await self._there.look_round()
        else:
            raise SyncError(f"{called(version)} was not published in {TRIES} tries")
        kept = readings.get("publish/keep", 0.0)
        transfer = time.perf_counter() - described - kept
        return {"publish/describe": described - started, "publish/transfer": transfer, **readings}

    def ahead(self) -> None:
        """The weights are as they will be at the next ``publish``: what can be done on their device by then begins.

        To be called where their last change was asked of the device. It may be left out, and may be wrong.
        """
        if self._direct is not None:
            self._direct.ahead(self._weights())

    def _groups(self, tensors: Mapping[str, Tensor], only: Collection[str] | None) -> tuple[list[list[Named]], bool]:
        """What goes out, in buckets, and whether it is everything: a server without weights has none to keep."""
        whole = only is None or self._kept is None or bool(self._there.opened)
        chosen = tensors if only is None or whole else {name: t for name, t in tensors.items() if name in only}
        return grouped(hub_named(self._spec, chosen), self._bucket_bytes), whole

    async def join(self, seat: Seat, client: Client) -> None:
        """A server is there: it gets what was committed last and takes requests; or waits for the first version."""
        async with self._turn:
            if self._kept is None:
                self._there.opened[seat] = client
                self._fleet.told()
                return
            line = await line_to(seat, client, self._seconds)
            await self._put(line, self._kept)
            self._fleet.admit(seat, client, self._kept.version)

    def leave(self, seat: Seat) -> None:
        """A server that had joined is no longer there."""
        self._there.opened.pop(seat, None)
        self._there.made.pop(seat, None)

    # -- the transaction --------------------------------------------------------------------

    async def _transaction(
        self, version: Version, groups: Sequence[Sequence[Named]], *, whole: bool, spare: bool
    ) -> dict[str, float]:
        lines = await self._there.lines()
        if not lines:
            raise Lost(self._there.nobody())
        async with AsyncExitStack() as held:
            if any(line.still for line in lines):
                await self._hold(held)
            begun = lines
            before = self._there_already(lines) if whole and spare else {}
            try:
                shapes = Shapes({name: tensor for group in groups for name, tensor in group})
                shapes.whole, shapes.keeps = whole, bool(before)
                lines = await self._there.each(lines, lambda line: line.begin(shapes))
                lines, sent = await self._sent(lines, groups, before)
                rest = {} if whole or self._kept is None else self._kept.digests
                lines = await self._verified(lines, Digests({**rest, **sent.digests}))
            except MilesError as error:
                await self._rollback(begun)
                if isinstance(error, Lost | SyncError):
                    raise
                raise SyncError(f"{called(version)} was refused: {error}; every server is on the version before") from (
                    error
                )
            if not self._fleet.held:
                await self._hold(held)
            await self._commit(lines, version)
            readings = {"publish/bytes": float(sent.bytes)}
            if sent.buckets is not None:
                self._keep(version, sent.buckets, whole=whole and not before)
                return readings
        spent = await self._keep_from_device(version, groups, sent.digests, whole=whole, renew=bool(before))
        return {**readings, "publish/keep": spent}

    async def _keep_from_device(
        self,
        version: Version,
        groups: Sequence[Sequence[Named]],
        digests: Mapping[str, int],
        *,
        whole: bool,
        renew: bool,
    ) -> float:
        """Servers go on already; the trainer waits until its weights, which it is going to change, are kept."""
        started, kept = time.perf_counter(), self._kept
        if whole:
            self._kept = None  # its memory is written over
        if kept is not None and renew:
            self._kept = await asyncio.to_thread(kept.renewed, version, groups, digests)
        else:
            memory = self._host if whole else HostMemory()
            self._keep(version, await asyncio.to_thread(memory.keep, groups, digests), whole=whole)
        return time.perf_counter() - started

    # -- in place ---------------------------------------------------------------------------

    async def _writers(self, tensors: Mapping[str, Tensor]) -> list[Line] | None:
        """Ways into the servers there are, if all can write these tensors in place and be put back; else None."""
        kept, direct, carrier = self._kept, self._direct, self._carrier
        serving = self._fleet.serving()
        if kept is None or self._there.opened or direct is None or not isinstance(carrier, ByMemory):
            return None
        lines = [self._there.made[seat] for seat in serving if seat in self._there.made]
        known = all(line.client is line.seat.client and line.seat.version == kept.version for line in lines)
        if not lines or len(lines) != len(serving) or not known:
            return None
        if not await carrier.reaches(lines, [list(tensors.items())[:1]]):
            return None
        return lines if await direct.ready(lines, tensors, self._there.each) else None

    async def _in_place(
        self, version: Version, lines: list[Line], tensors: Mapping[str, Tensor], *, spare: bool
    ) -> dict[str, float]:
        """All servers hold still and write over what they have; where one fails, all are put back to what was kept."""
        direct, begun, mode = self._direct, lines, self._fleet.mode
        assert direct is not None
        going: set[Client] = set()
        async with AsyncExitStack() as held:
            direct.start()  # and goes on while servers come to rest
            await self._fleet.hold(mode, late=[line.client for line in lines])
            held.push_async_callback(self._fleet.release, going)
            try:
                lines = await direct.write(self._there.left(lines), self._there.each, mode=mode, spare=spare)
            except MilesError as error:
                await self._rollback(begun)
                if isinstance(error, Lost | KeptOtherwise | Stale):
                    raise
                raise SyncError(
                    f"{called(version)} was refused: {error}; every server is on the version before"
                ) from error
            async with self._fleet.last() as last:  # then a word to commit is one to go on, too
                direct.resume(lines, last)
                await self._commit(lines, version)
                going |= {line.client for line in self._there.there(lines)} if last else set()
        started = time.perf_counter()
        groups = grouped(hub_named(self._spec, tensors), self._bucket_bytes)
        await self._keep_from_device(version, groups, direct.by_name(), whole=True, renew=True)
        return {"publish/bytes": float(direct.bytes), "publish/keep": time.perf_counter() - started}

    def _there_already(self, lines: Sequence[Line]) -> Mapping[str, int]:
        """The digests of what all these have; none where one has never been given the last version, or nobody has."""
        kept = self._kept
        if kept is None or any(line.seat in self._there.opened or line.seat.version != kept.version for line in lines):
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
        if isinstance(carrier, OfAdapters):
            lines, digests, size = await carrier.send(groups, lines, self._there.each, before)
            return lines, Sent(digests=digests, buckets=None, bytes=size)
        if isinstance(carrier, ByMemory) and await carrier.reaches(lines, groups):
            lines, digests = await send(groups, lines, self._there.each, before)
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
        await self._fleet.hold(self._fleet.mode)
        held.push_async_callback(self._fleet.release)

    async def _buckets(
        self, lines: list[Line], groups: Sequence[Sequence[Named]], before: Mapping[str, int]
    ) -> tuple[list[Line], list[Bucket], dict[str, int]]:
        """Send all that is not as ``before``, the next being packed while one is sent; that, and the digests of all."""
        await self._carrier.begin(lines, self._there.each)
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
                    await self._carrier.carry(bucket, lines, self._there.each)
                bucket.forget()
                buckets.append(bucket)
                lines = self._there.left(lines)
        finally:
            await asyncio.gather(coming, return_exceptions=True)
        await self._carrier.end(lines, self._there.each)
        return self._there.left(lines), buckets, digests

    async def _verified(self, lines: list[Line], digests: Digests) -> list[Line]:
        proofs: list[tuple[Line, str | None]] = []

        async def verify(line: Line) -> None:
            proofs.append((line, await line.verify(digests)))

        lines = await self._there.each(lines, verify)
        alike(proofs)
        for line, proof in proofs:
            if line.seat.name not in self._said:
                self._said.add(line.seat.name)
                self._tell(what_was_verified(line, proof, len(digests)))
        return lines

    async def _commit(self, lines: Sequence[Line], version: Version) -> None:
        """From here on the version is the new one: a server that does not take it is dropped, and started again."""

        async def commit(line: Line) -> None:
            try:
                await line.commit(label_of(version))
            except EngineError as error:
                raise Lost(f"{line.seat.name} did not commit: {error}") from error

        await self._there.told(lines, commit)
        for line in self._there.there(lines):
            self._there.opened.pop(line.seat, None)
            self._fleet.admit(line.seat, line.client, version)

    async def _rollback(self, lines: Sequence[Line]) -> None:
        """Servers that stage forget; those that were written over are given what was there before."""
        kept = self._kept

        async def back(line: Line) -> None:
            try:
                await line.rollback()
                if line.torn and kept is not None:
                    await self._put(line, kept)
            except EngineError as error:
                raise Lost(f"{line.seat.name} could not be put back: {error}") from error

        await self._there.told([line for line in lines if line.seat.state is not State.ILL], back)

    async def _put(self, line: Line, kept: Kept) -> None:
        """One server alone, as it was committed."""
        await line.begin(kept.shapes)
        alone = InRequests()
        for bucket in kept.buckets:
            await alone.carry(bucket, [line], _all)
            bucket.forget()
        await line.verify(kept.digests)
        await line.commit(label_of(kept.version))

    async def close(self) -> None:
        await self._carrier.close()


async def _all(lines: Sequence[Line], word: Callable[[Line], Awaitable[Any]]) -> None:
    await asyncio.gather(*map(word, lines))
