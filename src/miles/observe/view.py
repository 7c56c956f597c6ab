"""What a person watching a run is shown, whichever way it is shown."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Literal, Protocol, TextIO

from miles.core.events import Event

Kind = Literal["auto", "live", "plain", "none"]


class Stage(Protocol):
    """A piece of work with an end. Call it as work gets done; it is over at its total, or when told."""

    def __call__(self, n: int = 1, note: str = "") -> None: ...
    def done(self, note: str = "") -> None: ...
    def __enter__(self) -> Stage: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class View(Protocol):
    """A terminal, as the program sees it. An observer too: pass it events, or pass it as one."""

    def stage(self, name: str, total: int | None = None) -> Stage:
        """Begin a piece of work of ``total`` parts (None: nobody knows)."""
        ...

    def __call__(self, event: Event) -> None: ...
    def event(self, event: Event) -> None: ...

    def note(self, text: str) -> None:
        """Say something, now."""
        ...

    def close(self) -> None: ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int | None = None) -> Stage:
        return _SilentStage()

    def __call__(self, event: Event) -> None: ...
    def event(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _SilentStage:
    def __call__(self, n: int = 1, note: str = "") -> None: ...
    def done(self, note: str = "") -> None: ...

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def make_view(kind: Kind, *, stream: TextIO | None = None, parity_tolerance: float = 0.01) -> View:
    """The view of a kind on a stream (standard output); live bars need a terminal and are plain lines elsewhere."""
    if kind == "none":
        return Silent()
    out = sys.stdout if stream is None else stream
    if kind != "plain" and moves(out):
        from miles.observe.live import LiveView

        return LiveView(out, parity_tolerance=parity_tolerance)
    from miles.observe.console import PlainView

    return PlainView(out, parity_tolerance=parity_tolerance)


def moves(stream: TextIO) -> bool:
    """Is the stream a terminal on which a cursor can move up?"""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def speaks_unicode(stream: TextIO) -> bool:
    """Can the stream carry the blocks of a sparkline?"""
    try:
        "▁█●·".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
