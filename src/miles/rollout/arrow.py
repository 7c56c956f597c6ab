"""Rows of Parquet and Arrow files, a batch at a time: only the columns asked for ever become Python objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles.core.errors import DataError
from miles.rollout.rows import Bad, Columns, Row

_BATCH = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
Read = Callable[[Any], Any]


def parquet_count(file: Path) -> int:
    """How many rows a Parquet file holds, from its footer."""
    with _told(file, "Parquet"), pq.ParquetFile(file) as opened:
        return opened.metadata.num_rows


def parquet_rows(file: Path, columns: Columns | None, first: int, chosen: range, bad: Bad) -> Iterator[Row]:
    """The rows of ``file`` whose index, counted from ``first``, is in ``chosen``; other row groups stay on disk."""
    with _told(file, "Parquet"):
        opened = pq.ParquetFile(file)
    with opened:
        found = tuple(opened.schema_arrow.names)
        names = list(_wanted(file, found, columns))
        zero = first
        for number in range(opened.metadata.num_row_groups):
            size = opened.metadata.row_group(number).num_rows
            if max(first, chosen.start) < min(first + size, chosen.stop):
                at = first
                for batch in _group_batches(file, opened, number, names):
                    yield from _batch_rows(file, batch, found, zero, at, chosen, bad)
                    at += batch.num_rows
            first += size


def _group_batches(file: Path, opened: pq.ParquetFile, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _told(file, "Parquet"):
        batches = opened.iter_batches(batch_size=_BATCH, row_groups=[number], columns=names)
    while True:
        with _told(file, "Parquet"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def arrow_count(file: Path) -> int:
    """How many rows an Arrow file holds."""
    return sum(batch.num_rows for batch in _arrow_batches(file, _arrow_schema(file).names[:1]))


def arrow_rows(file: Path, columns: Columns | None, first: int, chosen: range, bad: Bad) -> Iterator[Row]:
    """The rows of an Arrow file, in the stream or the file format, whose index from ``first`` is in ``chosen``."""
    found = tuple(_arrow_schema(file).names)
    zero = first
    for batch in _arrow_batches(file, _wanted(file, found, columns)):
        if first >= chosen.stop:
            return
        yield from _batch_rows(file, batch, found, zero, first, chosen, bad)
        first += batch.num_rows


def _arrow_schema(file: Path) -> pa.Schema:
    with _told(file, "Arrow"), _mapped(file) as source:
        return _open(source, None).schema


def _arrow_batches(file: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Memory-mapped batches of the named columns; a file that ends before it says so is refused."""
    with _told(file, "Arrow"):
        source = _mapped(file)
    with source:
        with _told(file, "Arrow"):
            whole = _open(source, None).schema
            source.seek(0)
            reader = _open(source, [whole.names.index(name) for name in names])
        if isinstance(reader, pa.RecordBatchStreamReader):
            _check_end(file)
        for number in range(_batches(reader)):
            with _told(file, "Arrow"):
                try:
                    batch = _next(reader, number)
                except StopIteration:
                    return
            yield batch.select(list(names))


def _open(source: pa.NativeFile, fields: list[int] | None) -> pa.RecordBatchStreamReader | pa.RecordBatchFileReader:
    options = pa.ipc.IpcReadOptions(included_fields=fields) if fields else pa.ipc.IpcReadOptions()
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source, options=options) if is_file else pa.ipc.open_stream(source, options=options)


def _batches(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader) -> int:
    """A bound; a stream says where it ends only when it is there."""
    return reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else 1 << 62


def _next(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader, number: int) -> pa.RecordBatch:
    return reader.get_batch(number) if isinstance(reader, pa.RecordBatchFileReader) else reader.read_next_batch()


def _mapped(file: Path) -> pa.NativeFile:
    if not file.stat().st_size:
        raise DataError(f"{file} is empty; write it again.")
    return pa.memory_map(str(file))


def _check_end(file: Path) -> None:
    """A stream cut between two batches reads as a shorter one, so its closing mark is looked for."""
    with file.open("rb") as stream:
        stream.seek(-min(file.stat().st_size, len(_END_OF_STREAM)), 2)
        if stream.read() != _END_OF_STREAM:
            raise DataError(f"{file} is cut short: the mark that ends an Arrow stream is missing; copy it again.")


@contextmanager
def _told(file: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file} cannot be read as {kind} ({reason}).") from error


def _wanted(file: Path, found: Sequence[str], columns: Columns | None) -> Sequence[str]:
    """The columns to read; one that must be there and is not is the file's fault, not a row's."""
    if columns is None:
        return found
    for key, flag in columns.required:
        if key not in found:
            raise columns.missing(str(file), key, flag, found)
    return [name for name in found if name in columns.names]


def _batch_rows(
    file: Path, batch: pa.RecordBatch, found: tuple[str, ...], zero: int, first: int, chosen: range, bad: Bad
) -> Iterator[Row]:
    """The chosen rows of a batch whose first row is ``first`` and whose file's first row is ``zero``."""
    start, stop = max(first, chosen.start), min(first + batch.num_rows, chosen.stop)
    if start >= stop:
        return
    part = batch.slice(start - first, stop - start)
    readers = {field.name: read for field in batch.schema if (read := _reader(field.type)) is not None}
    for index, record in zip(range(start, stop), _records(part), strict=True):
        where = f"{file}, row {index - zero + 1}"
        if isinstance(record, Exception):
            bad(DataError(f"{where}: this row cannot be read ({record})."))
            continue
        try:
            read = {name: readers[name](value) if name in readers else value for name, value in record.items()}
        except ValueError as error:
            bad(DataError(f"{where}: a JSON column holds no JSON ({error})."))
            continue
        yield Row(index, where, read, found)


def _records(batch: pa.RecordBatch) -> list[dict[str, Any] | Exception]:
    """Every row as a dictionary; when one cannot be made (broken text), it alone is an error."""
    try:
        return list(batch.to_pylist())
    except (ValueError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            return [error]
        return [record for i in range(batch.num_rows) for record in _records(batch.slice(i, 1))]


def _reader(kind: pa.DataType) -> Read | None:
    """What turns a value of this type into plain objects where Arrow gives JSON text; None where nothing is to do."""
    if isinstance(kind, pa.BaseExtensionType):
        return _json if kind.extension_name == "arrow.json" else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _reader(kind.value_type)
        return None if inner is None else _each(inner)
    if pa.types.is_struct(kind):
        fields = {field.name: read for field in kind if (read := _reader(field.type)) is not None}
        return _fields(fields) if fields else None
    return None


def _json(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def _each(read: Read) -> Read:
    return lambda values: None if values is None else [read(value) for value in values]


def _fields(reads: dict[str, Read]) -> Read:
    def read_all(record: dict[str, Any] | None) -> dict[str, Any] | None:
        if record is None:
            return None
        return {name: reads[name](value) if name in reads else value for name, value in record.items()}

    return read_all
