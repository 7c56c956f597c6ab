"""Weight update of remote servers: all of them switch to the new version, or none does, and each verifies its weights.

``begin`` (names, shapes, dtypes) -> buckets -> ``verify`` -> ``commit``. The next bucket is copied to the host while
this one is sent. The last committed version is kept on the host: a server that fails is rolled back to it, and one that
joins is sent it before its first request. A server that is lost on the way does not fail the others.

The digests of a version cover all its tensors, and all are verified; only tensors that differ from the last committed
version are sent: of a partly frozen model, or of LoRA adapters merged into some matrices, only the changed ones.

Servers that stage buckets (``miles serve``) keep generating until the commit; others are paused from the start. Stock
SGLang that is sent LoRA adapters is not paused, and neither are servers of ours that hold them by name: each version is
an adapter of its own, which requests name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from torch import Tensor

from miles.backends.remote.client import ServerLost, SglangClient
from miles.backends.remote.committed_weights import CommittedWeights, HostWeightBuffer, select_changed
from miles.backends.remote.pool.engine_pool import EnginePool, EngineSlot, SlotState, weight_version_label
from miles.backends.remote.sglang_lora import build_adapter_format
from miles.backends.remote.transports.buckets import (
    Bucket,
    DigestManifest,
    GetWeights,
    Named,
    QuantizedLayout,
    ShapeManifest,
    iter_hf_named,
    pack_bucket,
    split_into_buckets,
)
from miles.backends.remote.transports.delta import DeltaTransport
from miles.backends.remote.transports.ipc import IpcTransport, send_through_windows
from miles.backends.remote.transports.ipc_inplace import InPlaceIpcWriter, StaleMapping
from miles.backends.remote.transports.lora import LoraTransport
from miles.backends.remote.transports.senders import WeightTransport
from miles.backends.remote.update_protocols import (
    StagedUpdate,
    UnchangedWeightMismatch,
    UpdateProtocol,
    check_checksums_agree,
    describe_verification,
)
from miles.backends.remote.update_selftest import UpdateSelfTest
from miles.backends.remote.update_targets import UpdateTargets, describe_version
from miles.cluster.executor import Executor
from miles.core.errors import EngineError, MilesError, SyncError
from miles.core.types import Version
from miles.models.spec import DecoderSpec

MAX_TRIES = 5
"""How often an update is tried if all servers are lost, or one in a way that breaks the transport for the others."""

# How often a server may have other weights than it was sent before unchanged weights are always sent, too.
_MAX_MISMATCHES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """The digests of the version, and, if it was sent over the host, the buckets that were sent."""

    digests: Mapping[str, int]
    buckets: Sequence[Bucket] | None
    bytes: int


class RemoteWeightUpdate:
    """Implements core.protocols.WeightSync for the servers of a pool."""

    def __init__(
        self,
        pool: EnginePool,
        *,
        weights: GetWeights,
        spec: DecoderSpec,
        transport: WeightTransport,
        executor: Executor,
        bucket_bytes: int,
        seconds: float,
        layout: QuantizedLayout = "packed",
        self_test: bool | None = None,
        num_versions: int = 0,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._pool = pool
        self._self_test = UpdateSelfTest(self_test, seconds, log)
        self._weights = weights
        self._spec = spec
        self._layout: QuantizedLayout = layout
        self._transport = transport
        self._executor = executor
        self._bucket_bytes = bucket_bytes
        self._seconds = seconds
        self._log = log
        self._committed: CommittedWeights | None = None
        self._host_buffer = HostWeightBuffer()
        self._lock = asyncio.Lock()
        self._targets = UpdateTargets(pool, seconds, build_adapter_format(spec, num_versions=num_versions), log)
        self._described: set[str] = set()
        self._mismatches = 0
        self._writer = InPlaceIpcWriter(spec, transport.export, log) if isinstance(transport, IpcTransport) else None

    @property
    def committed_version(self) -> Version | None:
        """The version of all serving servers."""
        return None if self._committed is None else self._committed.version

    async def publish(self, version: Version, only: Collection[str] | None = None) -> Mapping[str, float]:
        """Send every server the current weights; returns wall-clock times, and the bytes sent to each.

        ``only``: names of the weights that may have changed; the others are not even compared, and servers verify that
        theirs are unchanged.
        """
        started = time.perf_counter()
        tensors = await self._executor(self._weights)
        resident = self._writer is not None and self._writer.is_resident(tensors)
        described = time.perf_counter()
        metrics: dict[str, float] = {}
        skip_unchanged = self._mismatches < _MAX_MISMATCHES
        for attempt in range(MAX_TRIES):
            await self._targets.wait_for_server(version)
            try:
                async with self._lock:
                    updates = await self._in_place_targets(tensors) if resident and only is None else None
                    if updates is not None:
                        metrics = await self._update_in_place(version, updates, tensors, skip_unchanged=skip_unchanged)
                    else:
                        groups, full = self._split(tensors, only)
                        metrics = await self._update(version, groups, full=full, skip_unchanged=skip_unchanged)
                break
            except UnchangedWeightMismatch as error:
                skip_unchanged = False
                self._mismatches += 1
                always = " from now on" if self._mismatches == _MAX_MISMATCHES else ""
                self._log(f"{error}; all servers are sent all weights{always}.")
            except StaleMapping as error:
                assert self._writer is not None
                self._writer.forget()
                resident = False
                self._log(f"{error}; its weights are sent through windows this time.")
            except SyncError:
                if not (isinstance(self._transport, DeltaTransport) and self._transport.retry_full()):
                    raise
            except ServerLost as error:
                if attempt == MAX_TRIES - 1:
                    raise SyncError(f"{describe_version(version)} was not published: {error}") from error
                await self._targets.check_health()
        else:
            raise SyncError(f"{describe_version(version)} was not published in {MAX_TRIES} tries")
        transfer = time.perf_counter() - described - metrics.get("publish/keep", 0.0)
        return {"publish/describe": described - started, "publish/transfer": transfer, **metrics}

    def start_digests(self) -> None:
        """Start to compute the digests of the weights on their device, ahead of the next ``publish``.

        To be called after the last change of the weights was queued on the device. The call is optional, and a later
        change is noticed.
        """
        if self._writer is not None:
            self._writer.start_early(self._weights())

    def _split(self, tensors: Mapping[str, Tensor], only: Collection[str] | None) -> tuple[list[list[Named]], bool]:
        """The tensors to send, in buckets, and whether these are all: a server without weights has none to keep."""
        full = only is None or self._committed is None or bool(self._targets.waiting)
        selected = tensors if only is None or full else {name: t for name, t in tensors.items() if name in only}
        return split_into_buckets(iter_hf_named(self._spec, selected, self._layout), self._bucket_bytes), full

    async def join(self, slot: EngineSlot, client: SglangClient) -> None:
        """A server has started: send it the last committed version, or have it wait for the first one."""
        async with self._lock:
            if self._committed is None:
                self._targets.waiting[slot] = client
                self._pool.notify_change()
                return
            update = await self._targets.open(slot, client)
            await self._restore(update, self._committed)
            if isinstance(update, StagedUpdate):
                await self._self_test.check(update, self._committed.digests)
            self._pool.mark_serving(slot, client, self._committed.version)

    def leave(self, slot: EngineSlot) -> None:
        """A server that had joined is gone."""
        self._targets.waiting.pop(slot, None)
        self._targets.connected.pop(slot, None)

    # -- the transaction --------------------------------------------------------------------

    async def _update(
        self, version: Version, groups: Sequence[Sequence[Named]], *, full: bool, skip_unchanged: bool
    ) -> dict[str, float]:
        updates = await self._targets.connect()
        if not updates:
            raise ServerLost(self._targets.describe_absence())
        is_first = self._committed is None
        if is_first:
            updates = await self._targets.for_each(updates, self._self_test.overwrite)
        async with AsyncExitStack() as pauses:
            if any(update.requires_pause for update in updates):
                await self._pause(pauses, updates)
            begun = updates
            compares = full and skip_unchanged and not any(update.names_versions for update in updates)
            before = self._common_digests(updates) if compares else {}
            try:
                shapes = ShapeManifest({name: tensor for group in groups for name, tensor in group})
                shapes.full = full
                shapes.keeps = bool(before)
                shapes.label = weight_version_label(version)
                updates = await self._targets.for_each(updates, lambda update: update.begin(shapes))
                updates, sent = await self._send(updates, groups, before)
                unsent = {} if full or self._committed is None else self._committed.digests
                updates = await self._verify(updates, DigestManifest({**unsent, **sent.digests}))
            except MilesError as error:
                await self._rollback(begun)
                if isinstance(error, ServerLost | SyncError):
                    raise
                raise _rejection(version, error) from error
            if not self._pool.is_paused:
                await self._pause(pauses, updates)
            await self._commit(updates, version)
            if is_first:
                remaining = self._targets.remaining(updates)
                await self._targets.run_all(remaining, lambda update: self._self_test.check(update, sent.digests))
            metrics = {"publish/bytes": float(sent.bytes)}
            if sent.buckets is not None:
                self._keep(version, sent.buckets, full=full and not before)
                return metrics
        seconds = await self._keep_from_device(version, groups, sent.digests, full=full, overwrite=bool(before))
        return {**metrics, "publish/keep": seconds}

    async def _keep_from_device(
        self,
        version: Version,
        groups: Sequence[Sequence[Named]],
        digests: Mapping[str, int],
        *,
        full: bool,
        overwrite: bool,
    ) -> float:
        """Copy the weights to the host; servers have resumed, but the trainer waits before it changes its weights."""
        started, committed = time.perf_counter(), self._committed
        if full:
            self._committed = None  # its memory is overwritten
        if committed is not None and overwrite:
            self._committed = await asyncio.to_thread(committed.overwrite, version, groups, digests)
        else:
            buffer = self._host_buffer if full else HostWeightBuffer()
            self._keep(version, await asyncio.to_thread(buffer.copy, groups, digests), full=full)
        return time.perf_counter() - started

    # -- in place ---------------------------------------------------------------------------

    async def _in_place_targets(self, tensors: Mapping[str, Tensor]) -> list[UpdateProtocol] | None:
        """The servers, if all can write these tensors in place and can be rolled back; else None."""
        committed, writer, transport = self._committed, self._writer, self._transport
        serving = self._pool.serving()
        if committed is None or self._targets.waiting or writer is None or not isinstance(transport, IpcTransport):
            return None
        connected = self._targets.connected
        updates = [connected[slot] for slot in serving if slot in connected]
        current = all(
            update.client is update.slot.client and update.slot.version == committed.version for update in updates
        )
        if not updates or len(updates) != len(serving) or not current:
            return None
        if not await transport.reaches(updates, [list(tensors.items())[:1]]):
            return None
        return updates if await writer.prepare(updates, tensors, self._targets.for_each) else None

    async def _update_in_place(
        self, version: Version, updates: list[UpdateProtocol], tensors: Mapping[str, Tensor], *, skip_unchanged: bool
    ) -> dict[str, float]:
        """Pause all servers and have them overwrite their weights; if one fails, all are rolled back."""
        writer = self._writer
        begun = updates
        mode = self._pool.mode
        assert writer is not None
        resumed: set[SglangClient] = set()
        async with AsyncExitStack() as pauses:
            writer.start()  # runs while servers pause
            await self._pool.pause(mode, pause_later=[update.client for update in updates])
            pauses.push_async_callback(self._pool.resume, resumed)
            try:
                updates = await writer.write(
                    self._targets.require_remaining(updates),
                    self._targets.for_each,
                    mode=mode,
                    skip_unchanged=skip_unchanged,
                )
            except MilesError as error:
                await self._rollback(begun)
                if isinstance(error, ServerLost | UnchangedWeightMismatch | StaleMapping):
                    raise
                raise _rejection(version, error) from error
            async with self._pool.exclusive_pause() as only_pause:  # then the commit may also resume
                writer.set_resume_on_commit(updates, only_pause)
                await self._commit(updates, version)
                if only_pause:
                    resumed |= {update.client for update in self._targets.remaining(updates)}
        started = time.perf_counter()
        groups = split_into_buckets(iter_hf_named(self._spec, tensors), self._bucket_bytes)
        await self._keep_from_device(version, groups, writer.digests_by_name(), full=True, overwrite=True)
        return {"publish/bytes": float(writer.bytes), "publish/keep": time.perf_counter() - started}

    def _common_digests(self, updates: Sequence[UpdateProtocol]) -> Mapping[str, int]:
        """The digests of the last committed version, if all these servers have it; else none."""
        committed = self._committed
        if committed is None or any(
            update.slot in self._targets.waiting or update.slot.version != committed.version for update in updates
        ):
            return {}
        return committed.digests

    def _keep(self, version: Version, buckets: Sequence[Bucket], *, full: bool) -> None:
        """Servers that join from now on are sent this version."""
        if full or self._committed is None:
            self._committed = CommittedWeights(version=version, buckets=tuple(buckets))
        else:
            self._committed = self._committed.with_changes(version, buckets)

    async def _send(
        self, updates: list[UpdateProtocol], groups: Sequence[Sequence[Named]], before: Mapping[str, int]
    ) -> tuple[list[UpdateProtocol], SentWeights]:
        transport = self._transport
        if isinstance(transport, LoraTransport):
            updates, digests, size = await transport.send(groups, updates, self._targets.for_each, before)
            return updates, SentWeights(digests=digests, buckets=None, bytes=size)
        if isinstance(transport, IpcTransport) and await transport.reaches(updates, groups):
            updates, digests = await send_through_windows(groups, updates, self._targets.for_each, before)
            size = sum(t.nbytes for group in groups for name, t in group if digests[name] != before.get(name))
            return updates, SentWeights(digests=digests, buckets=None, bytes=size)
        if isinstance(transport, DeltaTransport) and self._committed is not None:
            transport.set_base(self._committed.version, self._committed.tensors)
        delta_bytes = transport.sent if isinstance(transport, DeltaTransport) else 0
        updates, buckets, digests = await self._send_buckets(updates, groups, before)
        size = sum(tensor.nbytes for bucket in buckets for tensor in bucket.tensors.values())
        if isinstance(transport, DeltaTransport) and transport.sent > delta_bytes:
            size = transport.sent - delta_bytes
        return updates, SentWeights(digests=digests, buckets=buckets, bytes=size)

    async def _pause(self, pauses: AsyncExitStack, updates: Sequence[UpdateProtocol]) -> None:
        running = [update.client for update in updates if update.names_versions]
        await self._pool.pause(self._pool.mode, keep_running=running)
        pauses.push_async_callback(self._pool.resume)

    async def _send_buckets(
        self, updates: list[UpdateProtocol], groups: Sequence[Sequence[Named]], before: Mapping[str, int]
    ) -> tuple[list[UpdateProtocol], list[Bucket], dict[str, int]]:
        """Send all tensors that differ from ``before``, packing a bucket while the previous one is sent."""
        await self._transport.begin(updates, self._targets.for_each)
        buckets: list[Bucket] = []
        digests: dict[str, int] = {}
        packing = asyncio.create_task(asyncio.to_thread(pack_bucket, groups[0]))
        try:
            for i in range(len(groups)):
                bucket = await packing
                if i + 1 < len(groups):
                    packing = asyncio.create_task(asyncio.to_thread(pack_bucket, groups[i + 1]))
                digests |= bucket.digests
                bucket = select_changed(bucket, before) if before else bucket
                if bucket.tensors:
                    await self._transport.send_bucket(bucket, updates, self._targets.for_each)
                bucket.drop_encodings()
                buckets.append(bucket)
                updates = self._targets.require_remaining(updates)
        finally:
            await asyncio.gather(packing, return_exceptions=True)
        await self._transport.finish(updates, self._targets.for_each)
        return self._targets.require_remaining(updates), buckets, digests

    async def _verify(self, updates: list[UpdateProtocol], digests: DigestManifest) -> list[UpdateProtocol]:
        checksums: list[tuple[UpdateProtocol, str | None]] = []

        async def verify(update: UpdateProtocol) -> None:
            checksums.append((update, await update.verify(digests)))

        updates = await self._targets.for_each(updates, verify)
        check_checksums_agree(checksums)
        for update, checksum in checksums:
            if update.slot.name not in self._described:
                self._described.add(update.slot.name)
                self._log(describe_verification(update, checksum, len(digests)))
        return updates

    async def _commit(self, updates: Sequence[UpdateProtocol], version: Version) -> None:
        """From here on the version is the new one: a server that does not commit it is marked as failed."""

        async def commit(update: UpdateProtocol) -> None:
            try:
                await update.commit(weight_version_label(version))
            except EngineError as error:
                raise ServerLost(f"{update.slot.name} did not commit: {error}") from error

        await self._targets.run_all(updates, commit)
        for update in self._targets.remaining(updates):
            self._targets.waiting.pop(update.slot, None)
            self._pool.mark_serving(update.slot, update.client, version)

    async def _rollback(self, updates: Sequence[UpdateProtocol]) -> None:
        """Servers that stage discard their buckets; overwritten ones are sent the last committed version."""
        committed = self._committed

        async def rollback(update: UpdateProtocol) -> None:
            try:
                await update.rollback()
                if update.overwritten and committed is not None:
                    await self._restore(update, committed)
            except EngineError as error:
                raise ServerLost(f"{update.slot.name} could not be rolled back: {error}") from error

        alive = [update for update in updates if update.slot.state is not SlotState.FAILED]
        await self._targets.run_all(alive, rollback)

    async def _restore(self, update: UpdateProtocol, committed: CommittedWeights) -> None:
        """Send one server the committed version."""
        await update.begin(committed.shapes)
        for bucket in committed.buckets:
            await update.send_bucket(bucket)
            bucket.drop_encodings()
        await update.verify(committed.digests)
        await update.commit(weight_version_label(committed.version))

    async def close(self) -> None:
        """Leave no adapter on servers that go on without this run."""
        await self._transport.close()
        clients = [slot.client for slot in self._pool.serving() if slot.client is not None]
        await asyncio.gather(*(client.adapters.unload_current() for client in clients))


def _rejection(version: Version, error: MilesError) -> SyncError:
    return SyncError(f"{describe_version(version)} was rejected: {error}; every server has the previous version")
