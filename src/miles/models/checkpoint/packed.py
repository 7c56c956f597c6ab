"""Packed loading: quantized parameters filled with the bytes of a checkpoint in the same format, without dequantizing.

A weight whose stored format differs from the wanted one is dequantized and quantized again. Integers keep their values
where only the dtype of the scales differs (AWQ and GPTQ have float16 scales, which are rounded to bfloat16).

Shapes: N rows and K columns of a matrix, n and k its blocks, G groups of a row, w words of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models.checkpoint import param_map
from miles.models.checkpoint.load import ParamReader
from miles.models.checkpoint.param_slices import HfSlice, weight_segments
from miles.models.checkpoint.quant_config import read_quant_config
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import StoredTensor, read_config, stored_tensors
from miles.models.checkpoint.tensor_formats import (
    AwqTensor,
    GptqTensor,
    Mxfp4Tensor,
    PackedTensor,
    PlainTensor,
    ScaledTensor,
    TensorFormat,
)
from miles.models.checkpoint.tensor_sources import ParamSource, locate_tensors
from miles.models.checkpoint.tiles import STORED_DTYPES
from miles.models.spec import DecoderSpec
from miles.precision.formats import WeightFormat
from miles.precision.integer import pack_nibbles
from miles.precision.quantize import quantize
from miles.precision.quantized_tensor import QuantizedTensor
from miles.precision.segments import concat_segments, split_segments, stack
from miles.precision.unpack import INT_OFFSET, unpack_awq, unpack_row_words, unpack_words

__all__ = ["load_packed", "read_packed_segments"]

_BITS = {"int4": 4, "int8": 8}


def load_packed(
    folder: Path | str,
    spec: DecoderSpec,
    plan: Mapping[str, WeightFormat],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    tensor_parallel_size: int = 1,
    keep_stored: bool = True,
    reader: FileReader | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed tensors of the parameters in ``plan`` (decoder name -> format), as ``QuantizedTensor`` names
    them, in the order of the files.

    Weights in another format are rounded to ``dtype`` first and quantized on ``device``; those in the same format too
    unless their bytes are kept (``keep_stored``). No more than one parameter is in memory beside what was yielded.
    Scales are stored such that the parameters can be sharded over ``tensor_parallel_size`` ranks. Of experts only those
    of ``rank`` of ``world`` are read. Checks are made at once, as in ``hf.load``.
    """
    config = read_config(folder)
    sources = locate_tensors(spec, stored_tensors(folder), read_quant_config(config), Path(folder))
    how = _ReadOptions(dtype, tensor_parallel_size, keep_stored, rank, world)
    return _iterate(sources, spec, plan, device, how, reader)


class _ReadOptions(NamedTuple):
    dtype: torch.dtype
    shards: int
    keep_stored: bool
    rank: int
    world: int


def _iterate(
    sources: Mapping[str, Sequence[ParamSource]],
    spec: DecoderSpec,
    plan: Mapping[str, WeightFormat],
    device: torch.device | str,
    how: _ReadOptions,
    reader: FileReader | None,
) -> Iterator[tuple[str, Tensor]]:
    slices = param_map.build_param_map(spec)
    with ParamReader(device, reader) as params:
        for name, own in sources.items():
            if name in plan:
                packed = _read_param(own, slices[name], plan[name], how, params)
                if not bool(packed.scale.float().isfinite().all()):
                    raise CheckpointError(f"{name} has values that are not finite, which cannot be quantized.")
                yield from packed.tensors(name).items()


def _read_param(
    sources: Sequence[ParamSource],
    slices: tuple[HfSlice, ...],
    format: WeightFormat,
    how: _ReadOptions,
    params: ParamReader,
) -> QuantizedTensor:
    shape, segments = param_map.param_shape(slices), weight_segments(slices)
    rows, columns = shape[-2:]
    assert sum(segments) == rows

    def read(expert: int | None) -> QuantizedTensor:
        parts = read_packed_segments(
            sources, expert, segments, columns, format, params, dtype=how.dtype, keep_stored=how.keep_stored
        )
        return concat_segments([_move(part, params.device) for part in parts], how.shards)

    if len(shape) == 2:
        return read(None)
    count = shape[0] // how.world
    return stack([read(expert) for expert in range(how.rank * count, (how.rank + 1) * count)])


