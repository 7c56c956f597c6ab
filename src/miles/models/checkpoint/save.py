"""Save a decoder as a Hugging Face checkpoint, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from miles.models.checkpoint import param_map
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    TensorHeader,
    encode_header,
    shard_file_name,
    write_atomically,
    write_json,
)
from miles.models.checkpoint.save_plan import SaveUnit, plan_decoder_save
from miles.models.decoder import Decoder
from miles.precision.formats import WeightFormat
from miles.precision.quantized_tensor import QuantizedTensor

# A tensor to be written: its header, and how to get it, or where it is stored in another checkpoint.
Entry = tuple[TensorHeader, Callable[[], Tensor] | StoredTensor]

SHARD_BYTES = 4 << 30
"""Maximum bytes of tensors per weight file, unless one tensor is larger."""

# Bytes copied at a time of a tensor whose layout in memory differs from that on disk.
_COPY_BYTES = 16 << 20


def iter_hf_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its Hugging Face name: detached views of the live parameters."""
    parameters = dict(decoder.named_parameters())
    for name, slices in param_map.build_param_map(decoder.spec).items():
        tensor = parameters[name].detach()
        for piece in slices:
            yield piece.hf_name, piece.view(tensor)


def export(
    decoder: Decoder,
    folder: Path | str,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    formats: Mapping[str, WeightFormat] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers loads: weights, ``config.json`` last, and the tokenizer files of ``like``.

    The config is the one given, else that of ``like``, else built from the spec. Weights are written in their current
    dtype: what was loaded from a quantized checkpoint is written without its ``quantization_config``. Parameters in
    ``formats`` (decoder name -> format) are written quantized; they may be packed already. Tensors of ``like`` that
    this decoder does not compute (a vision tower, multi-token-prediction layers) are copied unless they are quantized.
    Each file is written atomically.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_decoder_save(decoder, like=like, config=config, formats=formats)
    entries = [entry for unit in plan.units for entry in _unit_entries(unit, decoder, formats or {})]
    shards = _shards([*entries, *map(_stored_entry, plan.extra_tensors)], max_shard_bytes)
    files = [shard_file_name(WEIGHTS, i, len(shards)) for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        write_atomically(folder / file, lambda out, shard=shard: _write_safetensors(out, shard))
    if len(shards) > 1:
        total = sum(header.nbytes for shard in shards for header, _ in shard)
        weight_map = {header.name: file for file, shard in zip(files, shards, strict=True) for header, _ in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _remove_stale_weights(folder, files)
    plan.write_metadata(folder)


def _unit_entries(unit: SaveUnit, decoder: Decoder, formats: Mapping[str, WeightFormat]) -> Iterator[Entry]:
    """Yield the tensors of a parameter; it is converted when the first is wanted and released after the last."""
    views: list[Tensor] = []
    headers = unit.headers()

    def get(number: int) -> Tensor:
        if number == 0:
            views.extend(unit.views(_get_param(decoder, unit.name, formats)))
        tensor = views[number]
        if number == len(headers) - 1:
            views.clear()
        return tensor

    for number, header in enumerate(headers):
        yield header, partial(get, number)


def _get_param(decoder: Decoder, name: str, formats: Mapping[str, WeightFormat]) -> Tensor | QuantizedTensor:
    """The parameter; packed if the decoder holds it so."""
    parameters = dict(decoder.named_parameters())
    if name not in formats or f"{name}_scale" not in parameters:
        return parameters[name]
    rows = parameters[name].shape[-2]
    scale_rows = parameters[f"{name}_scale"].shape[-2]
    block = 1 if scale_rows == rows else formats[name].rows or rows
    return QuantizedTensor.from_tensors(formats[name], name, parameters, block)


def _stored_entry(entry: tuple[str, StoredTensor]) -> Entry:
    name, stored = entry
    return TensorHeader(name, stored.dtype, stored.shape, stored.stop - stored.start), stored


def _shards(entries: Iterable[Entry], limit: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        size = entry[0].nbytes
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(entry)
        used += size
    return shards


def _remove_stale_weights(folder: Path, files: Sequence[str]) -> None:
    """Remove weight files of an earlier save."""
    if len(files) == 1:
        (folder / INDEX).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors"):
        if old.name not in files:
            old.unlink()


def _write_safetensors(out: BinaryIO, entries: Sequence[Entry]) -> None:
    out.write(encode_header(header for header, _ in entries))
    with FileReader() as reader:
        for header, source in entries:
            if isinstance(source, StoredTensor):
                for part in read_stored_bytes(header.name, source, reader):
                    out.write(part)
                continue
            tensor = source()
            assert tuple(tensor.shape) == header.shape, f"{header.name}: {tuple(tensor.shape)}, not {header.shape}"
            for part in split_for_copy(tensor):
                out.write(part.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)


def read_stored_bytes(name: str, stored: StoredTensor, reader: FileReader) -> Iterator[memoryview]:
    """Yield the bytes of a stored tensor in parts, reusing one buffer."""
    buffer = memoryview(bytearray(min(_COPY_BYTES, stored.stop - stored.start)))
    for start in range(stored.start, stored.stop, _COPY_BYTES):
        part = buffer[: stored.stop - start]
        reader.read(name, stored.file, start, part)
        yield part


def split_for_copy(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor in runs of rows small enough to be copied, or as it is if no copy is needed."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield tensor
        return
    rows = max(1, _COPY_BYTES * len(tensor) // max(1, tensor.nbytes))
    yield from tensor.split(rows)
