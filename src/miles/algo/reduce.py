"""From numbers per token to one number: how a global batch is averaged.

A reducer says what one token of each trajectory weighs, from the token counts of the whole global
batch. A micro-batch then adds up weight times value and needs no denominator of its own, so the loss
and its gradient do not depend on how the batch was cut.

``_R``: one entry a trained token of this micro-batch. ``_S``: one entry a sample of this micro-batch.
``_N``: one entry a trajectory of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The sum over each trajectory's trained tokens over one fixed length, then the mean over trajectories.

    A token of a long trajectory weighs what one of a short trajectory weighs, in this batch and in every
    other, so the length of an attempt does not change how hard its tokens pull (Dr.GRPO).

    >>> Constant(length=10)([1, 4]).tolist()
    [0.05, 0.05]
    """

    length: int

    def __call__(self, counts_N: Sequence[int]) -> NDArray[np.float64]:
        return np.full(len(counts_N), 1.0 / (self.length * max(len(counts_N), 1)))


class Layout(Protocol):
    """The few sums over tokens an objective needs; the training plane knows how they are shared out."""

    def reduce(self, x_R: Tensor) -> Tensor:
        """This micro-batch's part of a term of the loss: ``x_R`` as the reducer weighs it; the parts add up."""
        ...

    def mean(self, x_R: Tensor) -> Tensor:
        """This micro-batch's part of the global batch's mean of ``x_R``, for metrics: a mean whatever the reducer."""
        ...

    def sum_of_sample(self, x_R: Tensor) -> Tensor:
        """The sum over the trained tokens of its sample, given back to each of them; differentiable."""
        ...

    def mean_of_sample(self, x_R: Tensor) -> Tensor:
        """The mean over the trained tokens of its sample, given back to each of them; differentiable."""
        ...

    def sum_of_pair(self, x_R: Tensor) -> Tensor:
        """The sum over the trained tokens of its pair of samples (0 and 1, 2 and 3, ...), given back to each."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted:
    """A layout that knows what each token weighs, and holds all tokens of its samples.

    ``weight_R`` is a token's weight in the loss, ``mean_R`` in a mean (None: the same). ``sample_R`` ascends and
    says which sample a token is of, ``trained_S`` how many each sample has.
    """

    weight_R: Tensor
    sample_R: Tensor
    trained_S: Tensor
    mean_R: Tensor | None = None

    def reduce(self, x_R: Tensor) -> Tensor:
        return (x_R * self.weight_R).sum()

    def mean(self, x_R: Tensor) -> Tensor:
        return (x_R * (self.weight_R if self.mean_R is None else self.mean_R)).sum()

    def sum_of_sample(self, x_R: Tensor) -> Tensor:
        return _SumOfSample.apply(x_R, self.sample_R, self.trained_S)

    def mean_of_sample(self, x_R: Tensor) -> Tensor:
        return self.sum_of_sample(x_R) / self.trained_S[self.sample_R]

    def sum_of_pair(self, x_R: Tensor) -> Tensor:
        return _SumOfSample.apply(x_R, self.sample_R // 2, self.trained_S.view(-1, 2).sum(1))


class _SumOfSample(torch.autograd.Function):
    """Sums over runs of equal ``sample_R``, spread over the runs again.

    The map is its own transpose, so the gradient takes the same way: no scattered additions, whose order an
    accelerator does not fix. Sums are taken in float64, so that their order does not show either.
    """

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, sample_R: Tensor, trained_S: Tensor) -> Tensor:
        ctx.save_for_backward(sample_R, trained_S)
        return _spread_sums(x_R, sample_R, trained_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sample_R, trained_S = ctx.saved_tensors
        return _SumOfSample.apply(grads[0], sample_R, trained_S), None, None


def _spread_sums(x_R: Tensor, sample_R: Tensor, trained_S: Tensor) -> Tensor:
    # unsafe: the lengths are right by construction, and checking them would make the host wait for the device.
    sum_S = torch.segment_reduce(x_R.to(torch.float64), "sum", lengths=trained_S, unsafe=True, initial=0.0)
    return sum_S.index_select(0, sample_R).to(x_R.dtype)
