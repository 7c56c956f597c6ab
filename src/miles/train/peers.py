"""The ranks that train one model together, seen from one of them; and the rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Peers(Protocol):
    """A batch is dealt out in ``parts``, and this rank has one; ranks that share a part know the same of it.

    Of those, ``context`` have each some of a micro-batch's tokens.

    All ranks make the same calls in the same order. ``lead`` is true on the one rank that speaks for all.
    """

    @property
    def part(self) -> int: ...

    @property
    def parts(self) -> int: ...

    @property
    def context(self) -> int: ...

    @property
    def lead(self) -> bool: ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the parts, the same bits on every rank."""
        ...

    def most(self, x: Tensor) -> Tensor:
        """The largest over the parts, element by element."""
        ...

    def names(self, own: Sequence[str]) -> list[str]:
        """Every name that any part has, each once, in one order."""
        ...


class Alone:
    """One rank that has all of a batch."""

    part, parts, context, lead = 0, 1, 1, True

    def sum(self, x: Tensor) -> Tensor:
        return x

    def most(self, x: Tensor) -> Tensor:
        return x

    def names(self, own: Sequence[str]) -> list[str]:
        return list(own)


ALONE = Alone()
