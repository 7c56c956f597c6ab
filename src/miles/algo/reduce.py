"""From numbers per token to one number: how a global batch is averaged.

A reducer says what one token of each trajectory weighs, from the token counts of the whole global
batch. A micro-batch then adds up weight times value and needs no denominator of its own, so the loss
and its gradient do not depend on how the batch was cut.

``_R``: one entry a trained token of this micro-batch. ``_N``: one entry a trajectory of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


class Reducer(Protocol):
    """Trained tokens of each trajectory of a global batch -> the weight of one token of each."""

    def __call__(self, counts_N: Sequence[int]) -> NDArray[np.float64]: ...


def per_trajectory(counts_N: Sequence[int]) -> NDArray[np.float64]:
    """The mean over each trajectory's trained tokens, then the mean over trajectories.

    All rows of a branched trajectory share its one denominator; a trajectory without a trained token
    adds nothing and counts as one of the trajectories.

    >>> per_trajectory([1, 4]).tolist()
    [0.5, 0.125]
    """
    count_N = np.asarray(counts_N, np.float64)
    return np.where(count_N > 0, 1.0 / (np.maximum(count_N, 1.0) * max(len(count_N), 1)), 0.0)


def per_token(counts_N: Sequence[int]) -> NDArray[np.float64]:
    """The mean over all trained tokens of the global batch, whichever trajectory they are of.

    >>> per_token([1, 4]).tolist()
    [0.2, 0.2]
    """
    count_N = np.asarray(counts_N, np.float64)
    return np.full(len(count_N), 1.0 / max(count_N.sum(), 1.0))


class Layout(Protocol):
    """The few sums over tokens an objective needs; the training plane knows how they are shared out."""

    def reduce(self, x_R: Tensor) -> Tensor:
        """This micro-batch's part of the global batch's mean of ``x_R``; the parts add up to it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A layout that knows what each token weighs."""

    weight_R: Tensor

    def reduce(self, x_R: Tensor) -> Tensor:
        return (x_R * self.weight_R).sum()
