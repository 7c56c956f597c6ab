"""Elastic device balancing: how many devices each plane should have, from how long each waited for the other.

The plane that waits has more devices than it needs, so a device moves to the other one after some versions. The time
per version of every split tried is remembered: a split is revisited only if it was clearly faster. So under a constant
load the split converges, to one where a version takes at most ``1 / (1 - MIN_GAIN)`` times as long as at the best.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

MIN_GAIN = 0.15
"""Fraction of a version's time by which one plane must wait longer than the other to move a device, and by which a
version must be faster at a previous split to return to it."""

LOAD_CHANGE = 0.3
"""Relative change of the time per version at the same split above which the load counts as changed."""

WARMUP_VERSIONS = 1
"""Versions ignored after a start or a move, while the pipeline fills and caches are cold."""


@dataclass(frozen=True, slots=True)
class DeviceSplit:
    """Number of training ranks and of engines."""

    ranks: int
    engines: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticBounds:
    """Minimum of each; ``unit`` is how many ranks' devices an engine needs."""

    min_ranks: int = 1
    min_engines: int = 1
    unit: int = 1

    def allow(self, split: DeviceSplit) -> bool:
        return split.ranks >= self.min_ranks and split.engines >= self.min_engines

    def toward_rollout(self, split: DeviceSplit, count: int) -> DeviceSplit:
        """Return the split with ``count`` more engines (fewer if negative)."""
        return DeviceSplit(split.ranks - count * self.unit, split.engines + count)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one version: in total, the trainer's wait for groups, and the rollout plane's wait for admission."""

    seconds: float
    trainer_waited: float
    rollout_waited: float

    @property
    def direction(self) -> int:
        """1 if the trainer waits, so rollout should get more devices; -1 the other way round; 0 if balanced."""
        part = (self.trainer_waited - self.rollout_waited) / self.seconds if self.seconds > 0 else 0.0
        return 1 if part > MIN_GAIN else -1 if part < -MIN_GAIN else 0


class ElasticBalancer:
    """Gets the times of each version (``observe``) and the outcome of its advice (``on_moved`` or ``on_failed``)."""

    def __init__(self, split: DeviceSplit, bounds: ElasticBounds, *, window: int) -> None:
        assert bounds.allow(split) and window >= 1
        self.split = split
        self.bounds = bounds
        self._window = window
        self._recent: deque[StepTimes] = deque(maxlen=window)
        self._warmup_left = WARMUP_VERSIONS
        self._seconds_by_split: dict[DeviceSplit, float] = {}
        self._failed_splits: set[DeviceSplit] = set()

    def observe(self, times: StepTimes) -> DeviceSplit | None:
        """Return the split to move to, one device away; None to stay."""
        if self._warmup_left:
            self._warmup_left -= 1
            return None
        self._recent.append(times)
        if len(self._recent) < self._window:
            return None
        self._record(median(each.seconds for each in self._recent))
        directions = {each.direction for each in self._recent}
        direction = directions.pop() if len(directions) == 1 else 0
        target = self.bounds.toward_rollout(self.split, direction)
        return target if direction and self._may_be_better(target) else None

    def on_moved(self, split: DeviceSplit) -> None:
        """Record the new split and forget earlier observations."""
        assert self.bounds.allow(split)
        self.split = split
        self._warmup_left = WARMUP_VERSIONS
        self._recent.clear()

    def on_failed(self, split: DeviceSplit) -> None:
        """Record that a split is impossible; it is not advised again."""
        self._failed_splits.add(split)
        self._recent.clear()

    def reset(self) -> None:
        """Forget recent observations after an external change."""
        self._warmup_left = WARMUP_VERSIONS
        self._recent.clear()

    def _record(self, seconds: float) -> None:
        before = self._seconds_by_split.get(self.split)
        if before is not None and abs(seconds - before) <= LOAD_CHANGE * before:
            return
        if before is not None:  # the load changed, so measurements of other splits are outdated
            self._seconds_by_split.clear()
        self._seconds_by_split[self.split] = seconds

    def _may_be_better(self, target: DeviceSplit) -> bool:
        if not self.bounds.allow(target) or target in self._failed_splits:
            return False
        return (
            target not in self._seconds_by_split
            or self._seconds_by_split[target] < (1 - MIN_GAIN) * self._seconds_by_split[self.split]
        )
