"""Tiles of quantized matrices: the bytes of values, scales and zero points of a run of rows, and their dequantization.

Shapes: R rows and C columns of a matrix as it is stored, r and c its blocks, G groups of a row, b bytes or w words of a
row; K inputs and N outputs of a matrix that is stored transposed, k and n their words.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models.checkpoint.safetensors_io import StoredTensor
from miles.models.checkpoint.tensor_formats import (
    AwqTensor,
    GptqTensor,
    Mxfp4Tensor,
    PackedTensor,
    QuantizedFormat,
    ScaledTensor,
)
from miles.models.checkpoint.tiles import ByteRange, Tile
from miles.precision.dequantize import dequantize_blocks, dequantize_mxfp4
from miles.precision.unpack import (
    dequantize_awq,
    dequantize_e2m1,
    dequantize_gptq,
    dequantize_words,
    unpack_row_words,
    unpack_words,
)

__all__ = ["quantized_tiles"]


def quantized_tiles(
    name: str, source: QuantizedFormat, view_RC: Tensor, number: int, first: int, tile_bytes: int
) -> Iterator[Tile]:
    """Yield tiles of the rows from ``first`` on of matrix ``number`` of a quantized tensor."""
    step = _rows_per_tile(source, view_RC.shape[1], tile_bytes)
    start = 0
    while start < len(view_RC):
        # A tile ends where a block ends, so that no scale is read twice.
        rows = min(step - (first + start) % step if step > 1 else 1, len(view_RC) - start)
        yield _build_tile(name, source, view_RC[start : start + rows], number, first + start)
        start += rows


def _rows_per_tile(source: QuantizedFormat, columns: int, tile_bytes: int) -> int:
    match source:
        case ScaledTensor():
            rows, multiple = tile_bytes // columns, source.block[0]
            return max(1, rows - rows % multiple or rows)
        case Mxfp4Tensor():
            return max(1, 2 * tile_bytes // columns)
        case PackedTensor():
            rows = (2 if source.scheme.element in ("int4", "e2m1") else 1) * tile_bytes // columns
            return max(8, rows - rows % 8)  # zero points of eight rows are in one word
        case AwqTensor():
            rows = 2 * tile_bytes // columns
            return max(source.group, rows - rows % source.group)
        case GptqTensor():
            rows = (2 if source.scheme.element == "int4" else 1) * tile_bytes // columns
            multiple = max(source.group, 8)
            return max(multiple, rows - rows % multiple)


def _build_tile(name: str, source: QuantizedFormat, into: Tensor, number: int, first: int) -> Tile:
    match source:
        case ScaledTensor():
            return _scaled_tile(name, source, into, number, first)
        case Mxfp4Tensor():
            return _mxfp4_tile(name, source, into, number, first)
        case PackedTensor() if source.scheme.element == "e2m1":
            return _e2m1_tile(source, into, first)
        case PackedTensor():
            return _words_tile(source, into, first)
        case AwqTensor():
            return _awq_tile(source, into, first)
        case GptqTensor():
            return _gptq_tile(source, into, first)


def _row_range(name: str, stored: StoredTensor, first: int, stop: int) -> ByteRange:
    """The rows ``first`` to ``stop`` of a stored matrix."""
    inner = tuple(stored.shape[1:])
    return ByteRange(name, stored, first * prod(inner), (stop - first, *inner))


def _scaled_tile(name: str, source: ScaledTensor, into: Tensor, number: int, first: int) -> Tile:
    rows, columns = source.stored.shape[-2:]
    block_rows, block_columns = source.block
    r, c = -(-rows // block_rows), -(-columns // block_columns)
    top, bottom = first // block_rows, -(-(first + len(into)) // block_rows)

    def convert(out_RC: Tensor, weight_RC: Tensor, scale_rc: Tensor) -> None:
        dequantize_blocks(weight_RC, scale_rc, source.block, out_RC, first=first)

    weight = ByteRange(name, source.stored, (number * rows + first) * columns, (len(into), columns))
    scale = ByteRange(source.scale_name, source.scale, (number * r + top) * c, (bottom - top, c))
    return Tile((weight, scale), into, convert)


def _mxfp4_tile(name: str, source: Mxfp4Tensor, into: Tensor, number: int, first: int) -> Tile:
    rows, groups, each = source.blocks.shape[-3:]
    at = (number * rows + first) * groups
    blocks = ByteRange(f"{name}_blocks", source.blocks, at * each, (len(into), groups, each))
    scales = ByteRange(f"{name}_scales", source.scales, at, (len(into), groups))
    return Tile((blocks, scales), into, _convert_mxfp4)


def _convert_mxfp4(out_RC: Tensor, blocks_RGb: Tensor, scales_RG: Tensor) -> None:
    dequantize_mxfp4(blocks_RGb, scales_RG, out_RC)


def _e2m1_tile(source: PackedTensor, into: Tensor, first: int) -> Tile:
    stop = first + len(into)
    ranges = [
        _row_range(source.name, source.packed, first, stop),
        _row_range(f"{source.name}_scale", source.scale, first, stop),
    ]
    if source.global_scale is not None:
        ranges.append(ByteRange(f"{source.name}_global_scale", source.global_scale, 0, (1,)))

    def convert(out_RC: Tensor, bytes_Rb: Tensor, scale_RG: Tensor, total: Tensor | None = None) -> None:
        total = 1 / total.float() if total is not None and source.divides else total
        dequantize_e2m1(bytes_Rb, scale_RG, total, out_RC)

    return Tile(tuple(ranges), into, convert)


def _words_tile(source: PackedTensor, into: Tensor, first: int) -> Tile:
    stop, bits = first + len(into), 4 if source.scheme.element == "int4" else 8
    ranges = [
        _row_range(source.name, source.packed, first, stop),
        _row_range(f"{source.name}_scale", source.scale, first, stop),
    ]
    each = 32 // bits
    if source.zero is not None:
        ranges.append(_row_range(f"{source.name}_zero_point", source.zero, first // each, -(-stop // each)))

    def convert(out_RC: Tensor, words_Rw: Tensor, scale_RG: Tensor, zero_wG: Tensor | None = None) -> None:
        zero_RG = None if zero_wG is None else unpack_row_words(zero_wG, bits)[first % each :][: len(out_RC)]
        dequantize_words(words_Rw, scale_RG, zero_RG, bits, out_RC)

    return Tile(tuple(ranges), into, convert)


def _awq_tile(source: AwqTensor, into: Tensor, first: int) -> Tile:
    stop = first + len(into)
    groups = first // source.group, -(-stop // source.group)
    ranges = (
        _row_range(f"{source.name}qweight", source.qweight, first, stop),
        _row_range(f"{source.name}qzeros", source.qzeros, *groups),
        _row_range(f"{source.name}scales", source.scales, *groups),
    )

    def convert(out_KN: Tensor, qweight_Kn: Tensor, qzeros_Gn: Tensor, scales_GN: Tensor) -> None:
        dequantize_awq(qweight_Kn, qzeros_Gn, scales_GN, source.group, out_KN, first=first)

    return Tile(ranges, into, convert)


def _gptq_tile(source: GptqTensor, into: Tensor, first: int) -> Tile:
    bits = 4 if source.scheme.element == "int4" else 8
    stop, scheme = first + len(into), source.scheme
    each = 32 // bits
    low, high = (0, source.scales.shape[0]) if scheme.act_order else (first // source.group, -(-stop // source.group))
    ranges = [
        _row_range(f"{source.name}qweight", source.qweight, first // each, -(-stop // each)),
        _row_range(f"{source.name}qzeros", source.qzeros, low, high),
        _row_range(f"{source.name}scales", source.scales, low, high),
    ]
    if source.g_idx is not None:
        ranges.append(_row_range(f"{source.name}g_idx", source.g_idx, first, stop))

    def convert(
        out_KN: Tensor, qweight_kN: Tensor, qzeros_Gn: Tensor, scales_GN: Tensor, g_idx_K: Tensor | None = None
    ) -> None:
        index_K = torch.arange(first, stop, device=out_KN.device) // source.group
        if g_idx_K is not None and scheme.act_order:
            index_K = g_idx_K.long()
        elif g_idx_K is not None and not torch.equal(index_K, g_idx_K.long()):
            raise CheckpointError(
                f"{source.name}g_idx in {source.qweight.file} reorders columns, but quantization_config.desc_act of "
                "config.json is not true; correct the config."
            )
        zeros_GN = (unpack_words(qzeros_Gn, bits) + scheme.zero_offset) & (2**bits - 1)
        dequantize_gptq(qweight_kN, zeros_GN, scales_GN, index_K - low, bits, out_KN)

    return Tile(tuple(ranges), into, convert)
