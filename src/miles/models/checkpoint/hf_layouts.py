"""Hugging Face layouts of quantized weights: the tensors that a packed weight is written as.

``fp8`` is written as Qwen and DeepSeek publish it, MXFP4 experts as gpt-oss has them, everything else in the layouts of
compressed-tensors; SGLang, vLLM and transformers read all of them.

Shapes: E stacked matrices, N rows and K columns of a matrix, n and k its blocks, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.checkpoint.safetensors_io import ITEM_BYTES, TensorHeader
from miles.precision.formats import WeightFormat
from miles.precision.integer import unpack_nibbles
from miles.precision.quantized_tensor import QuantizedTensor
from miles.precision.unpack import pack_words

__all__ = ["HfLayout", "QuantLayout", "choose_layout"]

QuantLayout = Literal["fp8", "mxfp4", "compressed-tensors"]


def choose_layout(formats: set[WeightFormat], *, stacked: bool) -> QuantLayout:
    """Return the ``quant_method`` under which weights of these formats are written; ``stacked`` experts are MXFP4."""
    if stacked:
        return "mxfp4"
    return "fp8" if all(f.element == "e4m3" and f.rows == 128 == f.columns for f in formats) else "compressed-tensors"


@dataclass(frozen=True, slots=True)
class HfLayout:
    """How one Hugging Face weight is written in ``format``."""

    piece: HfSlice
    format: WeightFormat
    method: QuantLayout

    def __post_init__(self) -> None:
        name, shape = self.piece.hf_name, self.piece.shape
        format = self.format
        if self.method == "mxfp4":
            if len(shape) != 3 or format.name != "mxfp4":
                raise CheckpointError(
                    f"{name} cannot be written in {format.name}: in this model only the experts can be quantized, in "
                    "mxfp4; keep it in a wide dtype."
                )
        elif len(shape) != 2:
            raise CheckpointError(
                f"{name} cannot be written in {format.name}: it is one tensor of {shape[0]} experts; keep it in a wide "
                "dtype."
            )
        columns = shape[-2] if self.piece.transposed else shape[-1]
        whole = format.columns if format.element != "e4m3" or format.scale == "e8m0" else None
        if columns % (whole or (2 if format.bits == 4 else 1)):
            raise CheckpointError(
                f"{name} has {columns} columns, which is not a multiple of the {whole or 2} that {format.name} needs; "
                "keep it in a wide dtype or choose another format."
            )

    def headers(self) -> tuple[TensorHeader, ...]:
        """Return the headers of the tensors on disk, in order."""
        return tuple(
            TensorHeader(f"{self.piece.hf_name}{suffix}", code, shape, prod(shape) * ITEM_BYTES[code])
            for suffix, code, shape in self._parts()
        )

    def _parts(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Suffix, dtype and shape of each tensor."""
        format = self.format
        if self.method == "mxfp4":
            experts, columns, rows = self.piece.shape
            groups = (experts, rows, columns // 32)
            return [("_blocks", "U8", (*groups, 16)), ("_scales", "U8", groups)]
        rows, columns = self.piece.shape
        scales = format.scale_shape(rows, columns)
        if format.element == "e4m3":
            code = "U8" if format.scale == "e8m0" else "F32"
            suffix = "_scale_inv" if self.method == "fp8" else "_scale"
            return [("", "F8_E4M3", (rows, columns)), (suffix, code, (1,) if format.rows is None else scales)]
        if format.element == "e2m1":
            parts: list[tuple[str, str, tuple[int, ...]]] = [("_packed", "U8", (rows, columns // 2))]
            if format.global_scale:
                return [*parts, ("_scale", "F8_E4M3", scales), ("_global_scale", "F32", (1,))]
            return [*parts, ("_scale", "U8", scales)]
        each = 32 // format.bits
        zero = [("_zero_point", "I32", (-(-rows // each), scales[1]))] if format.zero_point else []
        words = (rows, -(-columns // each))
        return [("_packed", "I32", words), ("_scale", "BF16", scales), ("_shape", "I64", (2,)), *zero]

    def tensors(self, packed: QuantizedTensor) -> list[Tensor]:
        """Return the tensors that ``headers`` describes from the packed weight."""
        assert packed.format == self.format, f"{self.piece.hf_name} is {packed.format.name}, not {self.format.name}"
        format = self.format
        if self.method == "mxfp4":
            return [packed.data.unflatten(-1, (-1, 16)), packed.scale]
        if format.element == "e4m3":
            return [packed.data, packed.scale.reshape(1) if format.rows is None else packed.scale]
        if format.element == "e2m1":
            if packed.global_scale is None:
                return [packed.data, packed.scale]
            return [packed.data, packed.scale, find_divisor(packed.global_scale).reshape(1)]
        rows, columns = packed.shape
        values = unpack_nibbles(packed.data) if format.bits == 4 else packed.data.view(torch.uint8) ^ 0x80
        parts = [pack_words(values, format.bits), packed.scale, torch.tensor([rows, columns])]
        if packed.zero is not None:
            parts.append(pack_words(packed.zero.T.contiguous(), format.bits).T)
        return parts


def find_divisor(factor: Tensor) -> Tensor:
    """Return the float32 number whose reciprocal is ``factor``; the nearest where there is none.

    compressed-tensors stores the reciprocal of NVFP4's global scale.
    """
    near = 1 / factor.float()
    up, down = torch.full_like(near, torch.inf), torch.full_like(near, -torch.inf)
    for candidate in (near, torch.nextafter(near, up), torch.nextafter(near, down)):
        if bool((1 / candidate == factor).all()):
            return candidate
    return near
