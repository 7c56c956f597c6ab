"""Token-level returns and advantages: discounted sums (REINFORCE++), GAE (PPO), and whitening over a whole batch.

Only trained tokens are transitions. Environment tokens between two of them belong to the later token's state: they
have no reward and no discount, and a recursion passes over them. A sample ends at its last trained
token, where its reward is given and the next value is 0.

Computation is in float64, results in the input dtype. A token's result depends on its own sample
alone, bit for bit, whatever else is in the batch.

``_R``: one entry per trained token, the tokens of a sample in order and contiguous; ``sample_R`` is the index of the
sample. No suffix: a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_EPSILON = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantagesAndReturns:
    """Advantage and return of each token."""

    advantage_R: Tensor
    return_R: Tensor


class ReturnEstimator(Protocol):
    """Map token rewards and values (None without a critic) to advantages and returns."""

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> AdvantagesAndReturns: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlusReturns:
    """REINFORCE++: a token's advantage is its return, the discounted sum of rewards to the end of its sample.

    ``G_t = r_t + gamma G_(t+1)``; there is no critic.
    """

    gamma: float = 1.0

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> AdvantagesAndReturns:
        return_R = discounted_sum(reward_R, sample_R, self.gamma)
        return AdvantagesAndReturns(advantage_R=return_R, return_R=return_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    """Generalised advantage estimation (PPO) over trained tokens.

    ``d_t = r_t + gamma V_(t+1) - V_t`` with a value of 0 after the last token, ``A_t = d_t + gamma lambd A_(t+1)``,
    and the return, the critic's target, is ``A_t + V_t``.
    """

    gamma: float = 1.0
    lambd: float = 1.0

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> AdvantagesAndReturns:
        assert value_R is not None, "GAE needs a critic's values"
        reward, value = reward_R.double(), value_R.double()
        next_value = torch.where(mark_sample_ends(sample_R), 0.0, pad(value[1:], (0, min(1, len(value)))))
        td_error = reward + self.gamma * next_value - value
        advantage = discounted_sum(td_error, sample_R, self.gamma * self.lambd)
        return AdvantagesAndReturns(
            advantage_R=advantage.to(reward_R.dtype), return_R=(advantage + value).to(reward_R.dtype)
        )


def discounted_sum(x_R: Tensor, sample_R: Tensor, decay: float) -> Tensor:
    """``y_t = x_t + decay y_(t+1)`` within each sample, by a parallel scan.

    The reach doubles each round: after n rounds ``y_t`` includes the next 2^n tokens of its sample,
    and ``carry`` is the factor of the first token beyond them, which is 0 beyond a sample's end.
    """
    y = x_R.double()
    carry = torch.where(mark_sample_ends(sample_R), 0.0, torch.full_like(y, decay))
    reach = 1
    while reach < len(y):
        y = y + carry * pad(y[reach:], (0, reach))
        carry = carry * pad(carry[reach:], (0, reach))
        reach *= 2
    return y.to(x_R.dtype)


def mark_sample_ends(sample_R: Tensor) -> Tensor:
    """Return True at the last trained token of each sample.

    >>> mark_sample_ends(torch.tensor([4, 4, 7])).tolist()
    [False, True, True]
    """
    last_R = torch.ones_like(sample_R, dtype=torch.bool)
    last_R[:-1] = sample_R[1:] != sample_R[:-1]
    return last_R


def compute_token_rewards(
    sample_reward_R: Tensor, sample_R: Tensor, *, kl_R: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Return token rewards: the sample's reward at its last token, and -``kl_coef`` times the KL at each token."""
    reward_R = torch.where(mark_sample_ends(sample_R), sample_reward_R, 0.0)
    return reward_R if kl_R is None else reward_R - kl_coef * kl_R


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMoments:
    """Count, sum and sum of squares over tokens, in float64; moments of parts of a batch add up.

    ``stack`` and ``unstack`` convert to one tensor for a reduction over ranks.
    """

    count: Tensor
    total: Tensor
    square: Tensor

    @classmethod
    def from_values(cls, x_R: Tensor) -> BatchMoments:
        wide = x_R.detach().double()
        return cls(count=torch.full_like(wide.sum(), wide.numel()), total=wide.sum(), square=wide.square().sum())

    def __add__(self, other: BatchMoments) -> BatchMoments:
        return BatchMoments.unstack(self.stack() + other.stack())

    def stack(self) -> Tensor:
        return torch.stack([self.count, self.total, self.square])

    @classmethod
    def unstack(cls, sums: Tensor) -> BatchMoments:
        count, total, square = sums.unbind()
        return cls(count=count, total=total, square=square)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The sample variance (over n - 1), 0 for fewer than two tokens."""
        deviations = self.square - self.total.square() / self.count.clamp(min=1)
        return deviations.clamp(min=0) / (self.count - 1).clamp(min=1)

    @property
    def std(self) -> Tensor:
        """The population standard deviation (over n), for metrics."""
        return (self.variance * (self.count - 1).clamp(min=0) / self.count.clamp(min=1)).sqrt()


def whiten(x_R: Tensor, moments: BatchMoments) -> Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)`` with the ``moments`` of the whole batch that ``x_R`` is a part of."""
    return ((x_R.double() - moments.mean) * (moments.variance + _EPSILON).rsqrt()).to(x_R.dtype)


def explained_variance(error: BatchMoments, returns: BatchMoments) -> Tensor:
    """Fraction of the returns' variance that the critic explains: 1 is all of it, 0 is no better than a constant.

    ``error`` is of return minus value. It is 0 if all returns are equal.
    """
    explained = 1 - error.variance / returns.variance.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(returns.variance > 0, explained, 0.0)
