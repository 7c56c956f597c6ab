"""Incremental reader of an append-only JSON Lines file: each call returns the records that are new."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_CHECK_BYTES = 64
"""Bytes before the read position that must still be there; otherwise the file was written again."""


class LogTail:
    """Reads a file that grows; a file that was truncated or replaced is read again from its start.

    A last line without its newline is left for the next call. Lines that are no JSON object are counted in
    ``unreadable``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._before = b""
        self.unreadable = 0

    def read_new(self) -> tuple[bool, list[dict[str, Any]]]:
        """Return whether the file starts again (forget earlier records), and the new records."""
        try:
            with self._path.open("rb") as file:
                restarted = not self._is_continued(file.seek(0, 2), self._read_before(file))
                if restarted:
                    self._offset, self._before = 0, b""
                    self.unreadable = 0
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            restarted = self._offset > 0
            self._offset, self._before = 0, b""
            return restarted, []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        self._before = (self._before + data)[-_CHECK_BYTES:]
        return restarted, [record for line in data.splitlines() if (record := self._parse(line)) is not None]

    def _read_before(self, file: Any) -> bytes:
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before))

    def _is_continued(self, size: int, before: bytes) -> bool:
        return size >= self._offset and before == self._before

    def _parse(self, line: bytes) -> dict[str, Any] | None:
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            self.unreadable += 1
            return None
        return record
