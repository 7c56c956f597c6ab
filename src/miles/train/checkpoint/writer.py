"""Writer of a rank's safetensors files in a background thread: hashed, fsynced and read back."""

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
from miles.core.markers import FileDigest
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor, TensorHeader, encode_header, stored_tensors
from miles.models.checkpoint.save import read_stored_bytes
from miles.models.checkpoint.save_plan import DTYPES
from miles.train.checkpoint.staging import MAX_BLOCKS, StagingPool, StagingWriter


class ShardWriter:
    """Writes files of a ``folder``, one after the other: ``begin``, its tensors in order, ``end``; then ``close``.

    Calls return as soon as their data is in staging memory: at most ``MAX_BLOCKS`` blocks if
    ``bounded``. A thread hashes and writes; an unbounded one starts at ``close``, so that it does not compete with
    training before. Its first error is kept in ``failure``; after it nothing more is written
    and written files are removed. With ``verify`` every file is read back from
    disk, and its digest is compared with that of the bytes in memory.
    """

    def __init__(self, folder: Path, pool: StagingPool, *, bounded: bool, verify: bool) -> None:
        self.files: dict[str, FileDigest] = {}
        self.failure: tuple[str, Exception] | None = None
        self._folder = folder
        self._pool = pool
        self._bounded = bounded
        self._verify = verify
        self._staging = StagingWriter(pool, self._enqueue_block, limit=MAX_BLOCKS if bounded else None)
        self._jobs: SimpleQueue[tuple[Callable[[], None], Tensor | None] | None] = SimpleQueue()
        self._name = ""
        self._size = 0
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._on_close: Callable[[ShardWriter], None] | None = None
        self._hash_pool = ThreadPoolExecutor(1, thread_name_prefix="hash")
        self._thread = Thread(target=self._run, name=f"write {folder.name}", daemon=True)
        if bounded:
            self._thread.start()

    # -- called by the saving thread ----------------------------------------------------------

    def run(self, name: str, write: Callable[[], None]) -> None:
        """Let the thread call ``write``, which writes files of its own, called ``name`` if it fails."""

        def job() -> None:
            self._name = name
            write()

        self._jobs.put((job, None))

    def begin(self, name: str, tensors: Iterable[TensorHeader]) -> None:
        """Start the file ``name`` with the header of ``tensors``."""
        header = encode_header(tensors)
        self._jobs.put((lambda: self._open(name), None))
        self._staging.write_bytes(header)

    def tensor(self, tensor: Tensor) -> None:
        """Write the next tensor of the file."""
        self._staging.write_tensor(tensor)

    def copy(self, name: str, stored: StoredTensor) -> None:
        """Copy the next tensor of the file from another file."""
        self._staging.flush()
        self._jobs.put((lambda: self._copy(name, stored), None))

    def end(self) -> None:
        """Finish the file."""
        self._staging.flush()
        self._jobs.put((self._finish, None))

    def close(self, on_close: Callable[[ShardWriter], None]) -> None:
        """Finish; when all files are written or one failed, the thread calls ``on_close``, which must not raise."""
        self._staging.flush()
        self._on_close = on_close
        self._jobs.put(None)
        if not self._bounded:
            self._thread.start()

    def wait(self) -> None:
        """Return when the thread has ended."""
        self._thread.join()

    # -- run by the writer thread ---------------------------------------------------------------

    def _enqueue_block(self, block: Tensor, count: int) -> None:
        self._jobs.put((lambda: self._write(block.numpy()[:count].data), block))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._run_job(*job)
        self._hash_pool.shutdown()
        if self.failure is not None:
            self._abandon()
        assert self._on_close is not None
        self._on_close(self)

    def _run_job(self, job: Callable[[], None], block: Tensor | None) -> None:
        try:
            if self.failure is None:
                job()
        except Exception as cause:  # any error must be reported to whoever waits for the files
            self.failure = self._name, cause
        finally:
            if block is not None:
                self._pool.put_back(block)

    def _open(self, name: str) -> None:
        self._name = name
        self._size = 0
        self._digest = hashlib.sha256()
        path = self._folder / name
        if path.parent != self._folder:
            path.parent.mkdir(exist_ok=True)  # some files are in a subfolder
        self._file = path.open("wb", buffering=0)

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        hashed = self._hash_pool.submit(self._digest.update, data)
        try:
            remaining = data
            while len(remaining):
                remaining = remaining[self._file.write(remaining) :]
        finally:
            hashed.result()  # the block is about to be reused
        self._size += len(data)

    def _copy(self, name: str, stored: StoredTensor) -> None:
        with FileReader() as reader:
            for part in read_stored_bytes(name, stored, reader):
                self._write(part)

    def _finish(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        digest = self._digest.hexdigest()
        if self._verify and hash_file_on_disk(self._folder / self._name) != digest:
            raise CheckpointError(
                "the file reads back differently from what was written; the disk or its driver is faulty"
            )
        self.files[self._name] = FileDigest(self._size, digest)

    def _abandon(self) -> None:
        """Remove what was written, so that a full disk has space for the failure marker."""
        if self._file is not None:
            self._file.close()
            self._file = None
        for name in {*self.files, self._name} - {""}:
            with contextlib.suppress(OSError):  # a file that cannot be removed stays; the failure is reported anyway
                (self._folder / name).unlink()


def hash_file_on_disk(path: Path) -> str:
    """Return the SHA-256 of a file as read from disk, bypassing the page cache where possible."""
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_tensors(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of the file ``name``, or of its shards, on the host, one at a time; headers are read first."""
    return _iter_tensors(stored_tensors(folder, name))


def _iter_tensors(stored: dict[str, StoredTensor]) -> Iterator[tuple[str, Tensor]]:
    with FileReader() as reader:
        for name, place in stored.items():
            flat = torch.empty(place.stop - place.start, dtype=torch.uint8)
            reader.read(name, place.file, place.start, flat.numpy().data)
            yield name, flat.view(DTYPES[place.dtype]).view(place.shape)
