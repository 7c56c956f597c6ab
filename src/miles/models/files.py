"""A checkpoint folder as files: its config, where each tensor lies, and writing without ever leaving half a file."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from miles.core.errors import CheckpointError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

# What a checkpoint carries beside config and weights, and an export takes over from the model it came from.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


# Bytes of a value, by safetensors' name of the format.
ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor on disk: bytes ``start`` to ``stop`` of its file; ``dtype`` is safetensors' name for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist: a checkpoint folder needs it.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): copy the checkpoint again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object: copy the checkpoint again.")
    return value


def read_config(folder: Path | str) -> dict[str, Any]:
    """``config.json``, with ``eos_token_id`` from ``generation_config.json`` where that has one (it is the fuller)."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: a checkpoint is a local folder with config.json in it.")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        ends = read_json(generation).get("eos_token_id")
        if ends is not None:
            config["eos_token_id"] = ends
    return config


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """The dtype a config names (``dtype``, or ``torch_dtype`` in older ones), if any; or its text model's."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None and isinstance(text := config.get("text_config"), Mapping):
        return dtype_of(text)
    return None if named is None else str(named).removeprefix("torch.")


def index_of(lone: str) -> str:
    """The file that says where each tensor lies, when one file does not hold them all.

    >>> index_of("model.safetensors")
    'model.safetensors.index.json'
    """
    return f"{lone}.index.json"


def shard_of(lone: str, number: int, count: int) -> str:
    """What the ``number``-th of ``count`` files is called that take the place of ``lone``.

    >>> shard_of("model.safetensors", 0, 1), shard_of("model.safetensors", 1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    stem, _, kind = lone.rpartition(".")
    return lone if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{kind}"


def stored_tensors(folder: Path | str, lone: str = WEIGHTS) -> dict[str, Stored]:
    """Every tensor of a checkpoint by its name; reads headers only, and refuses missing or truncated files.

    They lie in the file ``lone``, or in those its index names.
    """
    folder, listed = Path(folder), index_of(lone)
    if (folder / lone).exists():
        return _header(folder / lone)
    if not (folder / listed).exists():
        raise CheckpointError(f"{folder} holds neither {lone} nor {listed}: save the model as safetensors.")
    index = read_json(folder / listed).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / listed} has no weight_map: copy the checkpoint again.")
    headers: dict[str, dict[str, Stored]] = {}
    for name in sorted(set(index.values())):
        if not (folder / name).exists():
            first = min(tensor for tensor, file in index.items() if file == name)
            raise CheckpointError(f"{folder / name} is missing: {listed} says {first} is in it.")
        headers[name] = _header(folder / name)
    for tensor, name in index.items():
        if tensor not in headers[name]:
            raise CheckpointError(f"{folder / name} does not hold {tensor}, though {listed} says so.")
    found = {tensor: stored for header in headers.values() for tensor, stored in header.items()}
    return found | {tensor: headers[name][tensor] for tensor, name in index.items()}


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header; copy it again.")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            table = {name: _stored(path, entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has no safetensors header ({error}); copy it again.") from error
    for name, stored in sorted(table.items(), key=lambda item: item[1].stop):
        if stored.stop > size:
            raise CheckpointError(
                f"{path} is truncated: {name} should end at byte {stored.stop}, but the file has {size}."
            )
        if not _fits(stored):
            raise CheckpointError(
                f"{name} in {path} has {stored.stop - stored.start} bytes, which is not what shape {stored.shape} in "
                f"{stored.dtype} takes; copy the file again."
            )
    return table


def _stored(path: Path, entry: Mapping[str, Any], base: int) -> Stored:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop:
        raise ValueError(f"bytes {start} to {stop}")
    return Stored(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), base + start, base + stop)


def _fits(stored: Stored) -> bool:
    """Does a tensor have as many bytes as its shape asks for? Of a format we do not know, nobody can say."""
    each = ITEM_BYTES.get(stored.dtype)
    return each is None or stored.stop - stored.start == math.prod(stored.shape) * each


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor that is to be written: its name, safetensors' name of its dtype, its shape, its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def header_of(tensors: Iterable[Described]) -> bytes:
    """What a safetensors file begins with; the bytes of ``tensors`` follow, one after the other, without gaps."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(table, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_whole(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file so that it is there complete and on disk, or not at all."""
    temporary = path.with_name(f".{path.name}.partial")
    with temporary.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object whole."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_whole(path, lambda file: void(file.write(text.encode("utf-8"))))


def void(_: object) -> None:
    """Drop a result, where a callback must return nothing."""


def copy_companions(source: Path, folder: Path) -> None:
    """Tokenizer, chat template and generation defaults, as ``source`` has them."""
    for name in COMPANIONS:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            with (source / name).open("rb") as original:
                write_whole(folder / name, lambda file, original=original: shutil.copyfileobj(original, file))
