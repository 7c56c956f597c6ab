"""Which arithmetic this process computes in: the fastest of each operation, or one whose results depend on nothing else.

In ``exact`` arithmetic what is computed of a token is a function of the token, its past and the weights: not of the
tokens beside it, of how its past was cut into chunks, or of which plane asks. Both planes of a process use the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Arithmetic = Literal["fast", "exact"]

_now: Arithmetic = "fast"


def exact() -> bool:
    """Whether results must not depend on the shape of the work."""
    return _now == "exact"


def use(arithmetic: Arithmetic) -> None:
    """Compute so from now on, on every thread; chosen once, before the first model is opened."""
    global _now
    _now = arithmetic


@contextmanager
def using(arithmetic: Arithmetic) -> Iterator[None]:
    """``use`` for a while, where nothing else computes meanwhile: tests and measurements."""
    before = _now
    use(arithmetic)
    try:
        yield
    finally:
        use(before)
