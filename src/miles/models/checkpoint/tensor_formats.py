"""Tensor formats: the stored tensors that hold one weight, plain or quantized. No torch.

Shapes: N rows and K columns of a matrix, n and k its blocks, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.models.checkpoint.quant_config import WeightScheme
from miles.models.checkpoint.safetensors_io import StoredTensor

__all__ = [
    "AwqTensor",
    "GptqTensor",
    "Mxfp4Tensor",
    "PackedTensor",
    "PlainTensor",
    "QuantizedFormat",
    "ScaledTensor",
    "TensorFormat",
    "main_tensor",
    "stored_parts",
]


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor in a plain float dtype."""

    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class ScaledTensor:
    """An FP8 or INT8 tensor with one scale for each ``block`` (rows, columns) of a matrix; ``scale_name`` is its name.

    Scales in U8 are E8M0 exponents (MXFP8).
    """

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]
    scale_name: str


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """An MXFP4 tensor of gpt-oss: groups of 32 four-bit floats, with one power-of-two scale each.

    transformers keeps such a matrix transposed relative to its rows on disk.
    """

    blocks: StoredTensor
    scales: StoredTensor


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A matrix of packed values: pairs of E2M1 in U8 [N, K / 2], or offset-binary integers in I32 [N, K bits / 32].

    ``scale`` is [N, G]; ``zero`` I32 [N / 8, G] (eight rows in a word) and ``global_scale`` are absent in some formats.
    ``divides``: the global scale is a divisor.
    """

    name: str
    packed: StoredTensor
    scale: StoredTensor
    scheme: WeightScheme
    zero: StoredTensor | None = None
    global_scale: StoredTensor | None = None
    divides: bool = False


@dataclass(frozen=True, slots=True)
class AwqTensor:
    """An AWQ matrix: ``qweight`` I32 [K, N / 8], ``qzeros`` I32 [G, N / 8], ``scales`` [G, N]; transposed on disk."""

    name: str
    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    group: int


@dataclass(frozen=True, slots=True)
class GptqTensor:
    """A GPTQ matrix: ``qweight`` I32 [K bits / 32, N], ``qzeros`` I32 [G, N bits / 32], ``scales`` [G, N], transposed.

    ``g_idx`` [K] is the group of each column, if it is stored.
    """

    name: str
    qweight: StoredTensor
    qzeros: StoredTensor
    scales: StoredTensor
    g_idx: StoredTensor | None
    scheme: WeightScheme
    group: int


QuantizedFormat = ScaledTensor | Mxfp4Tensor | PackedTensor | AwqTensor | GptqTensor
TensorFormat = PlainTensor | QuantizedFormat


def main_tensor(tensor: TensorFormat) -> StoredTensor:
    """Return the stored tensor that holds the values."""
    match tensor:
        case PlainTensor() | ScaledTensor():
            return tensor.stored
        case Mxfp4Tensor():
            return tensor.blocks
        case PackedTensor():
            return tensor.packed
        case AwqTensor() | GptqTensor():
            return tensor.qweight


def stored_parts(tensor: TensorFormat) -> tuple[StoredTensor, ...]:
    """Return every stored tensor of a format: the values first, then scales and zero points."""
    match tensor:
        case PlainTensor():
            parts = (tensor.stored,)
        case ScaledTensor():
            parts = (tensor.stored, tensor.scale)
        case Mxfp4Tensor():
            parts = (tensor.blocks, tensor.scales)
        case PackedTensor():
            parts = (tensor.packed, tensor.scale, tensor.zero, tensor.global_scale)
        case AwqTensor():
            parts = (tensor.qweight, tensor.qzeros, tensor.scales)
        case GptqTensor():
            parts = (tensor.qweight, tensor.qzeros, tensor.scales, tensor.g_idx)
    return tuple(part for part in parts if part is not None)
