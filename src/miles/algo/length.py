"""What the length of an attempt costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlong:
    """DAPO's soft punishment: free up to ``buffer`` tokens before ``limit``, then linearly down to -``factor`` at it.

    >>> [Overlong(limit=10, buffer=4)(length) for length in (6, 7, 10, 12)]
    [0.0, -0.25, -1.0, -1.0]
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, length: int) -> float:
        """What is added to the reward of an attempt of so many tokens: 0 or less."""
        over = length - (self.limit - self.buffer)
        return -self.factor * min(max(over, 0) / self.buffer, 1.0)
