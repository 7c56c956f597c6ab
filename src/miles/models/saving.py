"""A decoder written as a Hugging Face checkpoint, a tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models import names
from miles.models.decoder import Decoder
from miles.models.families import config_of, spec_of
from miles.models.families.table import family_of
from miles.models.files import (
    INDEX,
    WEIGHTS,
    Stored,
    copy_companions,
    read_config,
    stored_tensors,
    write_json,
    write_whole,
)
from miles.models.loading import DTYPES
from miles.models.reader import Reader
from miles.models.sources import quantised
from miles.models.spec import DecoderSpec

# A tensor to be written: here, or where it lies in another checkpoint.
Entry = tuple[str, Tensor | Stored]

_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Bytes copied at a time of a tensor that does not lie in memory as it is to lie on disk.
_COPIED = 16 << 20


def hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as Hugging Face names it: detached views of the live parameters."""
    parameters = dict(decoder.named_parameters())
    for ours, pieces in names.pieces(decoder.spec).items():
        tensor = parameters[ours].detach()
        for piece in pieces:
            yield piece.hf_name, piece.of(tensor)


def export(
    decoder: Decoder,
    folder: Path | str,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a folder that transformers loads: weights, ``config.json`` last, and ``like``'s tokenizer files.

    The config is the one given, else ``like``'s, else made from the spec. Weights are written in the dtype they have
    here: what was loaded from a quantised checkpoint is written without its ``quantization_config``. Tensors of
    ``like`` that this decoder does not compute (a vision tower, layers that predict further ahead) are copied as they
    are, unless they are quantised. Each file appears whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = dict(config or (config_of(decoder.spec) if like is None else read_config(like)))
    if _shape(spec_of(told)) != _shape(decoder.spec):
        raise CheckpointError(f"The config to be written to {folder} describes another model than the weights.")
    shards = _shards([*hf_tensors(decoder), *_spare(decoder, like)], max_shard_bytes)
    files = (
        [WEIGHTS]
        if len(shards) == 1
        else [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    )
    for file, shard in zip(files, shards, strict=True):
        write_whole(folder / file, lambda out, shard=shard: _write_safetensors(out, shard))
    if len(shards) > 1:
        total = sum(_bytes(t) for shard in shards for _, t in shard)
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    _clear(folder, files)
    if like is not None:
        copy_companions(Path(like), folder)
    write_json(folder / "config.json", _written(told, decoder.head().dtype))


def _written(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config that says how the weights are stored now, and nothing of how they were."""
    gone = ("torch_dtype", "quantization_config", "compression_config")
    told = {key: value for key, value in config.items() if key not in gone}
    if isinstance(told.get("text_config"), Mapping):
        told["text_config"] = _written(told["text_config"], dtype)
    return told | {"dtype": str(dtype).removeprefix("torch.")}


def _shape(spec: DecoderSpec) -> DecoderSpec:
    """What the weights must agree on: how long a context and which tokens end it are a run's own choice."""
    return replace(spec, eos_token_ids=(), max_positions=0)


def _spare(decoder: Decoder, like: Path | str | None) -> Iterator[Entry]:
    """What ``like`` holds that is not this decoder's, and says something."""
    if like is None or not any((Path(like) / name).exists() for name in (WEIGHTS, INDEX)):
        return
    if quantised(read_config(like)) is not None:
        return
    own = {piece.hf_name for pieces in names.pieces(decoder.spec).values() for piece in pieces}
    own |= set(names.stacked(decoder.spec).values())
    spare = family_of(decoder.spec.family).spare
    for name, stored in stored_tensors(like).items():
        if name not in own and spare(decoder.spec, name):
            yield name, stored


def _bytes(tensor: Tensor | Stored) -> int:
    return tensor.nbytes if isinstance(tensor, Tensor) else tensor.stop - tensor.start


def _shards(tensors: Iterable[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for name, tensor in tensors:
        if shards[-1] and used + _bytes(tensor) > limit:
            shards.append([])
            used = 0
        shards[-1].append((name, tensor))
        used += _bytes(tensor)
    return shards


def _clear(folder: Path, files: Sequence[str]) -> None:
    """Remove an earlier export's weights, which a reader might take for these."""
    if len(files) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()


def _write_safetensors(out: BinaryIO, tensors: Sequence[Entry]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors:
        span = [offset, offset + _bytes(tensor)]
        code = tensor.dtype if isinstance(tensor, Stored) else _CODES[tensor.dtype]
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    out.write(struct.pack("<Q", len(text)) + text)
    with Reader() as reader:
        for name, tensor in tensors:
            if isinstance(tensor, Stored):
                _copy(name, tensor, reader, out)
                continue
            for part in _parts(tensor):
                out.write(part.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)


def _copy(name: str, stored: Stored, reader: Reader, out: BinaryIO) -> None:
    """Bytes from file to file."""
    buffer = memoryview(bytearray(min(_COPIED, stored.stop - stored.start)))
    for start in range(stored.start, stored.stop, _COPIED):
        part = buffer[: stored.stop - start]
        reader.read(name, stored.file, start, part)
        out.write(part)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, in runs of rows small enough to be copied, where it must be."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    rows = max(1, _COPIED * len(tensor) // max(1, tensor.nbytes))
    yield from tensor.split(rows)
