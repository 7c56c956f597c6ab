"""Who of several that do the same work is slower than the others, again and again, and since when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

LOOKS = 5
"""How often in a row someone must be slow to be named, and must not be to be forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """``who`` takes ``times`` the median of the others, and has been at least as slow as asked for since ``since``."""

    who: str
    times: float
    since: int

    def said(self, since: str) -> str:
        return f"{self.who} takes {self.times:.1f} times the median of the others since {since} {self.since}."


class Slowness:
    """Told what each takes, look after look; says once of each that takes ``factor`` times the median of the others.

    A ``factor`` of 0 names nobody. Whoever is slow for a look or two, or of whom nothing is known, is not named.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._since: dict[str, tuple[int, int]] = {}
        self._named: dict[str, int] = {}
        self.most = 1.0
        """The slowest of the last look, in times of the median of the others."""

    def look(self, number: int, taken: Mapping[str, float]) -> list[Slow]:
        """``taken``: for the same work, by name. Those who are to be named now."""
        found: list[Slow] = []
        self.most = 1.0
        for who in [*self._since, *self._named]:
            if who not in taken:  # it is gone, and whoever takes its name is another
                self._since.pop(who, None)
                self._named.pop(who, None)
        for who, own in taken.items():
            others = [seconds for name, seconds in taken.items() if name != who]
            middle = median(others) if others else 0.0
            times = own / middle if middle > 0.0 else 1.0
            self.most = max(self.most, times)
            if (slow := self._judged(number, who, times)) is not None:
                found.append(slow)
        return found

    def _judged(self, number: int, who: str, times: float) -> Slow | None:
        if not self._factor or times < self._factor:
            self._since.pop(who, None)
            if who in self._named:
                self._named[who] += 1
                if self._named[who] >= LOOKS:
                    del self._named[who]
            return None
        first, looks = self._since.get(who, (number, 0))
        self._since[who] = first, looks + 1
        if who in self._named:
            self._named[who] = 0
        elif looks + 1 >= LOOKS:
            self._named[who] = 0
            return Slow(who=who, times=times, since=first)
        return None
