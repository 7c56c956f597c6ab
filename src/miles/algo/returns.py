"""Rewards at tokens -> returns and advantages of tokens: a discounted scan, GAE, and whitening over a whole batch.

Only trained tokens are transitions. What the environment wrote between two of them is part of the later one's state:
it earns nothing, costs no discount, and the carry of a recursion crosses it as it is. A sample ends at its last trained
token, where its reward falls due and nothing is expected any more.

Everything is reckoned in float64 and given back in the type it came in. A token's result depends on its own sample
alone, to the bit, whatever stands beside it.

``_R``: one entry a trained token, the tokens of a sample in order and next to each other, ``sample_R`` the number of
that sample. No suffix: a scalar.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

_TINY = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What each token was worth (``advantage_R``), and what was earned from it on (``return_R``)."""

    advantage_R: Tensor
    return_R: Tensor


class Estimator(Protocol):
    """Rewards at tokens, and what was expected there (None without a critic), to advantages and returns."""

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> Estimate: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenReturns:
    """REINFORCE++: a token is worth the discounted rewards from it to the end of its sample.

    ``G_t = r_t + gamma G_(t+1)``; without a critic the return is the advantage itself.
    """

    gamma: float = 1.0

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> Estimate:
        return_R = discounted(reward_R, sample_R, self.gamma)
        return Estimate(advantage_R=return_R, return_R=return_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gae:
    """Generalised advantage estimation, PPO's own, over trained tokens.

    ``d_t = r_t + gamma V_(t+1) - V_t`` with nothing expected after the last token, ``A_t = d_t + gamma lambd A_(t+1)``,
    and the return, which a critic learns from, is ``A_t + V_t``.
    """

    gamma: float = 1.0
    lambd: float = 1.0

    def __call__(self, reward_R: Tensor, value_R: Tensor | None, sample_R: Tensor) -> Estimate:
        assert value_R is not None, "generalised advantages are taken against a critic's values"
        reward, value = reward_R.double(), value_R.double()
        expected = torch.where(ends(sample_R), 0.0, pad(value[1:], (0, min(1, len(value)))))
        surprise = reward + self.gamma * expected - value
        advantage = discounted(surprise, sample_R, self.gamma * self.lambd)
        return Estimate(advantage_R=advantage.to(reward_R.dtype), return_R=(advantage + value).to(reward_R.dtype))


def discounted(x_R: Tensor, sample_R: Tensor, decay: float) -> Tensor:
    """``y_t = x_t + decay y_(t+1)`` within each sample, all tokens at once.

    Each round reaches twice as far as the one before: after n of them ``y_t`` holds the next 2^n tokens of its sample,
    and ``carry`` what the first token beyond them is to be multiplied with, which is 0 beyond a sample's end.
    """
    y = x_R.double()
    carry = torch.where(ends(sample_R), 0.0, torch.full_like(y, decay))
    reach = 1
    while reach < len(y):
        y = y + carry * pad(y[reach:], (0, reach))
        carry = carry * pad(carry[reach:], (0, reach))
        reach *= 2
    return y.to(x_R.dtype)


def ends(sample_R: Tensor) -> Tensor:
    """True at the last trained token of each sample.

    >>> ends(torch.tensor([4, 4, 7])).tolist()
    [False, True, True]
    """
    last_R = torch.ones_like(sample_R, dtype=torch.bool)
    last_R[:-1] = sample_R[1:] != sample_R[:-1]
    return last_R


def rewards(worth_R: Tensor, sample_R: Tensor, *, kl_R: Tensor | None = None, kl_coef: float = 0.0) -> Tensor:
    """What each token earns: its sample's worth at the sample's last token, and -``kl_coef`` times the KL at each."""
    earned_R = torch.where(ends(sample_R), worth_R, 0.0)
    return earned_R if kl_R is None else earned_R - kl_coef * kl_R


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums over some of the tokens of a batch, in float64; those of all parts, however it was split, add up.

    ``stack`` and ``unstack`` are for whoever adds them up over ranks.
    """

    count: Tensor
    total: Tensor
    square: Tensor

    @classmethod
    def of(cls, x_R: Tensor) -> Moments:
        wide = x_R.detach().double()
        return cls(count=torch.full_like(wide.sum(), wide.numel()), total=wide.sum(), square=wide.square().sum())

    def __add__(self, other: Moments) -> Moments:
        return Moments.unstack(self.stack() + other.stack())

    def stack(self) -> Tensor:
        return torch.stack([self.count, self.total, self.square])

    @classmethod
    def unstack(cls, sums: Tensor) -> Moments:
        count, total, square = sums.unbind()
        return cls(count=count, total=total, square=square)

    @property
    def mean(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    @property
    def variance(self) -> Tensor:
        """The sample variance (over n - 1), 0 of fewer than two tokens."""
        off = self.square - self.total.square() / self.count.clamp(min=1)
        return off.clamp(min=0) / (self.count - 1).clamp(min=1)

    @property
    def deviation(self) -> Tensor:
        """The standard deviation of these very tokens (over n), as metrics give it."""
        return (self.variance * (self.count - 1).clamp(min=0) / self.count.clamp(min=1)).sqrt()


def whiten(x_R: Tensor, moments: Moments) -> Tensor:
    """``(x - mean) / sqrt(variance + 1e-8)``, with ``moments`` those of the whole batch that ``x_R`` is a part of."""
    return ((x_R.double() - moments.mean) * (moments.variance + _TINY).rsqrt()).to(x_R.dtype)


def explained_variance(error: Moments, returns: Moments) -> Tensor:
    """How much of the returns' variance a critic foresaw: 1 is all of it, 0 as good as a constant.

    ``error`` is of return minus value. Returns that are all equal have nothing to explain: then it is 0.
    """
    told = 1 - error.variance / returns.variance.clamp(min=torch.finfo(torch.float64).tiny)
    return torch.where(returns.variance > 0, told, 0.0)
