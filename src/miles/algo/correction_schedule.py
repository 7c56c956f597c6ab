"""Automatic choice of the importance-sampling correction from the measured parity (no torch, so plans can show it).

parity light         green    yellow       red        above --parity-stop
correction           none     truncate     icepop     the run stops
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.algo.config import AlgoConfig

CorrectionMode = Literal["truncate", "mask", "icepop"]
CorrectionChoice = Literal["none", "truncate", "icepop", "stop"]
CORRECTION_CHOICES: tuple[CorrectionChoice, ...] = ("none", "truncate", "icepop", "stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioBounds:
    """Bounds of the ratio trainer / engine; they contain 1."""

    low: float
    high: float

    def __post_init__(self) -> None:
        assert 0 <= self.low <= 1 <= self.high, f"bounds {self.low} and {self.high} do not contain 1"


DEFAULT_BOUNDS: Mapping[CorrectionMode, RatioBounds] = MappingProxyType(
    {
        "truncate": RatioBounds(low=0, high=2),
        "mask": RatioBounds(low=0, high=2),
        "icepop": RatioBounds(low=0.5, high=5),
    }
)


def resolve_bounds(config: AlgoConfig, mode: CorrectionMode) -> RatioBounds:
    """Return the configured bounds of a weight, with the mode's defaults for those not set."""
    default = DEFAULT_BOUNDS[mode]
    return RatioBounds(
        low=default.low if config.tis_clip_low is None else config.tis_clip_low,
        high=default.high if config.tis_clip is None else config.tis_clip,
    )


def uses_correction(config: AlgoConfig) -> bool:
    """Return whether the loss is corrected for the mismatch of engine and trainer."""
    return config.use_tis or config.use_rs or config.rs_veto_threshold is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Mean and maximum absolute difference between the log-probs of engine and trainer, in nats."""

    mean_abs: float
    max_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSchedule:
    """No correction up to ``tolerance`` / 10, truncated weights up to ``tolerance``, masked weights up to ``stop``.

    >>> schedule = CorrectionSchedule(tolerance=0.01, stop=0.1)
    >>> [schedule.choose(LogprobGap(mean_abs=gap, max_abs=0.5)) for gap in (0.0005, 0.005, 0.05, 0.5)]
    ['none', 'truncate', 'icepop', 'stop']
    """

    tolerance: float
    stop: float

    def choose(self, gap: LogprobGap | None, *, stale: bool = False) -> CorrectionChoice:
        """Return the weakest sufficient correction; ``gap`` is None if no sample of the current version was compared.

        A ``stale`` batch, with tokens of older versions, is weighted at least with truncation, because the weights
        correct for its age. So is a batch with a single token outside the truncation bound, however small the mean.
        """
        if gap is None:
            return "truncate" if stale else "none"
        if not gap.mean_abs <= self.stop:  # also if it is NaN
            return "stop"
        if gap.mean_abs > self.tolerance:
            return "icepop"
        has_outlier = not gap.max_abs <= math.log(DEFAULT_BOUNDS["truncate"].high)
        return "truncate" if stale or has_outlier or gap.mean_abs > self.tolerance / 10 else "none"


def build_correction_schedule(*, tolerance: float, stop: float | None) -> CorrectionSchedule:
    """Build the schedule; the default stop is ten times the tolerance."""
    return CorrectionSchedule(tolerance=tolerance, stop=10 * tolerance if stop is None else stop)
