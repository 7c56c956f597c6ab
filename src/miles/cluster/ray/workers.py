"""Workers of a crew on the nodes of a Ray cluster: an actor there has one worker's process, and passes bytes on.

What answers runs in a process of the actor's, and not in the actor: it may hold its process up, set signals and be
killed, and the actor still hears what is not wanted any more. The process ends with its actor, and that with the run.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from miles.cluster.crew.asked import Lost
from miles.cluster.crew.child import Life
from miles.cluster.crew.near import Near
from miles.cluster.ray.reserve import Reserved, actor_at

# Calls of an actor that may wait at once: all questions it may have, those that are cut, and the wait for its end.
_CALLS = 4096


class _WorkerSeat:
    """Has one worker's process on the node it is on. A word in place of bytes says how that was lost."""

    def __init__(self, life: Life, seconds: float) -> None:
        self._near = Near(life, seconds=seconds)

    async def open(self) -> str:
        """Nothing, or why it cannot be."""
        try:
            await self._near.open()
        except Lost as error:
            return str(error)
        return ""

    async def ask(self, number: int, question: bytes) -> bytes | str:
        try:
            return await self._near.ask(number, question)
        except Lost as error:
            return str(error)

    async def cut(self, number: int) -> None:
        self._near.cut(number)

    async def ended(self) -> str:
        return await self._near.ended()


class Far:
    """Implements ``Home``: worker ``number`` of those that were placed."""

    def __init__(self, life: Life, number: int, reserved: Reserved, *, seconds: float) -> None:
        self.name, self._life, self._number = life.name, life, number
        self._reserved, self._seconds = reserved, seconds
        self._actor: ActorHandle[Any] | None = None

    async def open(self) -> None:
        """Start it where there is room; elsewhere than before when its node is gone."""
        await self.close()
        try:
            spot = await asyncio.to_thread(self._reserved.worker, self._number)
            self._actor = actor_at(spot, "CPU", _WorkerSeat, self._life, self._seconds, threads=_CALLS)
            async with asyncio.timeout(2 * self._seconds):
                why = await self._said("open")
        except (RayError, TimeoutError) as error:
            await self.close()
            raise Lost(f"{self.name} could not be started on the cluster: {_first(error)}") from error
        if why:
            await self.close()
            raise Lost(why)

    async def ask(self, number: int, question: bytes) -> bytes:
        try:
            answer = await self._said("ask", number, question)
        except RayError as error:
            raise Lost(f"{self.name} was lost with its actor: {_first(error)}") from error
        if isinstance(answer, str):
            raise Lost(answer)
        return answer

    def cut(self, number: int) -> None:
        if self._actor is not None:
            self._actor.cut.remote(number)

    async def ended(self) -> str:
        try:
            return await self._said("ended")
        except RayError as error:
            return f"{self.name} was lost with its actor: {_first(error)}"

    async def close(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor)

    async def _said(self, verb: str, *content: Any) -> Any:
        if self._actor is None:
            raise Lost(f"{self.name} has ended")
        return await asyncio.wrap_future(getattr(self._actor, verb).remote(*content).future())


def _first(error: BaseException) -> str:
    """An error in a line: Ray goes on for many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
