"""Which arithmetic this process computes in: the fastest of each operation, or one that depends on nothing beside it.

In ``exact`` arithmetic what is computed of a token is a function of the token, its past and the weights: not of the
tokens beside it, of how its past was cut into chunks, or of which plane asks. Both planes of a process use the same.
"""

from __future__ import annotations

import os
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
    if arithmetic == "exact":
        # Read when the library is opened: its products, which gradients are made of, then repeat from run to run.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextmanager
def using(arithmetic: Arithmetic) -> Iterator[None]:
    """``use`` for a while, where nothing else computes meanwhile: tests and measurements."""
    before = _now
    use(arithmetic)
    try:
        yield
    finally:
        use(before)
