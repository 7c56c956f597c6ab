"""Metrics that upstream's log functions send to a tracker: they join the metrics of the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from miles.core.errors import HookError

_METRICS: ContextVar[MutableMapping[str, float] | None] = ContextVar("logged_metrics", default=None)


@contextmanager
def collect_logged(metrics: MutableMapping[str, float]) -> Iterator[None]:
    """Add what is logged in this context to ``metrics``."""
    token = _METRICS.set(metrics)
    try:
        yield
    finally:
        _METRICS.reset(token)


def log(args: Any, metrics: Mapping[str, Any], step_key: str = "", **_: Any) -> None:
    """Log numbers under the step at hand, in a log function."""
    collected = _METRICS.get()
    if collected is None:
        raise HookError("tracking_utils.log is for log functions (--custom-rollout-log-function-path).")
    collected.update({name: float(v) for name, v in metrics.items() if name != step_key and isinstance(v, int | float)})
