"""How many devices each plane should have, from how long each waited for the other. A decision, and nothing else.

The plane that waits has more than it needs, so a device goes to the one that is waited for, when that has lasted for
some versions. How long a version took is remembered of every split that was tried: back to one it goes only where that
was clearly shorter. So in a world that does not change, devices come to rest, at a split where a version takes at most
``1 / (1 - SHARE)`` times as long as at the best.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

SHARE = 0.15
"""The part of a version by which one plane must wait longer than the other; and by which a version must be shorter at
a split that was left, to go back there."""

CHANGE = 0.3
"""By which part the length of a version must differ from what it was at the same split, for the world to be another."""

SETTLING = 1
"""Versions after a start or a move that tell nothing of the split: the planes have yet to fill up, caches are cold."""


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks train, and how many engines sample."""

    ranks: int
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The fewest of each; ``unit`` is how many ranks' devices make an engine's."""

    min_ranks: int = 1
    min_engines: int = 1
    unit: int = 1

    def hold(self, split: Split) -> bool:
        return split.ranks >= self.min_ranks and split.engines >= self.min_engines

    def toward_rollout(self, split: Split, count: int) -> Split:
        """``count`` engines more, or fewer where it is negative."""
        return Split(split.ranks - count * self.unit, split.engines + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Of one version: the seconds it took, those the trainer waited for groups, and the rollout plane for tickets."""

    seconds: float
    trainer_waited: float
    rollout_waited: float

    @property
    def lean(self) -> int:
        """1 where the trainer waits, so that rollout should have more; -1 the other way round; 0 in balance."""
        part = (self.trainer_waited - self.rollout_waited) / self.seconds if self.seconds > 0 else 0.0
        return 1 if part > SHARE else -1 if part < -SHARE else 0


class Balance:
    """Is given a reading a version (``see``) and told what became of its advice (``moved`` or ``failed``)."""

    def __init__(self, split: Split, bounds: Bounds, *, patience: int) -> None:
        assert bounds.hold(split) and patience >= 1
        self.split = split
        self.bounds, self._patience = bounds, patience
        self._recent: deque[Reading] = deque(maxlen=patience)
        self._settling = SETTLING
        self._lengths: dict[Split, float] = {}
        self._impossible: set[Split] = set()

    def see(self, reading: Reading) -> Split | None:
        """The split to go to from here, one device's move away; None to stay."""
        if self._settling:
            self._settling -= 1
            return None
        self._recent.append(reading)
        if len(self._recent) < self._patience:
            return None
        self._remember(median(each.seconds for each in self._recent))
        leans = {each.lean for each in self._recent}
        lean = leans.pop() if len(leans) == 1 else 0
        target = self.bounds.toward_rollout(self.split, lean)
        return target if lean and self._is_better(target) else None

    def moved(self, split: Split) -> None:
        """This is the split now; what was seen before it tells nothing of it."""
        assert self.bounds.hold(split)
        self.split, self._settling = split, SETTLING
        self._recent.clear()

    def failed(self, split: Split) -> None:
        """That split cannot be had: it is not advised again."""
        self._impossible.add(split)
        self._recent.clear()

    def disturbed(self) -> None:
        """Something else happened in between: what was seen so far is not of one kind with what comes."""
        self._settling = SETTLING
        self._recent.clear()

    def _remember(self, length: float) -> None:
        before = self._lengths.get(self.split)
        if before is not None and abs(length - before) <= CHANGE * before:
            return
        if before is not None:  # the world is another, and what was measured of other splits is not of this one
            self._lengths.clear()
        self._lengths[self.split] = length

    def _is_better(self, target: Split) -> bool:
        """May it be? Of a split that was tried it is known."""
        if not self.bounds.hold(target) or target in self._impossible:
            return False
        return target not in self._lengths or self._lengths[target] < (1 - SHARE) * self._lengths[self.split]
