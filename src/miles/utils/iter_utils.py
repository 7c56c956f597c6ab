"""Upstream's grouping of iterables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K")


def group_by(iterable: Iterable[T], key: Callable[[T], K] | None = None) -> dict[K, list[T]]:
    """Items by key, in the order in which keys first occur."""
    groups: dict[K, list[T]] = {}
    for item in iterable:
        groups.setdefault(item if key is None else key(item), []).append(item)  # pyright: ignore
    return groups
