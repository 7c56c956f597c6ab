"""Groups beyond those a step needs: cut when it has enough, then dropped or taken up in the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from miles.core.protocols import Cuttable
from miles.core.types import Group, Status

BEGUN, CUT, SPARE, LEFT_OVER = "begun", "cut", "spare", "left over"


class Spares:
    """Watches the groups under way; without a ``cuttable`` plane nothing is ever cut."""

    def __init__(self, cuttable: Cuttable | None, *, partial: bool) -> None:
        self._cuttable, self._partial = cuttable, partial
        self._cutting = False
        self._count = 0
        self._begun: dict[int, Group] = {}
        self._under_way: set[asyncio.Task[None]] = set()

    def watch(self, task: asyncio.Task[None]) -> None:
        """One more group is under way."""
        if self._cuttable is not None:
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def cut(self) -> int:
        """End all that is under way; how many groups that has cost the step."""
        assert self._cuttable is not None
        self._cutting, self._count = True, 0
        if self._under_way:
            await self._cuttable.cut()
        if self._under_way:  # some may have ended meanwhile, perhaps all
            await asyncio.wait(self._under_way)
        self._cutting = False
        return self._count

    def fate(self, ticket: int, group: Group) -> str | None:
        """What becomes of a group that came back while others were cut; None when it is one like any."""
        if not self._cutting:
            return None
        whole = all(trajectory.status is not Status.ABORTED for trajectory in group.trajectories)
        if whole and self._partial:
            return None
        self._count += 1
        if self._partial:
            self._begun[ticket] = group
            return BEGUN
        return SPARE if whole else CUT

    def take_up(self) -> Sequence[tuple[int, Group]]:
        """Groups that were begun, the oldest first; they are no longer kept here."""
        begun = sorted(self._begun.items())
        self._begun.clear()
        return begun
