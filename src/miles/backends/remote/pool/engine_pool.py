"""Engine pool: several SGLang servers as one engine, with least-loaded dispatch, retries on other servers, and pausing.

Who waits for whom: a request waits until some server takes requests; a caller of ``pause`` waits until no token is
sampled. Tokens of a lost server are kept, and another server samples the rest. A paused server may keep its requests if
it reports which weights sampled which token (``miles serve``); otherwise its requests end with the tokens they have
and continue like those of a lost server. Every token therefore carries the version that sampled it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum

from miles.backends.remote.client import PauseMode, RequestInterrupted, ServerLost, SglangClient
from miles.backends.remote.response import GenerateResponse
from miles.backends.remote.response_stitching import Decode, ResponseStitcher, RoutedExpertsShape
from miles.cluster.least_loaded import LeastLoadedIndex
from miles.cluster.straggler import EngineThroughput
from miles.core.errors import EngineError
from miles.core.media import Images
from miles.core.protocols import Completion, OnTokens, SamplingParams
from miles.core.types import Tokens, Version
from miles.models.indexer_layout import IndexerLayout

MAX_RETRIES = 8
"""How often a request is sent again after its server was lost."""

RETRY_SECONDS = 1.0
"""How long a request that failed on every server waits for a change before it is sent again."""

DRAIN_SECONDS = 10.0
_MAX_AFFINITY_KEYS = 8192


class SlotState(StrEnum):
    """State of one server."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    DEAD = "dead"


@dataclass(slots=True, eq=False)
class EngineSlot:
    """One server of the pool. ``outstanding`` counts its requests; ``why`` is its last error."""

    name: str
    client: SglangClient | None = None
    state: SlotState = SlotState.STARTING
    version: Version | None = None
    asleep: bool = False
    outstanding: int = 0
    why: str = ""

    @property
    def open(self) -> bool:
        """Does it take requests?"""
        return self.state is SlotState.SERVING

    @property
    def load(self) -> int:
        return self.outstanding


def weight_version_label(version: Version) -> str:
    """The weight version as servers report it."""
    return f"{version.policy}-{version.number}"


def _labels_between(since: Version, newest: Version) -> dict[str, Version]:
    """The labels of all versions that a request which started under ``since`` may have met."""
    versions = [since._replace(number=number) for number in range(since.number, max(since.number, newest.number) + 1)]
    return {weight_version_label(version): version for version in versions}


def _token_versions(
    slot: EngineSlot, since: Version, newest: Version, response: GenerateResponse
) -> list[tuple[Version, int]]:
    """Which versions sampled the tokens of a response, and how many each, by a server that had ``since`` at its start.

    A single label is that of the last token only: in that case nothing may have changed meanwhile, unless the request
    named the adapter that it used.
    """
    if response.adapter is not None:
        _check_label(slot, since, response.weight_version)
        return [(since, len(response.tokens))]
    runs, labels = response.version_runs, _labels_between(since, newest)
    if runs is None:
        label = response.weight_version
        runs, labels = [] if label is None else [(label, len(response.tokens))], _labels_between(since, since)
    found = [(labels[label], count) for label, count in runs if label in labels]
    if len(found) < len(runs) or found != sorted(found, key=lambda run: run[0]):
        wrong = next((label for label, _ in runs if label not in labels), runs[0][0])
        raise EngineError(
            f"{slot.name} was given weights {weight_version_label(since)} but answered with weights {wrong}; "
            "no other program may update the weights of this run's servers"
        )
    return found or [(since, len(response.tokens))]


def _check_label(slot: EngineSlot, since: Version, label: str | None) -> None:
    """Raise unless a label is that of a version from ``since`` on: the base under the adapters is this run's."""
    policy, _, number = (label or "").rpartition("-")
    if label is not None and (policy != since.policy or not number.isdecimal() or int(number) < since.number):
        raise EngineError(
            f"{slot.name} was given adapter {weight_version_label(since)} but answered with weights {label}; "
            "no other program may update the weights of this run's servers"
        )


