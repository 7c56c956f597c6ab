"""State and counters of one engine behind the router."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from miles.cluster.router.http_client import ConnectionPool
from miles.cluster.router.http_types import Timer


class EngineState(Enum):
    """Only HEALTHY and PROBATION are given requests, PROBATION one at a time."""

    STARTING = "starting"  # no health check has succeeded yet
    HEALTHY = "healthy"
    PROBATION = "probation"  # back from quarantine
    QUARANTINED = "quarantined"  # until a health check after the backoff succeeds
    OUTDATED = "outdated"  # healthy, but with other weights than the rest
    DRAINING = "draining"  # finishes its requests, then leaves


class RoutedEngine:
    """State and counters; only the pool changes the state. ``load`` is the estimated work of its requests."""

    def __init__(self, connections: ConnectionPool, *, ranks: int | None) -> None:
        self.connections = connections
        self.name = connections.address.name
        self.url = connections.address.url
        self.header = (b"x-miles-engine", self.name.encode("latin-1", "replace"))
        self.ranks = ranks
        self.state = EngineState.STARTING
        self.why = "its health has not been checked yet"
        # current requests
        self.outstanding = 0
        self.load = 0
        self.retry_callbacks: set[Callable[[], None]] = set()  # each has an unanswered request retried elsewhere
        self.suspended: set[str] = set()  # paused or asleep on request: slow or unready is no failure then
        # totals
        self.requests = 0
        self.failures = 0
        self.retried = 0
        self.seconds = 0.0
        # health
        self.consecutive_failures = 0
        self.consecutive_successes = 0
        self.quarantine_secs = 0.0
        self.quarantined_until = 0.0
        self.timer: Timer | None = None
        self.probing = False
        # model
        self.weight_version: str | None = None
        self.model_path: str | None = None
        self.missed_update: str | None = None

    @property
    def open(self) -> bool:
        """Whether it may be given a request now."""
        if self.state is EngineState.HEALTHY:
            return True
        return self.state is EngineState.PROBATION and self.outstanding == 0

    def start_request(self, work: int) -> None:
        self.outstanding += 1
        self.load += work
        self.requests += 1

    def finish_request(self, work: int, seconds: float) -> None:
        self.outstanding -= 1
        self.load -= work
        self.seconds += seconds

    def __str__(self) -> str:
        return f"engine {self.name}"

    def describe(self) -> dict[str, Any]:
        """Its entry in ``GET /engines``."""
        return {
            "id": self.name,
            "url": self.url,
            "state": self.state.value,
            "why": self.why,
            "outstanding": self.outstanding,
            "work": self.load,
            "requests": self.requests,
            "failures": self.failures,
            "failures_in_a_row": self.consecutive_failures,
            "retried_elsewhere": self.retried,
            "quarantine_seconds": self.quarantine_secs,
            "suspended": sorted(self.suspended),
            "weight_version": self.weight_version,
            "model_path": self.model_path,
            "ranks": self.ranks,
        }
