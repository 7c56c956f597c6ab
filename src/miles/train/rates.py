"""Learning rates: a warm-up, then constant, linear or cosine (no torch, so that plans can be checked without it)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from miles.core.errors import UsageError
from miles.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rate of each update, which are counted from 1: a linear rise, then ``style``.

    The rise ends at ``lr`` on update ``warmup``; a decay ends at ``min_lr`` on update ``decay`` and stays.

    >>> s = Schedule(style="linear", lr=1.0, min_lr=0.0, warmup=2, decay=4)
    >>> [s.at(update) for update in range(1, 7)]
    [0.5, 1.0, 0.5, 0.0, 0.0, 0.0]
    """

    style: Literal["constant", "linear", "cosine"]
    lr: float
    min_lr: float
    warmup: int
    decay: int

    def at(self, update: int) -> float:
        if update <= self.warmup:
            return self.lr * update / self.warmup
        if self.style == "constant":
            return self.lr
        if update >= self.decay:
            return self.min_lr
        done = (update - self.warmup) / (self.decay - self.warmup)
        left = 1 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1)
        return self.min_lr + left * (self.lr - self.min_lr)


def schedule_of(config: TrainConfig, *, updates: int) -> Schedule:
    """The schedule a run of ``updates`` optimizer steps asks for."""
    fraction = config.lr_warmup_fraction
    if fraction is not None and config.lr_warmup_iters:
        raise UsageError("--lr-warmup-iters and --lr-warmup-fraction both say how long the warm-up is; give one.")
    decay = _decay(config, updates)
    warmup = config.lr_warmup_iters if fraction is None else round(fraction * decay)
    return _schedule(config, lr=config.lr, warmup=warmup, decay=decay, flag="--lr-warmup-iters")


def critic_schedule_of(config: TrainConfig, *, updates: int) -> Schedule:
    """The critic's: a rate and a warm-up of its own, and the policy's way of decaying."""
    lr = config.lr if config.critic_lr is None else config.critic_lr
    decay, flag = _decay(config, updates), "--critic-lr-warmup-iters"
    return _schedule(config, lr=lr, warmup=config.critic_lr_warmup_iters, decay=decay, flag=flag)


def _decay(config: TrainConfig, updates: int) -> int:
    return config.lr_decay_iters if config.lr_decay_iters is not None else updates


def _schedule(config: TrainConfig, *, lr: float, warmup: int, decay: int, flag: str) -> Schedule:
    if config.lr_decay_style != "constant" and warmup >= decay:
        raise UsageError(
            f"the warm-up of {warmup} optimizer steps leaves nothing of the {decay} of --lr-decay-iters to decay over; "
            f"shorten {flag} or lengthen --lr-decay-iters."
        )
    return Schedule(style=config.lr_decay_style, lr=lr, min_lr=config.min_lr, warmup=warmup, decay=decay)
