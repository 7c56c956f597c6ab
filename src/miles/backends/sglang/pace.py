"""How fast each server of a fleet writes, by the replies it gave; one that stays behind the others is named."""

from __future__ import annotations

from collections.abc import Callable, Collection

from miles.cluster.slow import Slowness

# Replies of each server that a look is made of: one may have had a long prompt.
_REPLIES = 8


class Pace:
    """Seconds a token of whole replies. A slow server is given less to do, so each is compared by what it did.

    All of ``tell`` are given a sentence of one that takes ``factor`` times the median of the others, look after look;
    0 names nobody.
    """

    def __init__(self, factor: float = 0.0) -> None:
        self._slowness = Slowness(factor)
        self.tell: tuple[Callable[[str], None], ...] = ()
        self._done: dict[str, tuple[int, int, float]] = {}

    def note(self, name: str, tokens: int, seconds: float, *, serving: Collection[str], version: int) -> None:
        """A server of those ``serving`` gave a reply under ``version``."""
        if not tokens:
            return
        replies, written, spent = self._done.get(name, (0, 0, 0.0))
        self._done[name] = replies + 1, written + tokens, spent + seconds
        if len(serving) < 2 or any(self._done.get(each, (0, 0, 0.0))[0] < _REPLIES for each in serving):
            return
        taken = {each: self._done[each][2] / self._done[each][1] for each in serving}
        self._done = {}
        for slow in self._slowness.look(version, taken):
            for tell in self.tell:
                tell(slow.said("version"))
