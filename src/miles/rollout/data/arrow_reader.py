"""Parquet and Arrow reader: rows batch by batch; only the requested columns become Python objects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from miles.core.errors import DataError
from miles.rollout.data.schema import Columns, DataRow, OnBadRow

_BATCH = 1024
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
Read = Callable[[Any], Any]


def count_parquet_rows(file: Path) -> int:
    """Number of rows of a Parquet file, from its footer."""
    with _data_errors(file, "Parquet"), pq.ParquetFile(file) as opened:
        return opened.metadata.num_rows


def read_parquet_rows(
    file: Path, columns: Columns | None, first: int, selected: range, on_bad_row: OnBadRow
) -> Iterator[DataRow]:
    """The rows of ``file`` whose index, counted from ``first``, is in ``selected``; other row groups stay on disk."""
    with _data_errors(file, "Parquet"):
        opened = pq.ParquetFile(file)
    with opened:
        found = tuple(opened.schema_arrow.names)
        names = list(_select_columns(file, found, columns))
        file_start = first
        for number in range(opened.metadata.num_row_groups):
            size = opened.metadata.row_group(number).num_rows
            if max(first, selected.start) < min(first + size, selected.stop):
                at = first
                for batch in _group_batches(file, opened, number, names):
                    yield from _batch_rows(file, batch, found, file_start, at, selected, on_bad_row)
                    at += batch.num_rows
            first += size


def _group_batches(file: Path, opened: pq.ParquetFile, number: int, names: list[str]) -> Iterator[pa.RecordBatch]:
    with _data_errors(file, "Parquet"):
        batches = opened.iter_batches(batch_size=_BATCH, row_groups=[number], columns=names)
    while True:
        with _data_errors(file, "Parquet"):
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def count_arrow_rows(file: Path) -> int:
    """Number of rows of an Arrow file."""
    return sum(batch.num_rows for batch in _arrow_batches(file, _arrow_schema(file).names[:1]))


def read_arrow_rows(
    file: Path, columns: Columns | None, first: int, selected: range, on_bad_row: OnBadRow
) -> Iterator[DataRow]:
    """The rows of an Arrow file, in stream or file format, whose index from ``first`` is in ``selected``."""
    found = tuple(_arrow_schema(file).names)
    file_start = first
    for batch in _arrow_batches(file, _select_columns(file, found, columns)):
        if first >= selected.stop:
            return
        yield from _batch_rows(file, batch, found, file_start, first, selected, on_bad_row)
        first += batch.num_rows


def _arrow_schema(file: Path) -> pa.Schema:
    with _data_errors(file, "Arrow"), _open_mapped(file) as source:
        return _open(source, None).schema


def _arrow_batches(file: Path, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Memory-mapped batches of the named columns; a truncated file is an error."""
    with _data_errors(file, "Arrow"):
        source = _open_mapped(file)
    with source:
        with _data_errors(file, "Arrow"):
            whole = _open(source, None).schema
            source.seek(0)
            reader = _open(source, [whole.names.index(name) for name in names])
        if isinstance(reader, pa.RecordBatchStreamReader):
            _check_end_marker(file)
        for number in range(_max_batches(reader)):
            with _data_errors(file, "Arrow"):
                try:
                    batch = _read_batch(reader, number)
                except StopIteration:
                    return
            yield batch.select(list(names))


def _open(source: pa.NativeFile, fields: list[int] | None) -> pa.RecordBatchStreamReader | pa.RecordBatchFileReader:
    options = pa.ipc.IpcReadOptions(included_fields=fields) if fields else pa.ipc.IpcReadOptions()
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    return pa.ipc.open_file(source, options=options) if is_file else pa.ipc.open_stream(source, options=options)


def _max_batches(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader) -> int:
    """An upper bound; a stream's length is known only at its end."""
    return reader.num_record_batches if isinstance(reader, pa.RecordBatchFileReader) else 1 << 62


