"""Which of the open engines a request goes to: three policies, each one function of who is open and the request."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from miles.cluster.route.body import Key
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine
from miles.cluster.route.openings import Openings
from miles.cluster.route.ring import Ring


class Ask(Protocol):
    """What may be asked of a request; ``key`` and ``rids`` read its body, so they are called when they must be."""

    @property
    def work(self) -> int: ...
    def key(self) -> Key: ...
    def rids(self) -> list[str]: ...


class Policy(Protocol):
    """``among`` holds one at least."""

    def choose(self, among: Openings, ask: Ask) -> Engine: ...
    def joined(self, name: str) -> None: ...
    def left(self, name: str) -> None: ...


class RoundRobin:
    """Each engine in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, among: Openings, ask: Ask) -> Engine:
        self._turn += 1
        return among.nth(self._turn % len(among))

    def joined(self, name: str) -> None: ...
    def left(self, name: str) -> None: ...


class LeastLoad:
    """The engine with the least outstanding work; of equals, each in turn."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, among: Openings, ask: Ask) -> Engine:
        self._turn += 1
        return among.least(self._turn)

    def joined(self, name: str) -> None: ...
    def left(self, name: str) -> None: ...


class Prefix:
    """The engine a key belongs to on a ring of hashes, unless it is too loaded: then the next one.

    Too loaded is ``floor`` requests or more, and more than ``factor`` times its share of all that are outstanding.
    """

    def __init__(self, *, factor: float, floor: int) -> None:
        self._ring = Ring()
        self._factor = factor
        self._floor = floor

    def choose(self, among: Openings, ask: Ask) -> Engine:
        if len(among) == 1:
            return among.nth(0)
        key = ask.key()
        limit = max(self._floor, math.ceil(self._factor * (1 + among.outstanding) / len(among)))
        for name in self._ring.walk(key.data):
            engine = among.get(name)
            if engine is not None and (key.firm or engine.outstanding < limit):
                return engine
        raise AssertionError("someone is always below the mean")

    def joined(self, name: str) -> None:
        self._ring.add(name)

    def left(self, name: str) -> None:
        self._ring.remove(name)


POLICIES: dict[str, Callable[[RouteConfig], Policy]] = {
    "least_load": lambda config: LeastLoad(),
    "prefix": lambda config: Prefix(factor=config.spill_factor, floor=config.spill_floor),
    "round_robin": lambda config: RoundRobin(),
}
