"""The user's own functions inside the trainer, loaded on every rank."""

from __future__ import annotations

from typing import Any

from miles.launch.config import Config
from miles.launch.upstream import upstream_of
from miles.plug.point import Point
from miles.plug.points import BEFORE_LOG_PROBS, BEFORE_TRAIN_STEP, INIT
from miles.train.hooks import Hooks


def own(config: Config, point: Point) -> Any:
    """What the user named at a point of the plugs' own knobs, if anything, held against its door."""
    path: str | None = getattr(config.plug, point.knob)
    return None if path is None else point.load(path, upstream_of(config))


def hooks_of(config: Config) -> Hooks:
    """Those that the trainer calls."""
    return Hooks(
        init=own(config, INIT),
        before_log_probs=own(config, BEFORE_LOG_PROBS),
        before_train_step=own(config, BEFORE_TRAIN_STEP),
    )
