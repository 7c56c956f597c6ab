"""Garbage-collector tuning: none during imports; freeze what is loaded, and collect young objects less often.

A full collection walks over all objects, also those of modules, models and compiled code; it takes a tenth of a second,
in which a GPU may wait. A trajectory in flight is some dozens of objects that refer to each other; most others are
freed by reference counting.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY_TRAJECTORIES = 128
"""Trajectories in flight from which young objects are collected less often."""
_THRESHOLD = (20_000, 20, 20)


@contextmanager
def pause_gc() -> Iterator[None]:
    """Collect nothing: imports make hundreds of thousands of objects that stay, and would be walked over many times."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def reduce_gc(inflight: int = 0) -> Iterator[None]:
    """Exclude existing objects from collection, and collect less often with many trajectories in flight."""
    default = gc.get_threshold()
    gc.collect(1)  # older garbage is collected afterwards
    gc.freeze()
    if inflight >= MANY_TRAJECTORIES:
        gc.set_threshold(*_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*default)
        gc.unfreeze()
