"""The time as the router knows it: what it is now, and a call at a later one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A call that has not been made yet."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Seconds since some start, and calls that are made when as many more have passed."""

    def now(self) -> float: ...
    def call_later(self, seconds: float, call: Callable[..., Any], /, *args: Any) -> Timer: ...


class LoopClock:
    """The clock of an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time
        self.call_later = loop.call_later
