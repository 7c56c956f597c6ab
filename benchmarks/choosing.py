"""What it costs ``miles route`` to choose an engine, by their number: the router's own way, and looking at every one.

    python -m benchmarks.choosing [--engines 64 256 1024] [--requests 5000]

Both ways are given the same requests at the same loads, in turns, in one process; times are CPU time of a choice with
its bookkeeping (pick and release). The ways to look at every engine are also what the tests hold the router to.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from miles.cluster.route.body import Key
from miles.cluster.route.clock import LoopClock
from miles.cluster.route.config import RouteConfig
from miles.cluster.route.engine import Engine, State
from miles.cluster.route.fleet import Fleet
from miles.cluster.route.policy import Ask
from miles.cluster.route.ring import Ring

ROUNDS = 5
Policy = Literal["round_robin", "least_load", "prefix"]
POLICIES: tuple[Policy, ...] = ("round_robin", "least_load", "prefix")
Scan = Callable[[Sequence[Engine], Ask], Engine]


@dataclass(frozen=True, slots=True)
class Wish:
    """A request by its key and its work alone."""

    name: bytes = b""
    work: int = 1
    firm: bool = False

    def key(self) -> Key:
        return Key(self.name, self.firm)

    def rids(self) -> list[str]:
        return []


# -- looking at every engine -----------------------------------------------------------------------


def scan_round_robin() -> Scan:
    turn = 0

    def choose(engines: Sequence[Engine], ask: Ask) -> Engine:
        nonlocal turn
        turn += 1
        return engines[turn % len(engines)]

    return choose


def scan_least_load() -> Scan:
    turn = 0

    def choose(engines: Sequence[Engine], ask: Ask) -> Engine:
        nonlocal turn
        least = min(engine.work for engine in engines)
        equals = [engine for engine in engines if engine.work == least]
        turn += 1
        return equals[turn % len(equals)]

    return choose


def scan_prefix(ring: Ring, *, factor: float, floor: int) -> Scan:
    def choose(engines: Sequence[Engine], ask: Ask) -> Engine:
        if len(engines) == 1:
            return engines[0]
        key = ask.key()
        by_name = {engine.id: engine for engine in engines}
        total = 1 + sum(engine.outstanding for engine in engines)
        limit = max(floor, math.ceil(factor * total / len(engines)))
        for name in ring.walk(key.data):
            engine = by_name.get(name)
            if engine is not None and (key.firm or engine.outstanding < limit):
                return engine
        raise AssertionError("someone is always below the mean")

    return choose


def scanned(fleet: Fleet, avoid: frozenset[str]) -> list[Engine]:
    """Who may be chosen, found by looking at each."""
    engines = [engine for engine in fleet.engines.values() if engine.open]
    return [engine for engine in engines if engine.id not in avoid] or engines


# -- the measurement -------------------------------------------------------------------------------


def fleet_of(count: int, policy: Policy) -> Fleet:
    """So many engines, all well."""
    config = RouteConfig(policy=policy, max_concurrent_requests=1 << 30)
    fleet = Fleet(config, LoopClock(asyncio.new_event_loop()), lambda sentence: None)
    for i in range(count):
        fleet.admit(fleet.add(f"http://10.{i >> 16}.{i >> 8 & 255}.{i & 255}:30000"))
    assert all(engine.state is State.HEALTHY for engine in fleet.engines.values())
    return fleet


def measured(fleet: Fleet, wishes: Sequence[Wish], choose: Scan | None) -> float:
    """Seconds of CPU a choice takes, with about eight requests at each engine; by a scan, or as the fleet does."""
    under_way: deque[tuple[Engine, Wish]] = deque()
    if choose is None:  # a ring of hashes is put in order when it is first walked
        first = fleet.pick(wishes[0])
        assert first is not None
        fleet.release(first, wishes[0], 0.0)
    else:
        choose(scanned(fleet, frozenset()), wishes[0])
    began = time.process_time()
    for wish in wishes:
        if choose is None:
            engine = fleet.pick(wish)
            assert engine is not None
        else:
            engine = choose(scanned(fleet, frozenset()), wish)
            engine.begin(wish.work)
            fleet.outstanding += 1
        under_way.append((engine, wish))
        if len(under_way) > 8 * len(fleet.engines):
            _end(fleet, *under_way.popleft(), scan=choose is not None)
    taken = time.process_time() - began
    while under_way:
        _end(fleet, *under_way.popleft(), scan=choose is not None)
    return taken / len(wishes)


def _end(fleet: Fleet, engine: Engine, wish: Wish, *, scan: bool) -> None:
    if scan:
        engine.end(wish.work, 0.0)
        fleet.outstanding -= 1
    else:
        fleet.release(engine, wish, 0.0)


def scan_of(policy: Policy, fleet: Fleet) -> Scan:
    """The policy of this name, looking at every engine."""
    if policy != "prefix":
        return {"round_robin": scan_round_robin, "least_load": scan_least_load}[policy]()
    ring = Ring()
    for name in fleet.engines:
        ring.add(name)
    return scan_prefix(ring, factor=RouteConfig().spill_factor, floor=RouteConfig().spill_floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--requests", type=int, default=5000)
    asked = parser.parse_args()
    drawn = random.Random(0)
    wishes = [Wish(b"%d" % drawn.randrange(512), drawn.choice((64, 128, 1024, 4096))) for _ in range(asked.requests)]
    print("| policy | engines | every one looked at | kept in order | times as fast |\n|---|--:|--:|--:|--:|")
    for policy in POLICIES:
        for count in asked.engines:
            both: tuple[list[float], list[float]] = ([], [])
            for _ in range(ROUNDS):
                fleet = fleet_of(count, policy)
                for times, choose in zip(both, (scan_of(policy, fleet), None), strict=True):
                    times.append(measured(fleet, wishes, choose))
            scan, kept = (statistics.median(times) * 1e6 for times in both)
            print(f"| `{policy}` | {count:,} | {scan:.1f} µs | {kept:.1f} µs | {scan / kept:.1f} |", flush=True)


if __name__ == "__main__":
    main()
