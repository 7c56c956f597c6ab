"""How far engine and trainer are apart decides what is done about it (no torch, so that a plan can say it).

the parity light is     green    yellow       red        beyond the stop
the correction is       none     truncate     icepop     the run ends
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.algo.config import AlgoConfig

Mode = Literal["truncate", "mask", "icepop"]
Rung = Literal["none", "truncate", "icepop", "stop"]
RUNGS: tuple[Rung, ...] = ("none", "truncate", "icepop", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Between which ratios of trainer to engine all is well; 1 is always among them."""

    low: float
    high: float

    def __post_init__(self) -> None:
        assert 0 <= self.low <= 1 <= self.high, f"bounds {self.low} and {self.high} do not hold 1"


BOUNDS: Mapping[Mode, Bounds] = MappingProxyType(
    {"truncate": Bounds(low=0, high=2), "mask": Bounds(low=0, high=2), "icepop": Bounds(low=0.5, high=5)}
)


def bounds_of(config: AlgoConfig, mode: Mode) -> Bounds:
    """What the config says of the bounds of a weight, and the mode's own where it says nothing."""
    own = BOUNDS[mode]
    return Bounds(
        low=own.low if config.tis_clip_low is None else config.tis_clip_low,
        high=own.high if config.tis_clip is None else config.tis_clip,
    )


def corrects(config: AlgoConfig) -> bool:
    """Is the loss corrected for what engine and trainer disagree on?"""
    return config.use_tis or config.use_rs or config.rs_veto_threshold is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """The mean and the largest absolute gap between the log-probs of engine and trainer, in nats."""

    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Up to ``tolerance`` / 10 nothing is corrected, up to ``tolerance`` weights are truncated, up to ``stop`` masked.

    >>> ladder = Ladder(tolerance=0.01, stop=0.1)
    >>> [ladder.choose(Parity(mean_abs=gap, max_abs=0.5)) for gap in (0.0005, 0.005, 0.05, 0.5)]
    ['none', 'truncate', 'icepop', 'stop']
    """

    tolerance: float
    stop: float

    def choose(self, parity: Parity | None, *, stale: bool = False) -> Rung:
        """The lowest rung that is enough; ``parity`` is None when no sample of the present weights could be compared.

        A batch that is ``stale``, with tokens of older weights in it, is weighed at least: the weight is what makes
        up for their age. So is one with a single token beyond truncation's bound, however small the mean.
        """
        if parity is None:
            return "truncate" if stale else "none"
        if not parity.mean_abs <= self.stop:  # also where it is not a number
            return "stop"
        if parity.mean_abs > self.tolerance:
            return "icepop"
        wild = not parity.max_abs <= math.log(BOUNDS["truncate"].high)
        return "truncate" if stale or wild or parity.mean_abs > self.tolerance / 10 else "none"


def ladder_of(*, tolerance: float, stop: float | None) -> Ladder:
    """With the stop that was asked for, or at ten times the tolerance."""
    return Ladder(tolerance=tolerance, stop=10 * tolerance if stop is None else stop)