def _read_batch(reader: pa.RecordBatchStreamReader | pa.RecordBatchFileReader, number: int) -> pa.RecordBatch:
    return reader.get_batch(number) if isinstance(reader, pa.RecordBatchFileReader) else reader.read_next_batch()


def _open_mapped(file: Path) -> pa.NativeFile:
    if not file.stat().st_size:
        raise DataError(f"{file} is empty; write it again.")
    return pa.memory_map(str(file))


def _check_end_marker(file: Path) -> None:
    """Check for the end-of-stream marker: a stream truncated between two batches reads as a shorter one."""
    with file.open("rb") as stream:
        stream.seek(-min(file.stat().st_size, len(_END_OF_STREAM)), 2)
        if stream.read() != _END_OF_STREAM:
            raise DataError(f"{file} is truncated: the end-of-stream marker of Arrow is missing; copy it again.")


@contextmanager
def _data_errors(file: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{file} cannot be read as {kind} ({reason}).") from error


def _select_columns(file: Path, found: Sequence[str], columns: Columns | None) -> Sequence[str]:
    """The columns to read; a missing required column is an error of the file, not of a row."""
    if columns is None:
        return found
    for key, flag in columns.required_columns:
        if key not in found:
            raise columns.missing_column(str(file), key, flag, found)
    return [name for name in found if name in columns.names]


def _batch_rows(
    file: Path,
    batch: pa.RecordBatch,
    found: tuple[str, ...],
    file_start: int,
    first: int,
    selected: range,
    on_bad_row: OnBadRow,
) -> Iterator[DataRow]:
    """The selected rows of a batch whose first row is ``first``, in a file whose first row is ``file_start``."""
    start, stop = max(first, selected.start), min(first + batch.num_rows, selected.stop)
    if start >= stop:
        return
    part = batch.slice(start - first, stop - start)
    readers = {field.name: read for field in batch.schema if (read := _converter(field.type)) is not None}
    for index, record in zip(range(start, stop), _records(part), strict=True):
        where = f"{file}, row {index - file_start + 1}"
        if isinstance(record, Exception):
            on_bad_row(DataError(f"{where}: this row cannot be read ({record})."))
            continue
        try:
            read = {name: readers[name](value) if name in readers else value for name, value in record.items()}
        except ValueError as error:
            on_bad_row(DataError(f"{where}: a JSON column holds invalid JSON ({error})."))
            continue
        yield DataRow(index, where, read, found, file.parent)


def _records(batch: pa.RecordBatch) -> list[dict[str, Any] | Exception]:
    """Every row as a dictionary; one that cannot be converted (invalid text) is an exception instead."""
    try:
        return list(batch.to_pylist())
    except (ValueError, pa.ArrowException) as error:
        if batch.num_rows == 1:
            return [error]
        return [record for i in range(batch.num_rows) for record in _records(batch.slice(i, 1))]


def _converter(kind: pa.DataType) -> Read | None:
    """A converter of values of this type where Arrow returns JSON text; None where none is needed."""
    if isinstance(kind, pa.BaseExtensionType):
        return _parse_json if kind.extension_name == "arrow.json" else None
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _converter(kind.value_type)
        return None if inner is None else _convert_list(inner)
    if pa.types.is_struct(kind):
        fields = {field.name: read for field in kind if (read := _converter(field.type)) is not None}
        return _convert_struct(fields) if fields else None
    return None


def _parse_json(value: str | None) -> Any:
    return None if value is None else json.loads(value)


def _convert_list(read: Read) -> Read:
    return lambda values: None if values is None else [read(value) for value in values]


def _convert_struct(reads: dict[str, Read]) -> Read:
    def read_all(record: dict[str, Any] | None) -> dict[str, Any] | None:
        if record is None:
            return None
        return {name: reads[name](value) if name in reads else value for name, value in record.items()}

    return read_all
