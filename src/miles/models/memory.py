"""The door between a decoder and whoever remembers its past: a packed batch, or the cache of an engine.

Shapes: T tokens of a forward, H query heads, G key-value heads, d channels of a key, e of a value, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from miles.kernels.terms import Index, Terms

__all__ = ["Attend", "Carry", "Index", "Terms"]


class Carry(Protocol):
    """What a recurrent layer's earlier tokens left behind.

    The forward's tokens are sequences of ``lengths``, one after the other. ``state`` has a row for each, zeros for
    one that begins here; None says that all begin here and nobody asks what they leave.
    """

    lengths: Sequence[int]
    state: tuple[Tensor, ...] | None

    def keep(self, state: tuple[Tensor, ...]) -> None:
        """Remember these instead, rows in the same order."""
        ...


class Attend(Protocol):
    """Who remembers. ``latent`` asks latent attention for its short vectors instead of keys and values.

    ``sinks_H`` are scores of a token that is seen by all and says nothing. ``index`` narrows what may be seen; a
    layer's number is the choice that layer made in this forward.
    """

    latent: bool

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        terms: Terms,
        /,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor: ...

    def carry(self, layer: int) -> Carry:
        """What a recurrent layer left behind, and where to leave it."""
        ...