def _move(packed: QuantizedTensor, device: torch.device | str) -> QuantizedTensor:
    moved = {name: tensor.to(device) for name, tensor in packed.tensors("").items()}
    return QuantizedTensor.from_tensors(packed.format, "", moved, packed.row_block)


def read_packed_segments(
    sources: Sequence[ParamSource],
    expert: int | None,
    segments: Sequence[int],
    columns: int,
    format: WeightFormat,
    params: ParamReader,
    *,
    dtype: torch.dtype = torch.float32,
    keep_stored: bool = True,
) -> list[QuantizedTensor]:
    """Return the packed weights that a matrix of a parameter is fused of, that of ``expert`` if it has experts.

    ``sources`` may be some of a parameter's, one after the other, with their ``segments``. Weights that are quantized
    here are rounded to ``dtype`` first; these are all of them unless stored bytes are kept.
    """
    own = [source for source in sources if source.piece.expert in (None, expert)]
    parts = [_read_piece(source, expert, format, params.files) if keep_stored else None for source in own]
    exact = [part for part in parts if part is not None]
    if len(exact) == len(parts) == len(segments) and _share_global_scale(exact):
        return exact
    shape = (sum(segments), columns)
    first = own[0].piece.start if expert is None else expert
    whole = params.read(own, shape if expert is None else (1, *shape), dtype, first=first).view(shape)
    if format.global_scale or len(parts) != len(segments):
        return split_segments(quantize(whole, format, segments), segments)
    wide = whole.split(list(segments))
    return [quantize(w, format) if p is None else p for p, w in zip(parts, wide, strict=True)]


def _share_global_scale(parts: Sequence[QuantizedTensor]) -> bool:
    totals = [part.global_scale for part in parts if part.global_scale is not None]
    return all(torch.equal(total, totals[0]) for total in totals[1:])


class _PieceFiles(NamedTuple):
    """Reads whole stored tensors of one weight; ``name`` is in errors."""

    name: str
    reader: FileReader

    def read(self, stored: StoredTensor, number: int | None = None) -> Tensor:
        """Return the tensor, or matrix ``number`` of a stack."""
        shape, start = stored.shape, stored.start
        size = stored.stop - stored.start
        if number is not None:
            shape, size = stored.shape[1:], size // stored.shape[0]
            start += number * size
        flat = torch.empty(size, dtype=torch.uint8)
        self.reader.read(self.name, stored.file, start, flat.numpy().data)
        return flat.view(STORED_DTYPES[stored.dtype]).view(shape)


def _read_piece(
    source: ParamSource, expert: int | None, format: WeightFormat, reader: FileReader
) -> QuantizedTensor | None:
    """Return the stored bytes of a checkpoint's matrix in our layout; None if it is stored in another format."""
    tensor, shape = source.tensor, source.piece.shape[-2:]
    if isinstance(tensor, PlainTensor) or source.piece.transposed != isinstance(tensor, Mxfp4Tensor):
        return None
    number = expert if len(source.piece.shape) == 3 else None
    files = _PieceFiles(source.piece.hf_name, reader)
    if isinstance(tensor, ScaledTensor):
        return _read_scaled(tensor, number, (shape[0], shape[1]), format, files)
    if isinstance(tensor, Mxfp4Tensor):
        if format.element != "e2m1" or format.scale != "e8m0":
            return None
        data, scale = files.read(tensor.blocks, number), files.read(tensor.scales, number)
        return QuantizedTensor(format, data.flatten(-2), scale, 1)
    columns = format.columns or shape[1]
    if format.element != _element(tensor) or columns != _group(tensor, shape[1]):
        return None
    if isinstance(tensor, PackedTensor) and format.element == "e2m1":
        return _read_e2m1(tensor, format, files)
    return _read_integers(tensor, format, shape[1], files)


def _element(tensor: TensorFormat) -> str | None:
    match tensor:
        case AwqTensor():
            return "int4"
        case GptqTensor():
            return None if tensor.scheme.act_order else tensor.scheme.element
        case PackedTensor():
            return tensor.scheme.element
        case _:
            return None


