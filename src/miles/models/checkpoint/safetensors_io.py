"""Checkpoint folders: config, safetensors headers and index, and atomic writes."""

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

# Files besides config and weights, which a save copies from the checkpoint the model was loaded from.
TOKENIZER_FILES = (
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
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


# Bytes per value of each safetensors dtype.
ITEM_BYTES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2},
    **{"BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: bytes ``start`` to ``stop`` of its file; ``dtype`` is safetensors' name for it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a CheckpointError that names the file."""
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
    """Read ``config.json``, with ``eos_token_id`` from ``generation_config.json`` if that has one (it is more
    complete), and with the ``quantization_config`` that modelopt writes into ``hf_quant_config.json``.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder: a checkpoint is a local folder with config.json in it.")
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    if generation.exists():
        eos_token_id = read_json(generation).get("eos_token_id")
        if eos_token_id is not None:
            config["eos_token_id"] = eos_token_id
    modelopt = folder / "hf_quant_config.json"
    if modelopt.exists() and "quantization_config" not in config:
        config["quantization_config"] = {"quant_method": "modelopt"} | read_json(modelopt).get("quantization", {})
    return config


def config_dtype(config: Mapping[str, Any]) -> str | None:
    """Return the dtype a config names (``dtype``, or ``torch_dtype`` in older ones), its text model's, or None."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None and isinstance(text := config.get("text_config"), Mapping):
        return config_dtype(text)
    return None if named is None else str(named).removeprefix("torch.")


def index_file_name(single_file: str) -> str:
    """Return the name of the index file of a sharded checkpoint.

    >>> index_file_name("model.safetensors")
    'model.safetensors.index.json'
    """
    return f"{single_file}.index.json"


def shard_file_name(single_file: str, number: int, count: int) -> str:
    """Return the name of shard ``number`` of ``count``.

    >>> shard_file_name("model.safetensors", 0, 1), shard_file_name("model.safetensors", 1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    stem, _, kind = single_file.rpartition(".")
    return single_file if count == 1 else f"{stem}-{number + 1:05d}-of-{count:05d}.{kind}"


def stored_tensors(folder: Path | str, single_file: str = WEIGHTS) -> dict[str, StoredTensor]:
    """Read the headers of a checkpoint: every tensor by its name; missing or truncated files are a CheckpointError.

    The tensors are in the file ``single_file``, or in those its index names.
    """
    folder, index_name = Path(folder), index_file_name(single_file)
    if (folder / single_file).exists():
        return _read_header(folder / single_file)
    if not (folder / index_name).exists():
        if (folder / ".metadata").exists():
            raise CheckpointError(
                f"{folder} is in Megatron's torch_dist format: write it as safetensors with miles convert {folder} OUT "
                "--format bfloat16."
            )
        raise CheckpointError(f"{folder} holds neither {single_file} nor {index_name}: save the model as safetensors.")
    index = read_json(folder / index_name).get("weight_map")
    if not isinstance(index, dict):
        raise CheckpointError(f"{folder / index_name} has no weight_map: copy the checkpoint again.")
    headers: dict[str, dict[str, StoredTensor]] = {}
    for name in sorted(set(index.values())):
        if not (folder / name).exists():
            first = min(tensor for tensor, file in index.items() if file == name)
            raise CheckpointError(f"{folder / name} is missing: {index_name} says {first} is in it.")
        headers[name] = _read_header(folder / name)
    for tensor, name in index.items():
        if tensor not in headers[name]:
            raise CheckpointError(f"{folder / name} does not hold {tensor}, though {index_name} says so.")
    found = {tensor: stored for header in headers.values() for tensor, stored in header.items()}
    return found | {tensor: headers[name][tensor] for tensor, name in index.items()}


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"{path} is truncated: {size} bytes do not hold its header; copy it again.")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            table = {name: _parse_entry(path, entry, 8 + length) for name, entry in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has no safetensors header ({error}); copy it again.") from error
    for name, stored in sorted(table.items(), key=lambda item: item[1].stop):
        if stored.stop > size:
            raise CheckpointError(
                f"{path} is truncated: {name} should end at byte {stored.stop}, but the file has {size}."
            )
        if not _size_matches(stored):
            raise CheckpointError(
                f"{name} in {path} has {stored.stop - stored.start} bytes, which is not what shape {stored.shape} in "
                f"{stored.dtype} takes; copy the file again."
            )
    return table


def _parse_entry(path: Path, entry: Mapping[str, Any], base: int) -> StoredTensor:
    start, stop = entry["data_offsets"]
    if not 0 <= start <= stop:
        raise ValueError(f"bytes {start} to {stop}")
    return StoredTensor(path, str(entry["dtype"]), tuple(map(int, entry["shape"])), base + start, base + stop)


def _size_matches(stored: StoredTensor) -> bool:
    """Return whether a tensor has as many bytes as its shape and dtype need; true for unknown dtypes."""
    each = ITEM_BYTES.get(stored.dtype)
    return each is None or stored.stop - stored.start == math.prod(stored.shape) * each


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor to be written: name, safetensors dtype, shape, size in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def encode_header(tensors: Iterable[TensorHeader]) -> bytes:
    """Encode the header of a safetensors file; the bytes of ``tensors`` follow, one after the other, without gaps."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        span = [offset, offset + tensor.nbytes]
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(table, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically and sync it to disk: it exists completely or not at all."""
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
    """Write a JSON object atomically."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode("utf-8")))


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config from ``source``."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != folder.resolve():
            with (source / name).open("rb") as original:
                write_atomically(folder / name, lambda file, original=original: shutil.copyfileobj(original, file))
