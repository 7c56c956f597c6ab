"""Protocols of terminal views and progress stages, and the view that shows nothing."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Literal, Protocol, TextIO

from miles.core.events import Event

ViewKind = Literal["auto", "live", "plain", "none"]


class ProgressStage(Protocol):
    """Progress of a piece of work. Call it as work gets done; it finishes at its total, or on ``finish``."""

    def __call__(self, n: int = 1, note: str = "") -> None: ...
    def finish(self, note: str = "") -> None: ...
    def __enter__(self) -> ProgressStage: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class View(Protocol):
    """A terminal view. It is also an observer of events."""

    def stage(self, name: str, total: int | None = None) -> ProgressStage:
        """Start a piece of work of ``total`` parts (None: unknown)."""
        ...

    def __call__(self, event: Event) -> None: ...
    def event(self, event: Event) -> None: ...

    def note(self, text: str) -> None:
        """Print a line."""
        ...

    def close(self) -> None: ...


class NullView:
    """A view that shows nothing."""

    def stage(self, name: str, total: int | None = None) -> ProgressStage:
        return _NullStage()

    def __call__(self, event: Event) -> None: ...
    def event(self, event: Event) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class _NullStage:
    def __call__(self, n: int = 1, note: str = "") -> None: ...
    def finish(self, note: str = "") -> None: ...

    def __enter__(self) -> ProgressStage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def supports_cursor(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with cursor movement."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def supports_unicode(stream: TextIO) -> bool:
    """Return whether the stream can encode the block characters of a sparkline."""
    try:
        "▁█●·".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
