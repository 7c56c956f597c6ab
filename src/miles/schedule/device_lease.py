"""Device leases: which plane holds the accelerator (see core.protocols.Lease)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from miles.core.protocols import Lease


class Sleepable(Protocol):
    """Anything that can release its device memory and take it again."""

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class SleepGroup:
    """Several objects that sleep and wake together."""

    def __init__(self, members: Sequence[Sleepable]) -> None:
        self._members = tuple(members)

    async def sleep(self) -> None:
        for member in self._members:
            await member.sleep()

    async def wake(self) -> None:
        for member in self._members:
            await member.wake()


class DisjointLease:
    """Each plane has its own devices: nothing to hand over."""

    async def to_train(self) -> None: ...
    async def to_rollout(self) -> None: ...


class ColocatedLease:
    """Both planes share one accelerator, and one is awake. The loop switches when the other has nothing in flight."""

    def __init__(self, *, engine: Sleepable, trainer: Sleepable) -> None:
        self._engine = engine
        self._trainer = trainer

    async def to_train(self) -> None:
        await self._engine.sleep()
        await self._trainer.wake()

    async def to_rollout(self) -> None:
        await self._trainer.sleep()
        await self._engine.wake()


class LeaseWithCallback:
    """Calls ``callback`` after each ``to_rollout``, when no batch is being trained and no weights are being sent.

    The loop waits for the callback; in-flight rollouts continue meanwhile.
    """

    def __init__(self, lease: Lease, callback: Callable[[], Awaitable[None]]) -> None:
        self._lease = lease
        self._callback = callback

    async def to_train(self) -> None:
        await self._lease.to_train()

    async def to_rollout(self) -> None:
        await self._lease.to_rollout()
        await self._callback()
