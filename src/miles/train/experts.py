"""The experts a forward used on one rank's tokens of a micro-batch, kept so that later forwards use them again.

Shapes: t tokens as this rank has them, padding included; L layers with experts, k experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, eq=False)
class Used:
    """Filled by the first forward over some rows, and read by those after it; -1 where there is nothing to read.

    What it holds is in the order a rank computes in, which is the same each time the same rows are read; it is of use
    to the model that filled it and to no other.
    """

    experts_tLk: Tensor | None = None
