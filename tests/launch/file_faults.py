"""File operations of this process that fail on purpose, inside one directory."""

import builtins
import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

ERRORS = (errno.ENOSPC, errno.EACCES, errno.EIO, errno.EROFS, errno.ENOENT, errno.EMFILE)


class FileFaults:
    """Counts the operations on files below ``folder``; the one with number ``fail_at`` fails with ``code``."""

    def __init__(self, folder: Path, fail_at: int = 0, code: int = errno.ENOSPC) -> None:
        self.folder = str(folder)
        self.fail_at = fail_at
        self.code = code
        self.count = 0
        self.failed = ""

    def is_below(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(self.folder)

    def hit(self, operation: str, path: object) -> None:
        self.count += 1
        if self.count == self.fail_at:
            self.failed = f"{operation} {path}"
            named = (str(path),) if operation in ("open", "mkdir", "rename", "replace") else ()
            raise OSError(self.code, os.strerror(self.code), *named)


class _FaultyFile(io.FileIO):
    """A raw file whose writes count as operations."""

    def __init__(self, path: object, mode: str, faults: FileFaults) -> None:
        super().__init__(path, mode)
        self._faults = faults

    def write(self, data) -> int:
        self._faults.hit("write", self.name)
        return super().write(data)

    def truncate(self, size=None) -> int:
        self._faults.hit("truncate", self.name)
        return super().truncate(size)


def _open_faulty(faults: FileFaults, real_open, file, mode="r", buffering=-1, encoding=None, errors=None, *rest, **kw):
    if not faults.is_below(file):
        return real_open(file, mode, buffering, encoding, errors, *rest, **kw)
    faults.hit("open", file)
    if not set(mode) & set("wax+"):
        return real_open(file, mode, buffering, encoding, errors, *rest, **kw)
    raw = _FaultyFile(file, mode.replace("b", "").replace("t", ""), faults)
    if buffering == 0:
        return raw
    buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
    return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors)


def _wrap(faults: FileFaults, name: str, function):
    def operate(path, *args, **kwargs):
        if faults.is_below(path):
            faults.hit(name, path)
        return function(path, *args, **kwargs)

    return operate


def _wrap_fsync(faults: FileFaults, function):
    def sync(handle):
        if faults.is_below(os.readlink(f"/proc/self/fd/{handle}")):
            faults.hit("fsync", handle)
        return function(handle)

    return sync


@contextmanager
def inject(faults: FileFaults) -> Iterator[None]:
    """Count, and fail, what this process does with files below the directory."""
    with pytest.MonkeyPatch.context() as patch:
        opener = partial(_open_faulty, faults, io.open)
        patch.setattr(builtins, "open", opener)
        patch.setattr(io, "open", opener)
        for name in ("mkdir", "rename", "replace", "open"):
            patch.setattr(os, name, _wrap(faults, name, getattr(os, name)))
        patch.setattr(os, "fsync", _wrap_fsync(faults, os.fsync))
        yield
