"""Context ranks that split sequences of any length in recurrent layers, where they would exchange short ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from miles.cluster import parallel_dims


@contextmanager
def splitting_all(active: bool = True) -> Iterator[None]:
    """In this process, until it is left."""
    usual = parallel_dims.MIN_SCANNED_CHUNK, parallel_dims.MAX_SCAN_IMBALANCE
    if active:
        parallel_dims.MIN_SCANNED_CHUNK, parallel_dims.MAX_SCAN_IMBALANCE = 0, 0.0
    try:
        yield
    finally:
        parallel_dims.MIN_SCANNED_CHUNK, parallel_dims.MAX_SCAN_IMBALANCE = usual
