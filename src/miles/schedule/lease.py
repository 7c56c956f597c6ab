"""Who holds the accelerator (see core.protocols.Lease)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from miles.core.protocols import Lease


class Sleeper(Protocol):
    """Anything that can give its device memory back and take it again."""

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class Together:
    """Several that sleep and wake as one."""

    def __init__(self, sleepers: Sequence[Sleeper]) -> None:
        self._sleepers = tuple(sleepers)

    async def sleep(self) -> None:
        for sleeper in self._sleepers:
            await sleeper.sleep()

    async def wake(self) -> None:
        for sleeper in self._sleepers:
            await sleeper.wake()


class Disjoint:
    """Each plane has what it needs for itself: nothing to hand over."""

    async def to_train(self) -> None: ...
    async def to_rollout(self) -> None: ...


class Colocated:
    """One accelerator, one plane awake. The loop asks only when the other plane has nothing in flight."""

    def __init__(self, *, engine: Sleeper, trainer: Sleeper) -> None:
        self._engine = engine
        self._trainer = trainer

    async def to_train(self) -> None:
        await self._engine.sleep()
        await self._trainer.wake()

    async def to_rollout(self) -> None:
        await self._trainer.sleep()
        await self._engine.wake()


class Attended:
    """A lease after whose ``to_rollout`` someone looks in: no batch is being trained on then, and no weights are sent.

    The loop waits for ``look``. What the rollout plane has under way goes on meanwhile.
    """

    def __init__(self, lease: Lease, look: Callable[[], Awaitable[None]]) -> None:
        self._lease, self._look = lease, look

    async def to_train(self) -> None:
        await self._lease.to_train()

    async def to_rollout(self) -> None:
        await self._lease.to_rollout()
        await self._look()
