"""A decoder written as a Hugging Face checkpoint, a tensor at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from miles.models import names
from miles.models.decoder import Decoder
from miles.models.files import INDEX, WEIGHTS, Described, Stored, header_of, shard_of, write_json, write_whole
from miles.models.outline import CODES, outline_of
from miles.models.reader import Reader

# A tensor to be written: here, or where it lies in another checkpoint.
Entry = tuple[str, Tensor | Stored]

SHARD_BYTES = 4 << 30
"""The most bytes of tensors in a file of weights, unless one tensor is larger."""

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
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads: weights, ``config.json`` last, and ``like``'s tokenizer files.

    The config is the one given, else ``like``'s, else made from the spec. Weights are written in the dtype they have
    here: what was loaded from a quantised checkpoint is written without its ``quantization_config``. Tensors of
    ``like`` that this decoder does not compute (a vision tower, layers that predict further ahead) are copied as they
    are, unless they are quantised. Each file appears whole or not at all.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    told = outline_of(decoder, like=like, config=config)
    shards = _shards([*hf_tensors(decoder), *told.spare], max_shard_bytes)
    files = [shard_of(WEIGHTS, i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_whole(folder / file, lambda out, shard=shard: _write_safetensors(out, shard))
    if len(shards) > 1:
        total = sum(_bytes(t) for shard in shards for _, t in shard)
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    _clear(folder, files)
    told.accompany(folder)


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
    out.write(header_of(_described(name, tensor) for name, tensor in tensors))
    with Reader() as reader:
        for name, tensor in tensors:
            if isinstance(tensor, Stored):
                for part in stored_bytes(name, tensor, reader):
                    out.write(part)
                continue
            for part in parts(tensor):
                out.write(part.to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)


def _described(name: str, tensor: Tensor | Stored) -> Described:
    code = tensor.dtype if isinstance(tensor, Stored) else CODES[tensor.dtype]
    return Described(name, code, tuple(tensor.shape), _bytes(tensor))


def stored_bytes(name: str, stored: Stored, reader: Reader) -> Iterator[memoryview]:
    """The bytes of a tensor on disk, a part at a time, each in the memory of the one before."""
    buffer = memoryview(bytearray(min(_COPIED, stored.stop - stored.start)))
    for start in range(stored.start, stored.stop, _COPIED):
        part = buffer[: stored.stop - start]
        reader.read(name, stored.file, start, part)
        yield part


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, in runs of rows small enough to be copied, where it must be."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    rows = max(1, _COPIED * len(tensor) // max(1, tensor.nbytes))
    yield from tensor.split(rows)
