"""Event bus: the observer that forwards events to the journal, the durable sinks and the views, in this order."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from miles.core.errors import storage_errors
from miles.core.events import Event
from miles.core.protocols import Journal, Observer


class DurableSink(Protocol):
    """A sink whose data must not be lost: commits wait for it, and its errors stop the run."""

    def __call__(self, event: Event) -> None: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class ClosableJournal(Journal, Protocol):
    """A journal that can be closed."""

    def close(self) -> None: ...


class EventBus:
    """The loop's journal. Errors of journal and sinks propagate; a failing view is reported once and removed.

    Journal and sinks write files in ``folder``; an operation there that fails is a StorageError.
    """

    def __init__(
        self,
        journal: ClosableJournal,
        *,
        folder: Path = Path(),
        sinks: Sequence[DurableSink] = (),
        views: Sequence[Observer] = (),
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._journal = journal
        self._folder = folder
        self._sinks = tuple(sinks)
        self._views = list(views)
        self._report = _write_stderr if report is None else report

    def __call__(self, event: Event) -> None:
        with storage_errors(self._folder):
            self._journal(event)
            for sink in self._sinks:
                sink(event)
        for view in tuple(self._views):
            try:
                view(event)
            except Exception as error:  # a display error must not stop the run
                self._views.remove(view)
                self._report_safely(f"{type(view).__name__} failed and was removed ({error!r}); the run continues.")

    def commit(self) -> None:
        """Return when all events so far are on disk."""
        with storage_errors(self._folder):
            for sink in self._sinks:
                sink.commit()
            self._journal.commit()

    def offsets(self) -> Mapping[str, int]:
        """Return the journal's log offsets, for the checkpoint."""
        return self._journal.offsets()

    def close(self) -> None:
        """Close the sinks and the journal, all of them even if one fails; views are closed by their owner."""
        errors: list[Exception] = []
        for sink in (*self._sinks, self._journal):
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        with storage_errors(self._folder):
            if errors:
                raise errors[0]

    def _report_safely(self, text: str) -> None:
        """Report on stderr if reporting through a view fails."""
        try:
            self._report(text)
        except Exception:
            with contextlib.suppress(OSError):
                _write_stderr(text)


def _write_stderr(text: str) -> None:
    sys.stderr.write(text + "\n")
