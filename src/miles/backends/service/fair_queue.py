"""Fair queue: deficit round robin over tenants, by tokens, so that no tenant waits for another beyond its share.

Each tenant with work has a turn in a ring. A turn adds a quantum to the tenant's credit, and takes work while the
credit pays for it; a tenant without work keeps no credit. Between two turns of a tenant every other tenant has one
turn, so with n tenants, quantum q and works of at most m tokens:

- of any two tenants with work throughout, neither gets more than q + 2 m tokens ahead of the other;
- a tenant's first work is taken after at most ceil(m / q) turns of everybody.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["FairQueue"]

W = TypeVar("W")


@dataclass(slots=True)
class _Turns(Generic[W]):
    work: deque[tuple[W, int]] = field(default_factory=deque)
    credit: int = 0


class FairQueue(Generic[W]):
    """Work of several tenants; ``take`` returns whose is next. ``quantum`` is the tokens of a turn."""

    def __init__(self, quantum: int) -> None:
        assert quantum > 0
        self._quantum = quantum
        self._ring: OrderedDict[str, _Turns[W]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(turns.work) for turns in self._ring.values())

    def count(self, tenant: str) -> int:
        """Return how much work of a tenant waits."""
        return len(self._ring[tenant].work) if tenant in self._ring else 0

    def put(self, tenant: str, work: W, cost: int) -> None:
        """Add work of a tenant behind its own; a new tenant's turn is the last of this round."""
        self._ring.setdefault(tenant, _Turns()).work.append((work, max(1, cost)))

    def remove(self, tenant: str, matches: Callable[[W], bool]) -> list[W]:
        """Remove and return a tenant's work that matches."""
        turns = self._ring.get(tenant)
        if turns is None:
            return []
        removed = [work for work, _ in turns.work if matches(work)]
        turns.work = deque((work, cost) for work, cost in turns.work if not matches(work))
        if not turns.work:
            del self._ring[tenant]
        return removed

    def take(self, budget: int, *, max_count: int | None = None) -> list[W]:
        """Take the next works, together at most ``budget`` tokens; one that is larger is taken alone.

        A tenant whose work no longer fits keeps its credit, and its turn is the first of the next call.
        """
        taken: list[W] = []
        left = budget
        while self._ring and (max_count is None or len(taken) < max_count):
            tenant, turns = next(iter(self._ring.items()))
            if turns.credit < turns.work[0][1]:
                turns.credit += self._quantum
            while turns.work and turns.work[0][1] <= turns.credit:
                cost = turns.work[0][1]
                is_full = taken and cost > left
                if is_full or (max_count is not None and len(taken) >= max_count):
                    return taken
                taken.append(turns.work.popleft()[0])
                turns.credit -= cost
                left -= cost
            if turns.work:
                self._ring.move_to_end(tenant)
            else:
                del self._ring[tenant]
        return taken
