"""A rank's safetensors files, written by a thread of its own: hashed on the way, forced to disk, and read again."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import BinaryIO

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.core.notes import Written
from miles.models.files import Described, Stored, header_of, stored_tensors
from miles.models.outline import DTYPES
from miles.models.reader import Reader
from miles.models.saving import stored_bytes
from miles.train.snapshot import BOUND, Blocks, Filler


class FileWriter:
    """Files in a ``folder``, one after the other: ``begin``, its tensors in order, ``end``; then ``close``.

    Calls return as soon as what they were given is in memory of the writer's own: at most ``BOUND`` blocks of it where
    ``bounded``. The thread hashes and writes behind; one that is not bounded begins at ``close``, so that it is in
    nobody's way before. Its first error is kept in ``failure``; nothing is written after
    it, what was is removed, and whoever feeds the writer need not know. With ``verify`` every file is read again from
    the disk, and refused where its digest is not that of the bytes in memory.
    """

    def __init__(self, folder: Path, blocks: Blocks, *, bounded: bool, verify: bool) -> None:
        self.files: dict[str, Written] = {}
        self.failure: tuple[str, Exception] | None = None
        self._folder, self._blocks, self._bounded, self._verify = folder, blocks, bounded, verify
        self._filler = Filler(blocks, self._hand, most=BOUND if bounded else None)
        self._jobs: SimpleQueue[tuple[Callable[[], None], Tensor | None] | None] = SimpleQueue()
        self._name, self._size = "", 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._closing: Callable[[FileWriter], None] | None = None
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._thread = Thread(target=self._work, name=f"write {folder.name}", daemon=True)
        if bounded:
            self._thread.start()

    # -- what whoever saves calls -----------------------------------------------------------

    def begin(self, name: str, tensors: Iterable[Described]) -> None:
        """The file ``name``, which will hold ``tensors``."""
        header = header_of(tensors)
        self._jobs.put((lambda: self._open(name), None))
        self._filler.raw(header)

    def tensor(self, tensor: Tensor) -> None:
        """The next tensor of the file."""
        self._filler.tensor(tensor)

    def copy(self, name: str, stored: Stored) -> None:
        """The next tensor of the file, from where it lies."""
        self._filler.flush()
        self._jobs.put((lambda: self._copy(name, stored), None))

    def end(self) -> None:
        """The file has all its tensors."""
        self._filler.flush()
        self._jobs.put((self._finish, None))

    def close(self, last: Callable[[FileWriter], None]) -> None:
        """No more files; when all are written, or one was not, the thread calls ``last``, which must not raise."""
        self._filler.flush()
        self._closing = last
        self._jobs.put(None)
        if not self._bounded:
            self._thread.start()

    def wait(self) -> None:
        """Return when the thread has ended."""
        self._thread.join()

    # -- what the thread does ---------------------------------------------------------------

    def _hand(self, block: Tensor, count: int) -> None:
        self._jobs.put((lambda: self._write(block.numpy()[:count].data), block))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._attempt(*job)
        self._hashing.shutdown()
        if self.failure is not None:
            self._abandon()
        assert self._closing is not None
        self._closing(self)

    def _attempt(self, job: Callable[[], None], block: Tensor | None) -> None:
        try:
            if self.failure is None:
                job()
        except Exception as cause:  # whatever it is, the one who waits for these files must hear of it
            self.failure = self._name, cause
        finally:
            if block is not None:
                self._blocks.give(block)

    def _open(self, name: str) -> None:
        self._name, self._size, self._digest = name, 0, hashlib.sha256()
        path = self._folder / name
        if path.parent != self._folder:
            path.parent.mkdir(exist_ok=True)  # some files lie in a folder of their own
        self._file = path.open("wb", buffering=0)

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        hashed = self._hashing.submit(self._digest.update, data)
        try:
            left = data
            while len(left):
                left = left[self._file.write(left) :]
        finally:
            hashed.result()  # the memory is about to be used again
        self._size += len(data)

    def _copy(self, name: str, stored: Stored) -> None:
        with Reader() as reader:
            for part in stored_bytes(name, stored, reader):
                self._write(part)

    def _finish(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        digest = self._digest.hexdigest()
        if self._verify and digest_on_disk(self._folder / self._name) != digest:
            raise CheckpointError("what was written reads back as something else; the disk or its driver is faulty")
        self.files[self._name] = Written(self._size, digest)

    def _abandon(self) -> None:
        """Remove what was written: where a disk is full, there must be room to say so."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for name in {*self.files, self._name} - {""}:
            with contextlib.suppress(OSError):  # what cannot be removed stays; whoever waits must hear in any case
                (self._folder / name).unlink()


def digest_on_disk(path: Path) -> str:
    """The SHA-256 of a file's bytes as the disk has them, where the system can be asked to forget its own copy."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(folder: Path, lone: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``lone``, or of the files its index names, on the host, one at a time; headers are read first."""
    return _tensors(stored_tensors(folder, lone))


def _tensors(stored: dict[str, Stored]) -> Iterator[tuple[str, Tensor]]:
    with Reader() as reader:
        for name, place in stored.items():
            flat = torch.empty(place.stop - place.start, dtype=torch.uint8)
            reader.read(name, place.file, place.start, flat.numpy().data)
            yield name, flat.view(DTYPES[place.dtype]).view(place.shape)
