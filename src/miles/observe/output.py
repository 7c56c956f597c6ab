"""Console output that never fails: what cannot be written is dropped, and the program continues."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

# A full disk, a lost terminal, a reader that is gone; ValueError is what a closed stream raises.
_OUTPUT_ERRORS = (OSError, ValueError)


class LossyStream:
    """A text stream over ``inner`` whose errors are swallowed; None drops everything, as after ``>&-``."""

    def __init__(self, inner: TextIO | None) -> None:
        self._inner = inner
        self.encoding = getattr(inner, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        with suppress(*_OUTPUT_ERRORS):
            if self._inner is not None:
                self._inner.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(*_OUTPUT_ERRORS):
            if self._inner is not None:
                self._inner.flush()

    def isatty(self) -> bool:
        with suppress(*_OUTPUT_ERRORS):
            return self._inner is not None and self._inner.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@contextmanager
def drop_output_errors() -> Iterator[None]:
    """Replace standard output and error by streams that never raise."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, LossyStream(out)), cast(TextIO, LossyStream(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
        for stream in (out, err):
            discard_if_lost(stream)


def print_error(text: str) -> None:
    """Write a line to standard error, if that is possible."""
    stream = LossyStream(sys.stderr)
    stream.write(text + "\n")
    stream.flush()


def is_reader_gone(stream: TextIO | None) -> bool:
    """Whether ``stream`` is a pipe that nobody reads any more, as in ``miles plan ... | head``."""
    try:
        descriptor = -1 if stream is None else stream.fileno()
    except _OUTPUT_ERRORS:
        return False
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return any(found & (select.POLLERR | select.POLLHUP) for _, found in poll.poll(0))


def discard_if_lost(stream: TextIO | None) -> None:
    """Flush; a stream that cannot be written is connected to the null device, since Python flushes it again at exit."""
    if stream is None:
        return
    try:
        stream.flush()
    except _OUTPUT_ERRORS:
        with suppress(*_OUTPUT_ERRORS):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)
