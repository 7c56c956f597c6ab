"""Learning-rate schedules: warm-up, then constant, linear or cosine decay (no torch, so plans can check them)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from miles.core.errors import UsageError
from miles.train.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LRSchedule:
    """The learning rate of each update, counted from 1: linear warm-up, then ``style``.

    The warm-up reaches ``lr`` at update ``warmup``; a decay reaches ``min_lr`` at update ``decay`` and stays.

    >>> s = LRSchedule(style="linear", lr=1.0, min_lr=0.0, warmup=2, decay=4)
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
        progress = (update - self.warmup) / (self.decay - self.warmup)
        factor = 1 - progress if self.style == "linear" else 0.5 * (math.cos(math.pi * progress) + 1)
        return self.min_lr + factor * (self.lr - self.min_lr)


def build_lr_schedule(config: TrainConfig, *, updates: int) -> LRSchedule:
    """Build the schedule of a run of ``updates`` optimizer steps."""
    fraction = config.lr_warmup_fraction
    if fraction is not None and config.lr_warmup_iters:
        raise UsageError("--lr-warmup-iters and --lr-warmup-fraction both set the warm-up; give only one.")
    decay = _decay_updates(config, updates)
    warmup = config.lr_warmup_iters if fraction is None else round(fraction * decay)
    return _build(config, lr=config.lr, warmup=warmup, decay=decay, flag="--lr-warmup-iters")


def build_vision_lr_schedule(schedule: LRSchedule, vision_lr: float) -> LRSchedule:
    """Build the schedule of the vision tower: its own peak, with the warm-up and decay of ``schedule``."""
    return replace(schedule, lr=vision_lr, min_lr=min(schedule.min_lr, vision_lr))


def build_critic_lr_schedule(config: TrainConfig, *, updates: int) -> LRSchedule:
    """Build the critic's schedule: its own rate and warm-up, with the policy's decay."""
    lr = config.lr if config.critic_lr is None else config.critic_lr
    decay, flag = _decay_updates(config, updates), "--critic-lr-warmup-iters"
    return _build(config, lr=lr, warmup=config.critic_lr_warmup_iters, decay=decay, flag=flag)


def _decay_updates(config: TrainConfig, updates: int) -> int:
    return config.lr_decay_iters if config.lr_decay_iters is not None else updates


def _build(config: TrainConfig, *, lr: float, warmup: int, decay: int, flag: str) -> LRSchedule:
    if config.lr_decay_style != "constant" and warmup >= decay:
        raise UsageError(
            f"the warm-up of {warmup} optimizer steps leaves nothing of the {decay} steps of --lr-decay-iters; "
            f"shorten {flag} or lengthen --lr-decay-iters."
        )
    return LRSchedule(style=config.lr_decay_style, lr=lr, min_lr=config.min_lr, warmup=warmup, decay=decay)
