"""How long prompts wait for one another.

A step that reads prompts is not recorded, and launching it may take the host several times as long as a recorded one
takes the device. Where many run and requests come and go all the time nearly every step would be such a one. So prompts
wait for a few recorded steps, and are then read several at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from miles.backends.native.sequence import Sequence

# With fewer rows hardly another prompt would come meanwhile, and the one that waits is much of what could be done.
FEW = 32


class Patience:
    """At most ``most`` steps are waited for (0: none ever), and none beside fewer than ``few`` who run."""

    def __init__(self, most: int, few: int = FEW) -> None:
        self._most, self._few, self._waited = most, few, 0

    def over(self, coming: Items[Sequence], running: int, room: int, *, recorded: bool) -> bool:
        """Whether those for whom there are seats come in now, beside so many who run.

        ``room`` is the prompt tokens of a step; ``recorded`` says whether the step is one if nobody comes in.
        """
        some = recorded and self._few <= running and len(coming) < running
        waits = some and self._waited < self._most and 2 * sum(len(one.tokens) for one in coming) < room
        self._waited = self._waited + 1 if waits and coming else 0
        return not waits
