"""What a critic minimises: the distance of its values from the returns, held near what it said before.

``_R``: one entry a trained token of this micro-batch. No suffix: a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles.algo.objective import Terms
from miles.algo.reduce import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """The squared error of each value, or that of the value held within ``clip`` of the old one, whichever is larger.

    ``max((V - G)^2, (old + clip(V - old, -clip, clip) - G)^2)``: a value that ran further than ``clip`` towards its
    return within one batch has no gradient any more.
    """

    clip: float

    def __call__(self, value_R: Tensor, old_value_R: Tensor, return_R: Tensor, layout: Layout) -> Terms:
        moved_R = value_R - old_value_R
        free_R = (value_R - return_R).square()
        held_R = (old_value_R + moved_R.clamp(-self.clip, self.clip) - return_R).square()
        loss = layout.reduce(free_R.maximum(held_R))
        clipped_R = (moved_R.detach().abs() > self.clip).to(value_R.dtype)
        return Terms(
            loss=loss, metrics={"value_loss": loss.detach(), "value_clipfrac": layout.reduce(clipped_R).detach()}
        )
