"""Least-loaded index: the engines of a pool and their states, the open ones ordered by load, for load balancing."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar


class HasLoad(Hashable, Protocol):
    """An engine with its state, why it has it, and its load; only one that is ``open`` takes requests."""

    state: Any
    why: str

    @property
    def name(self) -> str: ...
    @property
    def open(self) -> bool: ...
    @property
    def load(self) -> int: ...
    @property
    def outstanding(self) -> int: ...


M = TypeVar("M", bound=HasLoad)


class LeastLoadedIndex(Generic[M]):
    """``members`` are all engines by name, in the order in which they were added.

    Call ``update`` whenever an engine's load changes, or its state other than by ``set_state``.
    Ties are broken by the order of ``members``. A choice costs as many comparisons as the logarithm of
    their number; what else grows with the number is moving the end of a list, a few nanoseconds per engine.
    """

    def __init__(self) -> None:
        self.members: dict[str, M] = {}
        self.outstanding = 0
        self._num_added = 0
        self._numbers: dict[M, int] = {}
        self._by_name: dict[str, M] = {}
        self._by_number: dict[int, M] = {}
        self._open_numbers: list[int] = []
        self._recorded: dict[int, tuple[int, int]] = {}
        self._by_load: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._open_numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    # -- updates ------------------------------------------------------------------------------

    def add(self, member: M) -> None:
        """Add an engine behind all others."""
        self.members[member.name] = member
        self._numbers[member] = self._num_added
        self._num_added += 1
        self.update(member)

    def remove(self, member: M) -> None:
        """Remove an engine; later updates of it are ignored."""
        del self.members[member.name]
        self._delete(self._numbers.pop(member), member)

    def set_state(self, member: M, state: Any, why: str) -> bool:
        """Change the state of an engine; False if that and the reason are as before."""
        changed = member.state is not state or member.why != why
        member.state = state
        member.why = why
        self.update(member)
        return changed

    def update(self, member: M) -> None:
        """Read the state and the load of an engine again."""
        number = self._numbers.get(member)
        if number is None:
            return
        recorded = self._recorded.get(number)
        if not member.open:
            self._delete(number, member)
        elif recorded is None:
            self._insert(number, member)
        elif recorded != (member.load, member.outstanding):
            load, outstanding = recorded
            self._recorded[number] = member.load, member.outstanding
            self.outstanding += member.outstanding - outstanding
            del self._by_load[bisect_left(self._by_load, (load, number))]
            insort(self._by_load, (member.load, number))

    def _insert(self, number: int, member: M) -> None:
        self._by_name[member.name] = self._by_number[number] = member
        self._recorded[number] = member.load, member.outstanding
        self.outstanding += member.outstanding
        insort(self._open_numbers, number)
        insort(self._by_load, (member.load, number))

    def _delete(self, number: int, member: M) -> None:
        if number in self._recorded:
            load, outstanding = self._recorded.pop(number)
            del self._by_name[member.name], self._by_number[number]
            self.outstanding -= outstanding
            del self._open_numbers[bisect_left(self._open_numbers, number)]
            del self._by_load[bisect_left(self._by_load, (load, number))]

    # -- queries ------------------------------------------------------------------------------

    def get(self, name: str) -> M | None:
        """An engine by its name, if it is open."""
        return self._by_name.get(name)

    def nth(self, position: int) -> M:
        """The open engine at a position in the order in which they were added."""
        return self._by_number[self._open_numbers[position]]

    def least_loaded(self, turn: int = 0) -> M | None:
        """An open engine with the least load, of several the one at ``turn`` modulo their number; None if none is."""
        if not self._by_load:
            return None
        ties = bisect_left(self._by_load, (self._by_load[0][0] + 1, -1))
        return self._by_number[self._by_load[turn % ties][1]]

    def least_loaded_except(self, avoid: Collection[str]) -> M | None:
        """The open engine with the least load that is not to be avoided; None if there is none."""
        if not self.has_other(avoid):
            return None
        with self.excluding(avoid) as others:
            return others.least_loaded()

    def has_other(self, avoid: Collection[str]) -> bool:
        """Is an engine open that is not to be avoided?"""
        return len(self) > sum(name in self for name in avoid)

    @contextmanager
    def excluding(self, avoid: Collection[str]) -> Iterator[LeastLoadedIndex[M]]:
        """The index without some engines meanwhile; with all of them if no other is open."""
        excluded = [self._by_name[name] for name in avoid if name in self] if self.has_other(avoid) else []
        for member in excluded:
            self._delete(self._numbers[member], member)
        try:
            yield self
        finally:
            for member in excluded:
                self._insert(self._numbers[member], member)
