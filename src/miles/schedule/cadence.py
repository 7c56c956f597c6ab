"""When something that happens every so often is due."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """Every ``every`` steps (never, if None), and at the ends if asked.

    >>> [step for step in range(7) if Cadence(every=3, at_end=True).due(step, last=5)]
    [3, 5]
    """

    every: int | None
    at_start: bool = False
    at_end: bool = False

    def due(self, step: int, *, last: int) -> bool:
        """Is it due after ``step`` steps of a run that ends after ``last``?"""
        if step == 0:
            return self.at_start
        if step == last:
            return self.at_end or (self.every is not None and step % self.every == 0)
        return self.every is not None and step % self.every == 0


NEVER = Cadence(every=None)
AT_END = Cadence(every=None, at_end=True)
