"""One engine as the router knows it: where it is, how it does, what it has been given."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

from miles.cluster.route.clock import Timer
from miles.cluster.route.outbound import Pool


class State(Enum):
    """Only HEALTHY and PROBATION are given requests, PROBATION one at a time."""

    STARTING = "starting"  # never seen well yet
    HEALTHY = "healthy"
    PROBATION = "probation"  # back from quarantine
    QUARANTINED = "quarantined"  # until a probe after the back-off succeeds
    OUTDATED = "outdated"  # well, but with other weights than the rest
    DRAINING = "draining"  # finishes what it has, then leaves


class Engine:
    """Counters and state; the fleet alone changes the state."""

    def __init__(self, pool: Pool, *, ranks: int | None) -> None:
        self.pool = pool
        self.id = pool.address.name
        self.url = pool.address.url
        self.header = (b"x-miles-engine", self.id.encode("latin-1", "replace"))
        self.ranks = ranks
        self.state = State.STARTING
        self.why = "its health has not been asked yet"
        # what it is doing
        self.outstanding = 0
        self.work = 0
        self.rescues: set[Callable[[], None]] = set()  # call one to have its unanswered request tried elsewhere
        self.quiet: set[str] = set()  # told to pause or to sleep: slow or unready is then no illness
        # what it did
        self.requests = 0
        self.failures = 0
        self.retried = 0
        self.seconds = 0.0
        # how it does
        self.failed_in_a_row = 0
        self.passed_in_a_row = 0
        self.quarantine_secs = 0.0
        self.until = 0.0
        self.timer: Timer | None = None
        self.probing = False
        # what it serves
        self.weight_version: str | None = None
        self.model_path: str | None = None
        self.missed: str | None = None

    @property
    def open(self) -> bool:
        """Whether it may be given a request now."""
        if self.state is State.HEALTHY:
            return True
        return self.state is State.PROBATION and self.outstanding == 0

    def begin(self, work: int) -> None:
        self.outstanding += 1
        self.work += work
        self.requests += 1

    def end(self, work: int, seconds: float) -> None:
        self.outstanding -= 1
        self.work -= work
        self.seconds += seconds

    def __str__(self) -> str:
        return f"engine {self.id}"

    def facts(self) -> dict[str, Any]:
        """What ``GET /engines`` says of it."""
        return {
            "id": self.id,
            "url": self.url,
            "state": self.state.value,
            "why": self.why,
            "outstanding": self.outstanding,
            "work": self.work,
            "requests": self.requests,
            "failures": self.failures,
            "failures_in_a_row": self.failed_in_a_row,
            "retried_elsewhere": self.retried,
            "quarantine_seconds": self.quarantine_secs,
            "told_to": sorted(self.quiet),
            "weight_version": self.weight_version,
            "model_path": self.model_path,
            "ranks": self.ranks,
        }
