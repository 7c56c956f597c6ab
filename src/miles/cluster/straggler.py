"""Straggler detection: which rank or engine takes a multiple of the median of the others, check after check."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median

CONSECUTIVE_CHECKS = 5
"""How many checks in a row one must be slow to be reported, and not slow to be forgotten."""

# Responses of each engine that one check takes together: a single one may have had a long prompt.
_RESPONSES_PER_CHECK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """``name`` takes ``ratio`` times the median of the others, and has been too slow since check ``since``."""

    name: str
    ratio: float
    since: int

    def describe(self, unit: str) -> str:
        """A sentence for the log; ``unit`` is what checks are numbered by, such as step."""
        return f"{self.name} takes {self.ratio:.1f} times the median of the others since {unit} {self.since}."


class StragglerDetector:
    """Reports each name once that takes ``factor`` times the median of the others in several checks in a row.

    A ``factor`` of 0 reports nobody. A name that is slow in a check or two only, or has no measurement, is not
    reported.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._slow: dict[str, tuple[int, int]] = {}
        self._reported: dict[str, int] = {}
        self.max_ratio = 1.0
        """The largest ratio to the median of the others in the last check."""

    def update(self, check: int, seconds: Mapping[str, float]) -> list[Straggler]:
        """Take the time each name took for the same work; returns the stragglers to report now."""
        stragglers: list[Straggler] = []
        self.max_ratio = 1.0
        for name in [*self._slow, *self._reported]:
            if name not in seconds:  # it is gone, and what takes its name next is another
                self._slow.pop(name, None)
                self._reported.pop(name, None)
        for name, taken in seconds.items():
            others = [each for other, each in seconds.items() if other != name]
            typical = median(others) if others else 0.0
            ratio = taken / typical if typical > 0.0 else 1.0
            self.max_ratio = max(self.max_ratio, ratio)
            if (straggler := self._check(check, name, ratio)) is not None:
                stragglers.append(straggler)
        return stragglers

    def _check(self, check: int, name: str, ratio: float) -> Straggler | None:
        if not self._factor or ratio < self._factor:
            self._slow.pop(name, None)
            if name in self._reported:
                self._reported[name] += 1
                if self._reported[name] >= CONSECUTIVE_CHECKS:
                    del self._reported[name]
            return None
        first, count = self._slow.get(name, (check, 0))
        self._slow[name] = first, count + 1
        if name in self._reported:
            self._reported[name] = 0
        elif count + 1 >= CONSECUTIVE_CHECKS:
            self._reported[name] = 0
            return Straggler(name=name, ratio=ratio, since=first)
        return None


class EngineThroughput:
    """Seconds per token of each engine's whole responses; reports engines that stay behind the others.

    A slow engine is given fewer requests, so each is compared by the requests it had. Every function of ``log`` is
    called with a sentence about an engine that takes ``factor`` times the median of the others; 0 reports nobody.
    """

    def __init__(self, factor: float = 0.0, log: tuple[Callable[[str], None], ...] = ()) -> None:
        self._detector = StragglerDetector(factor)
        self.log = log
        self._totals: dict[str, tuple[int, int, float]] = {}

    def record(self, name: str, tokens: int, seconds: float, *, serving: Collection[str], version: int) -> None:
        """An engine of those ``serving`` has returned a response under ``version``."""
        if not tokens:
            return
        responses, total_tokens, total_seconds = self._totals.get(name, (0, 0, 0.0))
        self._totals[name] = responses + 1, total_tokens + tokens, total_seconds + seconds
        if len(serving) < 2 or any(self._totals.get(each, (0, 0, 0.0))[0] < _RESPONSES_PER_CHECK for each in serving):
            return
        per_token = {each: self._totals[each][2] / self._totals[each][1] for each in serving}
        self._totals = {}
        for straggler in self._detector.update(version, per_token):
            for log in self.log:
                log(straggler.describe("version"))