def _group(tensor: TensorFormat, columns: int) -> int | None:
    match tensor:
        case AwqTensor() | GptqTensor():
            return tensor.group
        case PackedTensor():
            return tensor.scheme.columns or columns
        case _:
            return None


def _read_scaled(
    tensor: ScaledTensor, number: int | None, shape: tuple[int, int], format: WeightFormat, files: _PieceFiles
) -> QuantizedTensor | None:
    rows, columns = shape
    dtype = {"e4m3": "F8_E4M3", "int8": "I8"}.get(format.element)
    is_exponent = tensor.scale.dtype in ("U8", "F8_E8M0")
    if tensor.stored.dtype != dtype or tensor.block != (format.rows or rows, format.columns or columns):
        return None
    if format.scale == "e8m0" and not is_exponent:
        return None
    scale = files.read(tensor.scale, number).view(-(-rows // tensor.block[0]), -1)
    if format.scale == "e8m0":
        scale = scale.view(torch.uint8)
    else:
        scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        scale = scale.to(torch.bfloat16 if format.scale == "bfloat16" else torch.float32)
        if format.power_of_two and not bool((torch.frexp(scale).mantissa == 0.5).all()):
            return None
    return QuantizedTensor(format, files.read(tensor.stored, number), scale, tensor.block[0])


def _read_e2m1(tensor: PackedTensor, format: WeightFormat, files: _PieceFiles) -> QuantizedTensor | None:
    if format.global_scale != (tensor.global_scale is not None):
        return None
    scale, total = files.read(tensor.scale), None
    if tensor.global_scale is not None:
        total = files.read(tensor.global_scale).float().view(-1)[0]
        total = 1 / total if tensor.divides else total
    elif scale.dtype != torch.uint8:
        scale = scale.view(torch.uint8)
    return QuantizedTensor(format, files.read(tensor.packed), scale, 1, None, total)


def _read_integers(
    tensor: TensorFormat, format: WeightFormat, columns: int, files: _PieceFiles
) -> QuantizedTensor | None:
    bits = _BITS[format.element]
    unpacked = _unpack_integers(tensor, bits, files)
    if unpacked is None:
        return None
    values_NK, scale_NG, zero_NG = unpacked
    offset = INT_OFFSET[bits]
    if not format.zero_point:
        if zero_NG is not None and bool((zero_NG != offset).any()):
            return None
        zero_NG = None
    elif zero_NG is None:
        zero_NG = torch.full(scale_NG.shape, offset, dtype=torch.uint8)
    values_NK = values_NK[:, :columns].contiguous()
    data = pack_nibbles(values_NK) if bits == 4 else (values_NK ^ 0x80).view(torch.int8)
    return QuantizedTensor(format, data, scale_NG.to(torch.bfloat16).contiguous(), 1, zero_NG)


def _unpack_integers(
    tensor: TensorFormat, bits: int, files: _PieceFiles
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The unsigned values [N, K], the scales [N, G] and the zero points [N, G], if any are stored.

    None if columns are reordered.
    """
    match tensor:
        case PackedTensor():
            scale = files.read(tensor.scale)
            zero = None if tensor.zero is None else unpack_row_words(files.read(tensor.zero), bits)[: len(scale)]
            return unpack_words(files.read(tensor.packed), bits), scale, zero
        case AwqTensor():
            values = unpack_awq(files.read(tensor.qweight)).T
            return values, files.read(tensor.scales).T, unpack_awq(files.read(tensor.qzeros)).T.contiguous()
        case GptqTensor():
            if tensor.g_idx is not None and not torch.equal(files.read(tensor.g_idx), _column_groups(tensor)):
                return None
            zero = (unpack_words(files.read(tensor.qzeros), bits) + tensor.scheme.zero_offset) & (2**bits - 1)
            values = unpack_row_words(files.read(tensor.qweight), bits).T
            return values, files.read(tensor.scales).T, zero.T.contiguous()
        case _:
            raise AssertionError(f"{type(tensor).__name__} holds no packed integers")


def _column_groups(tensor: GptqTensor) -> Tensor:
    """The groups of columns that are in their own order."""
    assert tensor.g_idx is not None
    return torch.arange(tensor.g_idx.shape[0], dtype=torch.int32) // tensor.group
