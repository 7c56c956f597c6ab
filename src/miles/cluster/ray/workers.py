"""Ray workers: an actor on a node of the cluster has one worker's process, and forwards bytes.

The handler runs in a process of the actor's and not in the actor: it may block, set signal handlers and be killed,
while the actor still receives cancellations. The process ends with its actor, and that with the run.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from miles.cluster.ray.placement_group import ClusterReservation, create_actor, first_error_line
from miles.cluster.workers.local import LocalWorker
from miles.cluster.workers.pool import WorkerLost
from miles.cluster.workers.process import WorkerSpec

# Concurrent calls of an actor: all its requests, cancellations, and the wait for its end.
_MAX_CALLS = 4096


class _WorkerActor:
    """Has one worker's process on the actor's node. A string instead of bytes is why the worker was lost."""

    def __init__(self, spec: WorkerSpec, seconds: float) -> None:
        self._worker = LocalWorker(spec, seconds=seconds)

    async def open(self) -> str:
        """Empty, or why it cannot be started."""
        try:
            await self._worker.open()
        except WorkerLost as error:
            return str(error)
        return ""

    async def call(self, number: int, request: bytes) -> bytes | str:
        try:
            return await self._worker.call(number, request)
        except WorkerLost as error:
            return str(error)

    async def cancel(self, number: int) -> None:
        self._worker.cancel(number)

    async def wait_ended(self) -> str:
        return await self._worker.wait_ended()


class RayWorker:
    """Implements ``WorkerHost``: worker ``number`` of those that were placed."""

    def __init__(self, spec: WorkerSpec, number: int, reservation: ClusterReservation, *, seconds: float) -> None:
        self.name = spec.name
        self._spec = spec
        self._number = number
        self._reservation = reservation
        self._seconds = seconds
        self._actor: ActorHandle[Any] | None = None

    async def open(self) -> None:
        """Start it on its node, or on another one if its node is lost."""
        await self.close()
        try:
            bundles = await asyncio.to_thread(self._reservation.worker_bundles, self._number)
            self._actor = create_actor(bundles, "CPU", _WorkerActor, self._spec, self._seconds, threads=_MAX_CALLS)
            async with asyncio.timeout(2 * self._seconds):
                reason = await self._call_actor("open")
        except (RayError, TimeoutError) as error:
            await self.close()
            raise WorkerLost(f"{self.name} could not be started on the cluster: {first_error_line(error)}") from error
        if reason:
            await self.close()
            raise WorkerLost(reason)

    async def call(self, number: int, request: bytes) -> bytes:
        try:
            response = await self._call_actor("call", number, request)
        except RayError as error:
            raise WorkerLost(f"{self.name} was lost with its actor: {first_error_line(error)}") from error
        if isinstance(response, str):
            raise WorkerLost(response)
        return response

    def cancel(self, number: int) -> None:
        if self._actor is not None:
            self._actor.cancel.remote(number)

    async def wait_ended(self) -> str:
        try:
            return await self._call_actor("wait_ended")
        except RayError as error:
            return f"{self.name} was lost with its actor: {first_error_line(error)}"

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)

    async def _call_actor(self, method: str, *args: Any) -> Any:
        if self._actor is None:
            raise WorkerLost(f"{self.name} has ended")
        return await asyncio.wrap_future(getattr(self._actor, method).remote(*args).future())