class EnginePool:
    """Implements core.protocols.Engine and EngineControl. ``on_failure`` is called at once when a server fails.

    ``mode`` is what a weight update does to in-flight requests of servers that can keep them.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        eos_token_ids: frozenset[int],
        decode: Decode | None = None,
        experts: RoutedExpertsShape | None = None,
        indexer: IndexerLayout | None = None,
        mode: PauseMode = "abort",
        throughput: EngineThroughput | None = None,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._index = LeastLoadedIndex[EngineSlot]()
        for name in names:
            self.add_slot(name)
        self.on_failure: Callable[[EngineSlot, ServerLost], None] = lambda slot, error: None
        self.log = log
        self.mode: PauseMode = mode
        self.throughput = throughput or EngineThroughput()
        self.num_retries = 0
        self.experts = experts
        self.indexer = indexer
        self._eos_token_ids = eos_token_ids
        self._decode = decode
        self._affinity: OrderedDict[int, EngineSlot] = OrderedDict()
        self._logged: set[str] = set()
        self._newest = Version(number=-1)
        self._changed = asyncio.Event()
        self._dispatchable = asyncio.Event()
        self._num_pauses = 0
        self._asleep = False
        self._num_aborts = 0
        self._lock = asyncio.Lock()

    # -- Engine -----------------------------------------------------------------------------

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        """Continue ``tokens`` on the least loaded server, and on another one if that is lost."""
        return await self.generate_stream(tokens, sampling, lambda tokens: None, images)

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        """``generate``, with ``on_tokens`` called with new tokens as they arrive, from whichever server."""
        stitcher = ResponseStitcher(
            tokens.tolist(),
            sampling,
            eos_token_ids=self._eos_token_ids,
            decode=self._decode,
            experts=self.experts,
            indexer=self.indexer,
        )
        key = hash((tokens.tobytes(), *(placed.image.digest for placed in images)))
        aborts = self._num_aborts
        failures = 0
        failed: set[str] = set()
        while True:
            slot = await self._choose(key, failed)
            client, version = slot.client, slot.version
            assert client is not None and version is not None
            self._add_load(slot, +1)
            started = time.monotonic()
            try:
                response, error = await client.generate(stitcher.input_ids, stitcher.remaining, on_tokens, images)
            finally:
                self._add_load(slot, -1)
            if error is None:
                self.throughput.record(
                    slot.name,
                    len(response.tokens),
                    time.monotonic() - started,
                    serving=[each.name for each in self.serving()],
                    version=version.number,
                )
            # A server may have resumed and ended a response before the others have taken the new version.
            while self._num_pauses and any(
                label not in _labels_between(version, self._newest) for label, _ in response.version_runs or ()
            ):
                await self.wait_for_change()
            stitcher.add(response, _token_versions(slot, version, self._newest, response))
            if stitcher.finish_reason is not None:
                return stitcher.completion(stitcher.finish_reason)
            if self._num_aborts != aborts:
                return stitcher.completion("abort")
            if error is not None and not isinstance(error, RequestInterrupted):
                failures += 1
                self.num_retries += 1
                failed.add(slot.name)
                self.on_failure(slot, error)
                if failures > MAX_RETRIES:
                    raise EngineError(f"a request failed on {failures} servers, the last time because {error}")

    async def _choose(self, key: int, failed: set[str]) -> EngineSlot:
        """A server that takes requests: the one that had the same prompt, unless others are far less loaded.

        A server that ``failed`` this request is chosen again only when all have, and after a while, which the health
        monitor needs to examine it.
        """
        while True:
            least = None if self._num_pauses else self._index.least_loaded_except(failed)
            if least is not None:
                last = self._affinity.get(key)
                reuse = last is not None and last.open and last.name not in failed and last.load <= 2 * least.load + 4
                slot = last if last is not None and reuse else least
                self._affinity[key] = slot
                self._affinity.move_to_end(key)
                if len(self._affinity) > _MAX_AFFINITY_KEYS:
                    self._affinity.popitem(last=False)
                return slot
            if failed and not self._num_pauses and len(self._index):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), RETRY_SECONDS)
                failed.clear()
                continue
            if self._all_dead():
                reasons = "; ".join(f"{slot.name}: {slot.why}" for slot in self.slots)
                raise EngineError(f"no server is left: {reasons}")
            await self._dispatchable.wait()

    def _add_load(self, slot: EngineSlot, change: int) -> None:
        slot.outstanding += change
        self._index.update(slot)

    def _all_dead(self) -> bool:
        return all(slot.state is SlotState.DEAD for slot in self.slots)

    async def wait_for_change(self) -> None:
        """Wait until the state of some server changes."""
        await self._changed.wait()

    def notify_change(self) -> None:
        """Wake all who wait for a change; waiting requests only if one may be dispatched, or must fail."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if not self._num_pauses or self._all_dead():
            dispatchable, self._dispatchable = self._dispatchable, asyncio.Event()
            dispatchable.set()

    # -- slots ------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[EngineSlot, ...]:
        return tuple(self._index.members.values())

    def add_slot(self, name: str) -> EngineSlot:
        """Add a server that is about to start."""
        slot = EngineSlot(name)
        self._index.add(slot)
        return slot

    async def drain(self, slot: EngineSlot, seconds: float) -> None:
        """Send a server no more requests, and give those it has so many seconds to end there.

        Requests that have not ended by then continue on other servers; a pause of all servers also moves them.
        """
        self._index.set_state(slot, SlotState.DRAINING, slot.why)
        self.notify_change()
        if slot.client is not None:
            await slot.client.wait_idle(seconds)

    def remove(self, slot: EngineSlot) -> None:
        """Remove the slot of a server that has left."""
        self.mark_failed(slot, "it was removed", dead=True)
        self._index.remove(slot)
        self.notify_change()

    def serving(self) -> list[EngineSlot]:
        return [slot for slot in self.slots if slot.state is SlotState.SERVING]

    def mark_serving(self, slot: EngineSlot, client: SglangClient, version: Version) -> None:
        """A server has the weights of ``version`` and takes requests from now on."""
        slot.asleep = slot.asleep and slot.client is client
        slot.client = client
        slot.version = version
        self._newest = max(self._newest, version, key=lambda each: each.number)
        self._index.set_state(slot, SlotState.SERVING, "")
        if client.adapters.current is None:
            self._log_pause_mode(slot.name, keeps_requests=client.keeps_requests)
        self.notify_change()

    def mark_failed(self, slot: EngineSlot, why: str, *, dead: bool = False) -> None:
        """A server takes no more requests, never again if ``dead``; those it has continue on other servers."""
        self._index.set_state(slot, SlotState.DEAD if dead else SlotState.FAILED, why)
        if slot.client is not None:
            slot.client.interrupt_all()
        self.notify_change()

    # -- pausing ----------------------------------------------------------------------------

    @property
    def is_paused(self) -> bool:
        """Is no request dispatched now?"""
        return self._num_pauses > 0

    async def pause(
        self,
        mode: PauseMode = "abort",
        pause_later: Collection[SglangClient] = (),
        keep_running: Collection[SglangClient] = (),
    ) -> None:
        """No token is sampled when this returns, and no request starts before as many calls of ``resume``.

        ``in_place`` and ``retract`` leave requests with servers that can keep them; other servers have none in flight.
        Clients of ``pause_later`` without in-flight requests are left to the caller, whose next request pauses them.
        The servers of ``keep_running`` go on with the requests that they have.
        """
        self._num_pauses += 1
        async with self._lock:
            await self._interrupt_draining()
            paused = [slot for slot in self.serving() if slot.client not in keep_running]
            await asyncio.gather(
                *(
                    self._for_one(slot, lambda client: self._pause(client, mode, later=client in pause_later))
                    for slot in paused
                )
            )

    async def resume(self, resumed: Collection[SglangClient] = ()) -> None:
        """End one pause; the clients of ``resumed`` have resumed already."""
        assert self._num_pauses > 0, "pause comes first"
        if self._num_pauses == 1:
            async with self._lock:
                paused = [slot for slot in self.serving() if slot.client not in resumed]
                await asyncio.gather(*(self._for_one(slot, lambda client: client.resume()) for slot in paused))
        self._num_pauses -= 1
        self.notify_change()

    @asynccontextmanager
    async def exclusive_pause(self) -> AsyncIterator[bool]:
        """Nobody else pauses or resumes servers meanwhile; yields whether the caller's pause is the only one."""
        async with self._lock:
            yield self._num_pauses == 1

    async def _interrupt_draining(self) -> None:
        """Move the in-flight requests of draining servers to other servers."""
        for slot in self.slots:
            if slot.state is SlotState.DRAINING and slot.client is not None:
                await slot.client.wait_idle(0.0)

    async def _pause(self, client: SglangClient, mode: PauseMode, *, later: bool = False) -> None:
        if later and not client.num_inflight:
            return
        if mode != "abort" and client.keeps_requests:
            await client.pause(mode)
            return
        await client.pause("abort")
        await client.drain(DRAIN_SECONDS)

    def _log_pause_mode(self, name: str, *, keeps_requests: bool) -> None:
        if self.mode == "abort" or name in self._logged:
            return
        self._logged.add(name)
        if keeps_requests:
            self.log(
                f"{name} keeps its in-flight requests during weight updates (--pause-generation-mode {self.mode})."
            )
        else:
            self.log(
                f"{name} reports one weight version per response, so --pause-generation-mode {self.mode} is treated as "
                "abort: in-flight requests are aborted and resumed after the update."
            )

    async def _for_each(self, action: Callable[[SglangClient], Awaitable[object]]) -> None:
        """Run ``action`` for every serving server at once; one that is lost meanwhile is marked as failed."""
        await asyncio.gather(*(self._for_one(slot, action) for slot in self.serving()))

    async def _for_one(self, slot: EngineSlot, action: Callable[[SglangClient], Awaitable[object]]) -> None:
        assert slot.client is not None
        try:
            await action(slot.client)
        except ServerLost as error:
            self.mark_failed(slot, str(error))
            self.on_failure(slot, error)

    # -- EngineControl ----------------------------------------------------------------------

    async def abort(self) -> None:
        """End every request with the tokens it has."""
        self._num_aborts += 1
        await self._interrupt_draining()
        await self._for_each(lambda client: client.abort())

    async def sleep(self) -> None:
        """Release the KV-cache memory on every server."""
        if not self._asleep:
            self._asleep = True
            await self.pause()
            for slot in self.serving():
                await self._for_one(slot, lambda client: client.sleep())
                slot.asleep = True

    async def wake(self) -> None:
        if self._asleep:
            for slot in self.serving():
                if slot.asleep:
                    await self._for_one(slot, lambda client: client.wake())
                    slot.asleep = False
            self._asleep = False
            await self.resume()

    async def health(self) -> Mapping[str, float]:
        return {
            "engines": float(len(self.slots)),
            "engines_serving": float(len(self.serving())),
            "running": float(sum(slot.load for slot in self.slots)),
            "requests_retried": float(self.num_retries),
        }
