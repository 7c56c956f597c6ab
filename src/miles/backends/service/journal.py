"""Journal: append-only records on disk, each durable (fsync) before it is acknowledged.

A record is a JSON header and bytes. On disk it has a checksum; a record that a crash cut off, and whatever follows it,
is dropped when the journal is opened, as it was never acknowledged. Several records that wait are written with one
fsync (group commit).

Who waits for whom: ``append`` waits for the writer thread, which takes all records that wait, writes them, and calls
fsync once; the event loop goes on meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from miles.core.errors import MilesError

__all__ = ["Record", "RequestJournal", "read_records"]

_HEAD = struct.Struct("<IIII")
_MAGIC = 0x4D4C4A31


@dataclass(frozen=True, slots=True)
class Record:
    """One entry: its kind, what it says, and bytes that belong to it."""

    kind: str
    content: Mapping[str, Any] = field(default_factory=dict)
    body: bytes = b""


def encode_record(record: Record) -> bytes:
    """Return a record as it is on disk."""
    header = json.dumps([record.kind, record.content], separators=(",", ":")).encode()
    checksum = zlib.crc32(record.body, zlib.crc32(header))
    return _HEAD.pack(_MAGIC, len(header), len(record.body), checksum) + header + record.body


def read_records(file: Path) -> Iterator[tuple[Record, int]]:
    """Yield the complete records of a file, each with the position behind it."""
    with file.open("rb") as opened:
        position = 0
        while len(head := opened.read(_HEAD.size)) == _HEAD.size:
            magic, header_size, body_size, checksum = _HEAD.unpack(head)
            if magic != _MAGIC:
                return
            header, body = opened.read(header_size), opened.read(body_size)
            if len(body) != body_size or zlib.crc32(body, zlib.crc32(header)) != checksum:
                return
            kind, content = json.loads(header)
            position += _HEAD.size + header_size + body_size
            yield Record(kind, content, body), position


class RequestJournal:
    """The journal in a folder: one file, which ``rewrite`` replaces by a shorter one of the same meaning."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / "journal.bin"
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._opened: BinaryIO | None = None
        self.error: BaseException | None = None
        self.size = 0

    def open(self) -> list[Record]:
        """Return all records, drop what was cut off behind them, and take new ones from now on."""
        records: list[Record] = []
        end = 0
        if self._file.exists():
            for record, position in read_records(self._file):
                records.append(record)
                end = position
        self._opened = self._file.open("ab")
        self._opened.truncate(end)
        self._opened.seek(end)
        os.fsync(self._opened.fileno())
        _sync_parent(self._file)
        self.size = end
        return records

    async def append(self, *records: Record) -> None:
        """Make records durable, in this order; returns when they are."""
        assert self._opened is not None, "the journal is not open"
        if self.error is not None:
            raise MilesError(f"the journal {self._file} cannot be written: {self.error}")
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((b"".join(map(encode_record, records)), done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_waiting())
        await asyncio.shield(done)

    async def _write_waiting(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                try:
                    await loop.run_in_executor(self._thread, self._write, b"".join(data for data, _ in batch))
                except OSError as error:
                    self.error = error
                for _, done in batch:
                    if self.error is None:
                        done.set_result(None)
                    else:
                        done.set_exception(MilesError(f"the journal {self._file} cannot be written: {self.error}"))
        finally:
            self._writer = None

    def _write(self, data: bytes) -> None:
        assert self._opened is not None
        self._opened.write(data)
        self._opened.flush()
        os.fsync(self._opened.fileno())
        self.size += len(data)

    async def rewrite(self, records: Iterable[Record]) -> None:
        """Replace everything by these records; a crash leaves the old or the new ones. Nothing may be appended now."""
        while self._writer is not None:
            await self._writer
        data = b"".join(map(encode_record, records))
        await asyncio.get_running_loop().run_in_executor(self._thread, self._replace, data)

    def _replace(self, data: bytes) -> None:
        assert self._opened is not None
        temporary = self._file.with_suffix(".tmp")
        with temporary.open("wb") as opened:
            opened.write(data)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(temporary, self._file)
        _sync_parent(self._file)
        self._opened.close()
        self._opened = self._file.open("ab")
        self.size = len(data)

    def close(self) -> None:
        """Release the file."""
        self._thread.shutdown(wait=True)
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _sync_parent(file: Path) -> None:
    descriptor = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
