"""Reader of wandb's offline files: the log framing of LevelDB around wandb's own protobuf records."""

import struct
from pathlib import Path
from typing import Any

_HEADER = 7  # ":W&B", a magic number and a version
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def read_records(path: Path) -> list[Any]:
    """All records of a file, in order; a chunk's header is a checksum, a length and a type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    records, pending, at = [], b"", _HEADER
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:  # too little room for a header: the rest of the block is padding
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        pending += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            record = Record()
            record.ParseFromString(pending)
            records.append(record)
            pending = b""
        else:
            assert kind in (_FIRST, _MIDDLE), kind
    return records


def read_history(path: Path) -> list[dict[str, str]]:
    """What every call of ``log`` wrote: JSON by name."""
    rows = []
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            rows.append({item.key or "/".join(item.nested_key): item.value_json for item in record.history.item})
    return rows
