"""One observer that tells the others: what must be kept first, what is only shown last."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from miles.core.events import Event
from miles.core.protocols import Journal, Observer


class Keeper(Protocol):
    """A sink whose loss would be a loss: it is waited for at commits and its errors end the run."""

    def __call__(self, event: Event) -> None: ...
    def commit(self) -> None: ...
    def close(self) -> None: ...


class KeptJournal(Journal, Protocol):
    """A journal that can be closed."""

    def close(self) -> None: ...


class Fanout:
    """The loop's journal. Errors of the journal and the keepers propagate; a view that fails is dropped, once said."""

    def __init__(
        self,
        journal: KeptJournal,
        *,
        keepers: Sequence[Keeper] = (),
        views: Sequence[Observer] = (),
        report: Callable[[str], None] | None = None,
    ) -> None:
        self._journal = journal
        self._keepers = tuple(keepers)
        self._views = list(views)
        self._report = _complain if report is None else report

    def __call__(self, event: Event) -> None:
        self._journal(event)
        for keeper in self._keepers:
            keeper(event)
        for view in tuple(self._views):
            try:
                view(event)
            except Exception as error:  # a run must not end because it could not be drawn
                self._views.remove(view)
                self._tell(f"{type(view).__name__} failed and is told no more ({error!r}); the run goes on.")

    def commit(self) -> None:
        """Return when everything told so far is on the disk."""
        for keeper in self._keepers:
            keeper.commit()
        self._journal.commit()

    def marks(self) -> Mapping[str, int]:
        """The journal's marks, for the checkpoint."""
        return self._journal.marks()

    def close(self) -> None:
        """Close the keepers and the journal, all of them even if one fails; views belong to who made them."""
        errors: list[Exception] = []
        for sink in (*self._keepers, self._journal):
            try:
                sink.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _tell(self, text: str) -> None:
        """Report, even when the way to report is the view that failed."""
        try:
            self._report(text)
        except Exception:
            with contextlib.suppress(OSError):
                _complain(text)


def _complain(text: str) -> None:
    sys.stderr.write(text + "\n")
