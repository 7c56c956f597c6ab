"""Who holds the accelerator (see core.protocols.Lease)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


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
