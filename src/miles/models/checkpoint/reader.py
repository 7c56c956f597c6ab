"""File reader: pread of byte ranges into existing buffers. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from types import TracebackType

from miles.core.errors import CheckpointError


class FileReader:
    """Opens each file at its first read and closes all together. Threads may share one.

    Files are not memory-mapped: mapped pages would count as this process's memory for as long as they are cached.
    """

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._lock = Lock()
        self.bytes_read = 0

    def __enter__(self) -> FileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, name: str, file: Path, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on; ``name`` is the tensor that errors mention."""
        done = 0
        try:
            descriptor = self._file_descriptor(file)
            while done < len(into):
                count = os.preadv(descriptor, [into[done:]], start + done)
                if count == 0:
                    break
                done += count
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read from {file} ({error}).") from error
        if done < len(into):
            raise CheckpointError(f"{name} cannot be read from {file}: it ends at byte {start + done}; copy it again.")
        with self._lock:
            self.bytes_read += done

    def _file_descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._files:
                self._files[file] = os.open(file, os.O_RDONLY)
            return self._files[file]
