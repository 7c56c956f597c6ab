"""CPU time of a routing decision in ``miles route`` by number of engines: the router's index against a linear scan.

    python -m benchmarks.bench_routing [--engines 64 256 1024] [--requests 5000]

Both get the same requests at the same loads, alternating, in one process; times are CPU time of a decision with its
bookkeeping (pick and release). The linear scans are also the reference in the router's tests.
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

from miles.cluster.router.config import RouterConfig
from miles.cluster.router.consistent_hash import HashRing
from miles.cluster.router.engine_pool import RouterEnginePool
from miles.cluster.router.engine_state import EngineState, RoutedEngine
from miles.cluster.router.http_types import LoopClock
from miles.cluster.router.policy import RoutingInfo
from miles.cluster.router.routing_key import RoutingKey

ROUNDS = 5
Policy = Literal["round_robin", "least_load", "prefix"]
POLICIES: tuple[Policy, ...] = ("round_robin", "least_load", "prefix")
Scan = Callable[[Sequence[RoutedEngine], RoutingInfo], RoutedEngine]


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request by its key and its work alone."""

    name: bytes = b""
    work: int = 1
    pinned: bool = False

    def key(self) -> RoutingKey:
        return RoutingKey(self.name, self.pinned)

    def rids(self) -> list[str]:
        return []


# -- looking at every engine -----------------------------------------------------------------------


def scan_round_robin() -> Scan:
    turn = 0

    def choose(engines: Sequence[RoutedEngine], ask: RoutingInfo) -> RoutedEngine:
        nonlocal turn
        turn += 1
        return engines[turn % len(engines)]

    return choose


def scan_least_load() -> Scan:
    turn = 0

    def choose(engines: Sequence[RoutedEngine], ask: RoutingInfo) -> RoutedEngine:
        nonlocal turn
        least = min(engine.load for engine in engines)
        equals = [engine for engine in engines if engine.load == least]
        turn += 1
        return equals[turn % len(equals)]

    return choose


def scan_prefix(ring: HashRing, *, factor: float, floor: int) -> Scan:
    def choose(engines: Sequence[RoutedEngine], ask: RoutingInfo) -> RoutedEngine:
        if len(engines) == 1:
            return engines[0]
        key = ask.key()
        by_name = {engine.name: engine for engine in engines}
        total = 1 + sum(engine.outstanding for engine in engines)
        limit = max(floor, math.ceil(factor * total / len(engines)))
        for name in ring.walk(key.data):
            engine = by_name.get(name)
            if engine is not None and (key.pinned or engine.outstanding < limit):
                return engine
        raise AssertionError("someone is always below the mean")

    return choose


def scan_candidates(pool: RouterEnginePool, avoid: frozenset[str]) -> list[RoutedEngine]:
    """Who may be chosen, found by looking at each."""
    engines = [engine for engine in pool.engines.values() if engine.open]
    return [engine for engine in engines if engine.name not in avoid] or engines


# -- the measurement -------------------------------------------------------------------------------


def build_pool(count: int, policy: Policy) -> RouterEnginePool:
    """So many engines, all well."""
    config = RouterConfig(policy=policy, max_concurrent_requests=1 << 30)
    pool = RouterEnginePool(config, LoopClock(asyncio.new_event_loop()), lambda sentence: None)
    for i in range(count):
        pool.admit(pool.add(f"http://10.{i >> 16}.{i >> 8 & 255}.{i & 255}:30000"))
    assert all(engine.state is EngineState.HEALTHY for engine in pool.engines.values())
    return pool


def measure_pick(pool: RouterEnginePool, wishes: Sequence[RoutingRequest], choose: Scan | None) -> float:
    """Seconds of CPU a choice takes, with about eight requests at each engine; by a scan, or as the fleet does."""
    under_way: deque[tuple[RoutedEngine, RoutingRequest]] = deque()
    if choose is None:  # a ring of hashes is put in order when it is first walked
        first = pool.pick(wishes[0])
        assert first is not None
        pool.release(first, wishes[0], 0.0)
    else:
        choose(scan_candidates(pool, frozenset()), wishes[0])
    began = time.process_time()
    for wish in wishes:
        if choose is None:
            engine = pool.pick(wish)
            assert engine is not None
        else:
            engine = choose(scan_candidates(pool, frozenset()), wish)
            engine.start_request(wish.work)
            pool.outstanding += 1
        under_way.append((engine, wish))
        if len(under_way) > 8 * len(pool.engines):
            _end(pool, *under_way.popleft(), scan=choose is not None)
    taken = time.process_time() - began
    while under_way:
        _end(pool, *under_way.popleft(), scan=choose is not None)
    return taken / len(wishes)


def _end(pool: RouterEnginePool, engine: RoutedEngine, wish: RoutingRequest, *, scan: bool) -> None:
    if scan:
        engine.finish_request(wish.work, 0.0)
        pool.outstanding -= 1
    else:
        pool.release(engine, wish, 0.0)


def build_scan(policy: Policy, pool: RouterEnginePool) -> Scan:
    """The policy of this name, looking at every engine."""
    if policy != "prefix":
        return {"round_robin": scan_round_robin, "least_load": scan_least_load}[policy]()
    ring = HashRing()
    for name in pool.engines:
        ring.add(name)
    return scan_prefix(ring, factor=RouterConfig().spill_factor, floor=RouterConfig().spill_floor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--requests", type=int, default=5000)
    asked = parser.parse_args()
    drawn = random.Random(0)
    wishes = [
        RoutingRequest(b"%d" % drawn.randrange(512), drawn.choice((64, 128, 1024, 4096))) for _ in range(asked.requests)
    ]
    print("| policy | engines | every one looked at | kept in order | times as fast |\n|---|--:|--:|--:|--:|")
    for policy in POLICIES:
        for count in asked.engines:
            both: tuple[list[float], list[float]] = ([], [])
            for _ in range(ROUNDS):
                pool = build_pool(count, policy)
                for times, choose in zip(both, (build_scan(policy, pool), None), strict=True):
                    times.append(measure_pick(pool, wishes, choose))
            scan, kept = (statistics.median(times) * 1e6 for times in both)
            print(f"| `{policy}` | {count:,} | {scan:.1f} µs | {kept:.1f} µs | {scan / kept:.1f} |", flush=True)


if __name__ == "__main__":
    main()
