"""Megatron's names of a run's checkpoints: ``iter_0000020`` and ``latest_checkpointed_iteration.txt``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from miles.core.events import Event, Saved


class IterationTracker:
    """After every save, links ``iter_NNNNNNN`` in the run directory to the checkpoint, and names the newest.

    ``format_name`` returns the name of the link, ``write_newest`` writes the tracker file. Links to checkpoints that
    were deleted are removed.
    """

    def __init__(
        self, run_dir: Path, format_name: Callable[[int], str], write_newest: Callable[[Path, str], None]
    ) -> None:
        self._run_dir = run_dir
        self._format_name = format_name
        self._write_newest = write_newest

    def __call__(self, event: Event) -> None:
        if not isinstance(event, Saved):
            return
        link = self._run_dir / self._format_name(event.step)
        part = link.with_name(f".{link.name}.part")
        part.unlink(missing_ok=True)
        part.symlink_to(Path("checkpoints") / event.name, target_is_directory=True)
        os.replace(part, link)
        self._write_newest(self._run_dir, str(event.step))
        for other in self._run_dir.glob("iter_*"):
            if other.is_symlink() and not other.exists():
                other.unlink()

    def commit(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is open."""
