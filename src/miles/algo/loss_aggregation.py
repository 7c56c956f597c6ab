"""Loss aggregation: per-token values to one scalar per global batch.

A reducer gives the weight of one token of each trajectory from the token counts of the whole global
batch. A micro-batch then sums weight times value and needs no denominator of its own, so the loss
and its gradient do not depend on the split into micro-batches.

``_R``: one entry per trained token of this micro-batch. ``_S``: one entry per sample of this micro-batch.
``_N``: one entry per trajectory of the global batch.
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
    """Map the number of trained tokens of each trajectory of a global batch to the weight of one token of each."""

    def __call__(self, counts_N: Sequence[int]) -> NDArray[np.float64]: ...


def mean_per_trajectory(counts_N: Sequence[int]) -> NDArray[np.float64]:
    """Mean over each trajectory's trained tokens, then mean over trajectories.

    All samples of a branched trajectory share one denominator; a trajectory without a trained token
    adds nothing and counts as one of the trajectories.

    >>> mean_per_trajectory([1, 4]).tolist()
    [0.5, 0.125]
    """
    count_N = np.asarray(counts_N, np.float64)
    return np.where(count_N > 0, 1.0 / (np.maximum(count_N, 1.0) * max(len(count_N), 1)), 0.0)


def mean_per_token(counts_N: Sequence[int]) -> NDArray[np.float64]:
    """Mean over all trained tokens of the global batch.

    >>> mean_per_token([1, 4]).tolist()
    [0.2, 0.2]
    """
    count_N = np.asarray(counts_N, np.float64)
    return np.full(len(count_N), 1.0 / max(count_N.sum(), 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantLengthReducer:
    """Dr.GRPO: sum over each trajectory's trained tokens divided by a constant length, then mean over trajectories.

    Tokens of long and short trajectories have the same weight in every batch, so there is no length bias.

    >>> ConstantLengthReducer(length=10)([1, 4]).tolist()
    [0.05, 0.05]
    """

    length: int

    def __call__(self, counts_N: Sequence[int]) -> NDArray[np.float64]:
        return np.full(len(counts_N), 1.0 / (self.length * max(len(counts_N), 1)))


class LossAggregator(Protocol):
    """Sums over tokens that a loss needs; the training plane implements them for the micro-batch at hand."""

    def reduce(self, x_R: Tensor) -> Tensor:
        """Return this micro-batch's part of a loss term: ``x_R`` weighted by the reducer; parts are summed."""
        ...

    def mean(self, x_R: Tensor) -> Tensor:
        """Return this micro-batch's part of the global batch's mean of ``x_R``, for metrics, whatever the reducer."""
        ...

    def sum_of_sample(self, x_R: Tensor) -> Tensor:
        """Return for each token the sum over the trained tokens of its sample; differentiable."""
        ...

    def mean_of_sample(self, x_R: Tensor) -> Tensor:
        """Return for each token the mean over the trained tokens of its sample; differentiable."""
        ...

    def sum_of_pair(self, x_R: Tensor) -> Tensor:
        """Return for each token the sum over the trained tokens of its pair of samples (0 and 1, 2 and 3, ...)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedAggregator:
    """A LossAggregator from per-token weights; all tokens of its samples are local.

    ``weight_R`` is a token's weight in the loss, ``mean_R`` in a mean (None: the same). ``sample_R`` ascends and
    gives the sample of each token, ``trained_S`` the number of trained tokens of each sample.
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
    """Sums over runs of equal ``sample_R``, broadcast back to the tokens of each run.

    The map is its own transpose, so backward is the same operation: no scattered additions, whose order is not
    deterministic on an accelerator. Sums are in float64, so that their order does not matter either.
    """

    @staticmethod
    def forward(ctx: Any, x_R: Tensor, sample_R: Tensor, trained_S: Tensor) -> Tensor:
        ctx.save_for_backward(sample_R, trained_S)
        # unsafe: the lengths are right by construction, and checking them would synchronise host and device.
        sum_S = torch.segment_reduce(x_R.to(torch.float64), "sum", lengths=trained_S, unsafe=True, initial=0.0)
        return sum_S.index_select(0, sample_R).to(x_R.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        sample_R, trained_S = ctx.saved_tensors
        return _SumOfSample.apply(grads[0], sample_R, trained_S), None, None
