"""The engines that are open, kept in order: who has least to do is known without looking at each."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from contextlib import contextmanager

from miles.cluster.route.engine import Engine


class Openings:
    """Whoever changes an engine's state or what it has to do says so with ``note``.

    Engines are told apart by the number they joined as. A choice costs as many comparisons as the logarithm of their
    number; what else grows with it is the moving of a list's end, some nanoseconds an engine.
    """

    def __init__(self) -> None:
        self.outstanding = 0
        self._joined = 0
        self._numbers: dict[Engine, int] = {}
        self._by_name: dict[str, Engine] = {}
        self._in_order: list[int] = []
        self._at: dict[int, Engine] = {}
        self._known: dict[int, tuple[int, int]] = {}
        self._by_work: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    # -- keeping it ---------------------------------------------------------------------------

    def join(self, engine: Engine) -> None:
        """It comes behind all that are there."""
        self._numbers[engine] = self._joined
        self._joined += 1
        self.note(engine)

    def leave(self, engine: Engine) -> None:
        """It is to be forgotten, and what is noted of it from now on is not heeded."""
        self._take_out(self._numbers.pop(engine), engine)

    def note(self, engine: Engine) -> None:
        """Look at it: is it open, and what has it to do?"""
        number = self._numbers.get(engine)
        if number is None:
            return
        known = self._known.get(number)
        if not engine.open:
            self._take_out(number, engine)
        elif known is None:
            self._put_in(number, engine)
        elif known != (engine.work, engine.outstanding):
            work, outstanding = known
            self._known[number] = engine.work, engine.outstanding
            self.outstanding += engine.outstanding - outstanding
            del self._by_work[bisect_left(self._by_work, (work, number))]
            insort(self._by_work, (engine.work, number))

    def _put_in(self, number: int, engine: Engine) -> None:
        self._by_name[engine.id], self._at[number] = engine, engine
        self._known[number] = engine.work, engine.outstanding
        self.outstanding += engine.outstanding
        insort(self._in_order, number)
        insort(self._by_work, (engine.work, number))

    def _take_out(self, number: int, engine: Engine) -> None:
        if number in self._known:
            work, outstanding = self._known.pop(number)
            del self._by_name[engine.id], self._at[number]
            self.outstanding -= outstanding
            del self._in_order[bisect_left(self._in_order, number)]
            del self._by_work[bisect_left(self._by_work, (work, number))]

    # -- asking it ----------------------------------------------------------------------------

    def get(self, name: str) -> Engine | None:
        """An engine, if it is open."""
        return self._by_name.get(name)

    def nth(self, place: int) -> Engine:
        """The one at a place in the order in which they joined."""
        return self._at[self._in_order[place]]

    def least(self, turn: int) -> Engine:
        """One with the least work; of several the one whose turn it is, in the order in which they joined."""
        equals = bisect_left(self._by_work, (self._by_work[0][0] + 1, -1))
        return self._at[self._by_work[turn % equals][1]]

    def others(self, avoid: frozenset[str]) -> bool:
        """Is one open that is not to be avoided?"""
        return len(self) > sum(name in self for name in avoid)

    @contextmanager
    def without(self, avoid: frozenset[str]) -> Iterator[Openings]:
        """Those that are not to be avoided; all, where none is left."""
        out = [self._by_name[name] for name in avoid if name in self] if self.others(avoid) else []
        for engine in out:
            self._take_out(self._numbers[engine], engine)
        try:
            yield self
        finally:
            for engine in out:
                self._put_in(self._numbers[engine], engine)
