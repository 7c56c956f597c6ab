"""What attention is told besides queries, keys and values.

Shapes: T tokens, H heads of the index, d its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a layer looks back. Scores are multiplied by ``scale``, then bounded by ``softcap``.

    A token sees itself and what came before: no further back than ``window`` tokens in all, and nothing outside
    its own ``chunk`` of positions.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Who may be seen at all: the ``top`` tokens by the sum over heads of ``weights * relu(q . k)``.

    Choosing takes no gradient. Scales are in the weights already.
    """

    q_THd: Tensor
    k_Td: Tensor
    weights_TH: Tensor
    top: int
