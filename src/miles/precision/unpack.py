"""Unpacking and dequantization of 4- and 8-bit weights in the layouts of compressed-tensors, modelopt, AWQ and GPTQ.

Shapes: R rows and C columns of a matrix as it is stored, G groups of columns with a scale, b bytes or w 32-bit words of
a row; AWQ and GPTQ store a weight transposed: K inputs by N outputs, n words of outputs, k words of inputs.

Values are computed in float32 and rounded once to the dtype of ``out``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from miles.precision.e8m0 import decode_e8m0
from miles.precision.integer import pack_nibbles, unpack_nibbles
from miles.precision.microscaling import decode_e2m1

__all__ = [
    "INT_OFFSET",
    "dequantize_awq",
    "dequantize_e2m1",
    "dequantize_gptq",
    "dequantize_words",
    "pack_words",
    "unpack_awq",
    "unpack_row_words",
    "unpack_words",
]

INT_OFFSET = {4: 8, 8: 128}
"""What is added to a signed value of so many bits to store it (offset binary)."""

# AWQ packs the columns 0, 2, 4, 6, 1, 3, 5, 7 into a word, lowest bits first: where each column is found.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Values converted at a time, so that the intermediate tensors stay small.
_CHUNK = 1 << 20


def unpack_words(words_Rw: Tensor, bits: int) -> Tensor:
    """Return the unsigned 4- or 8-bit values of 32-bit words, lowest bits first, [R, w 32 / bits]."""
    bytes_Rb = words_Rw.contiguous().view(torch.uint8)
    return unpack_nibbles(bytes_Rb) if bits == 4 else bytes_Rb


def pack_words(values_RC: Tensor, bits: int) -> Tensor:
    """Pack unsigned values into 32-bit words, the inverse of ``unpack_words``; rows are padded with zeros."""
    padded = torch.nn.functional.pad(values_RC, (0, -values_RC.shape[-1] % (32 // bits)))
    bytes_Rb = pack_nibbles(padded) if bits == 4 else padded
    return bytes_Rb.flatten().view(torch.int32).view(*bytes_Rb.shape[:-1], -1)


def unpack_row_words(words_wC: Tensor, bits: int) -> Tensor:
    """Return the values of words that hold several rows of a column, lowest bits first, [w 32 / bits, C]."""
    values_wCr = unpack_words(words_wC.unsqueeze(-1), bits)
    return values_wCr.transpose(-1, -2).flatten(-3, -2)


def unpack_awq(words_Rw: Tensor) -> Tensor:
    """Return the values of AWQ's words in the order of the columns, [R, 8w]."""
    return unpack_words(words_Rw, 4).unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2)


def dequantize_words(words_Rw: Tensor, scale_RG: Tensor, zero_RG: Tensor | None, bits: int, out_RC: Tensor) -> None:
    """Write (value - zero point) * scale of compressed-tensors' packed integers; no zero point is the offset."""
    for part in _row_chunks(out_RC):
        values = unpack_words(words_Rw[part], bits)[:, : out_RC.shape[1]].float()
        values_RGg = values.unflatten(-1, (scale_RG.shape[1], -1))
        zero = float(INT_OFFSET[bits]) if zero_RG is None else zero_RG[part].float().unsqueeze(-1)
        values_RGg = values_RGg.sub_(zero).mul_(scale_RG[part].float().unsqueeze(-1))
        out_RC[part].copy_(values_RGg.flatten(-2))


def dequantize_e2m1(bytes_Rb: Tensor, scale_RG: Tensor, global_scale: Tensor | None, out_RC: Tensor) -> None:
    """Write E2M1 value * scale * global scale; scales in uint8 are E8M0 exponents."""
    for part in _row_chunks(out_RC):
        values = decode_e2m1(unpack_nibbles(bytes_Rb[part]))
        scale = decode_e8m0(scale_RG[part]) if scale_RG.dtype == torch.uint8 else scale_RG[part].float()
        values = values.unflatten(-1, (scale.shape[1], -1)).mul_(scale.unsqueeze(-1)).flatten(-2)
        out_RC[part].copy_(values if global_scale is None else values.mul_(global_scale.float()))


def dequantize_awq(
    qweight_Kn: Tensor, qzeros_Gn: Tensor, scales_GN: Tensor, group: int, out_KN: Tensor, *, first: int = 0
) -> None:
    """Write (value - zero point) * scale; ``first`` is the index of the first input, in the first group given."""
    index_K = torch.arange(first, first + len(out_KN), device=out_KN.device) // group - first // group
    _dequantize_inputs(qweight_Kn, unpack_awq, unpack_awq(qzeros_Gn).float(), scales_GN, index_K, 1, out_KN)


def dequantize_gptq(
    qweight_kN: Tensor, zeros_GN: Tensor, scales_GN: Tensor, index_K: Tensor, bits: int, out_KN: Tensor
) -> None:
    """Write (value - zero point) * scale; ``index_K`` is the group of each input among those given."""

    def unpack(words: Tensor) -> Tensor:
        return unpack_row_words(words, bits)

    _dequantize_inputs(qweight_kN, unpack, zeros_GN.float(), scales_GN, index_K, 32 // bits, out_KN)


def _dequantize_inputs(
    words: Tensor,
    unpack: Callable[[Tensor], Tensor],
    zeros_GN: Tensor,
    scales_GN: Tensor,
    index_K: Tensor,
    per_word: int,
    out_KN: Tensor,
) -> None:
    for part in _row_chunks(out_KN, multiple=per_word):
        rows = slice(part.start // per_word, -(-part.stop // per_word))
        values = unpack(words[rows])[: part.stop - part.start].float()
        index = index_K[part]
        out_KN[part].copy_(values.sub_(zeros_GN[index]).mul_(scales_GN[index].float()))


def _row_chunks(out_RC: Tensor, *, multiple: int = 1) -> Iterator[slice]:
    rows, columns = out_RC.shape
    step = max(1, _CHUNK // max(1, columns) // multiple) * multiple
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
