"""Routing policies: least load, prefix affinity by consistent hashing, and round robin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from miles.cluster.least_loaded import LeastLoadedIndex
from miles.cluster.router.config import RouterConfig
from miles.cluster.router.consistent_hash import HashRing
from miles.cluster.router.engine_state import RoutedEngine
from miles.cluster.router.routing_key import RoutingKey


class RoutingInfo(Protocol):
    """What policies know of a request; ``key`` and ``rids`` parse its body, so they are called only if needed."""

    @property
    def work(self) -> int: ...
    def key(self) -> RoutingKey: ...
    def rids(self) -> list[str]: ...


class RoutingPolicy(Protocol):
    """Chooses an engine; the index has one at least."""

    def choose(self, engines: LeastLoadedIndex[RoutedEngine], info: RoutingInfo) -> RoutedEngine: ...
    def add_engine(self, name: str) -> None: ...
    def remove_engine(self, name: str) -> None: ...


class RoundRobinPolicy:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, engines: LeastLoadedIndex[RoutedEngine], info: RoutingInfo) -> RoutedEngine:
        self._turn += 1
        return engines.nth(self._turn % len(engines))

    def add_engine(self, name: str) -> None: ...
    def remove_engine(self, name: str) -> None: ...


class LeastLoadPolicy:
    """The engine with the least outstanding work; ties are broken in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, engines: LeastLoadedIndex[RoutedEngine], info: RoutingInfo) -> RoutedEngine:
        self._turn += 1
        engine = engines.least_loaded(self._turn)
        assert engine is not None
        return engine

    def add_engine(self, name: str) -> None: ...
    def remove_engine(self, name: str) -> None: ...


class PrefixPolicy:
    """The engine of a key by consistent hashing with bounded loads: the next engine if that one is overloaded.

    Overloaded is ``floor`` requests or more, and more than ``factor`` times the mean of outstanding requests.
    """

    def __init__(self, *, factor: float, floor: int) -> None:
        self._ring = HashRing()
        self._factor = factor
        self._floor = floor

    def choose(self, engines: LeastLoadedIndex[RoutedEngine], info: RoutingInfo) -> RoutedEngine:
        if len(engines) == 1:
            return engines.nth(0)
        key = info.key()
        limit = max(self._floor, math.ceil(self._factor * (1 + engines.outstanding) / len(engines)))
        for name in self._ring.walk(key.data):
            engine = engines.get(name)
            if engine is not None and (key.pinned or engine.outstanding < limit):
                return engine
        raise AssertionError("some engine is always below the mean")

    def add_engine(self, name: str) -> None:
        self._ring.add(name)

    def remove_engine(self, name: str) -> None:
        self._ring.remove(name)


POLICIES: dict[str, Callable[[RouterConfig], RoutingPolicy]] = {
    "least_load": lambda config: LeastLoadPolicy(),
    "prefix": lambda config: PrefixPolicy(factor=config.spill_factor, floor=config.spill_floor),
    "round_robin": lambda config: RoundRobinPolicy(),
}
