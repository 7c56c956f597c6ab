"""Weight formats below 16 bits: element type, block of a scale, scale type and activation format. No torch.

A scale belongs to a block of ``rows`` x ``columns`` values of a weight [N, K]; None is all of them. Activations, where
they are quantized too, have one scale for each row and each ``activation_columns`` values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from miles.core.errors import UsageError

__all__ = [
    "FORMATS",
    "BackwardPrecision",
    "ElementType",
    "FormatName",
    "QuantizationSpec",
    "ScaleType",
    "WeightFormat",
    "get_format",
]

ElementType = Literal["e4m3", "e2m1", "int8", "int4"]
ScaleType = Literal["float32", "bfloat16", "e8m0", "e4m3"]

FormatName = Literal[
    "fp8",
    "fp8_pow2",
    "fp8_channel",
    "fp8_tensor",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "int8",
    "int8_g128",
    "int8_g32",
    "int4",
    "int4_g32",
    "int4_asym",
    "int4_g32_asym",
]
"""The names of ``FORMATS``."""
BackwardPrecision = Literal["wide", "e4m3", "hybrid"]
"""The precision of the GEMMs in backward: the model's dtype, or FP8 with gradients in E4M3 or (hybrid) E5M2."""

_BITS: Mapping[str, int] = {"e4m3": 8, "e2m1": 4, "int8": 8, "int4": 4}
_SCALE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How a weight [N, K], or a stack of them [E, N, K], is stored and multiplied.

    ``power_of_two``: scales are rounded up to a power of two. ``zero_point``: integers are asymmetric. With a
    ``global_scale`` every matrix has one more float32 factor. ``quantizes_activations``: the input is quantized to
    the same element type, with a scale for each row and each ``activation_columns`` values (None is the whole row);
    otherwise the weight is dequantized and the input keeps its dtype.

    >>> FORMATS["fp8"].bytes_of(256, 256), FORMATS["int4"].bytes_of(256, 256)
    (65552, 33792)
    """

    name: str
    element: ElementType
    rows: int | None
    columns: int | None
    scale: ScaleType
    power_of_two: bool = False
    zero_point: bool = False
    global_scale: bool = False
    quantizes_activations: bool = False
    activation_columns: int | None = None

    @property
    def bits(self) -> int:
        """Bits of one value."""
        return _BITS[self.element]

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the tensors that belong to a packed parameter, beside the values themselves."""
        zero = ("_zero",) if self.zero_point else ()
        return ("_scale", *zero, *(("_global_scale",) if self.global_scale else ()))

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the scales of one matrix.

        >>> FORMATS["fp8"].scale_shape(200, 256)
        (2, 2)
        """
        return -(-rows // (self.rows or rows)), -(-columns // (self.columns or columns))

    def row_block(self, rows: int, segments: Sequence[int] | None = None, parts: int = 1) -> int:
        """Return how many rows share a stored scale.

        It is 1 where a block of the format would cross into the next segment, and where the weight is to be sharded
        into ``parts``: a shard may begin inside a block.
        """
        block = self.rows or rows
        lengths = (rows,) if segments is None else segments
        return block if parts == 1 and all(length % block == 0 for length in lengths[:-1]) else 1

    def stored_bytes(self, rows: int, columns: int, segments: Sequence[int] | None = None, parts: int = 1) -> int:
        """Bytes of one packed matrix as a decoder holds it, fused of ``segments``."""
        scales = -(-rows // self.row_block(rows, segments, parts)) * self.scale_shape(rows, columns)[1]
        each = _SCALE_BYTES[self.scale] + (1 if self.zero_point else 0)
        return rows * columns * self.bits // 8 + scales * each + (4 if self.global_scale else 0)

    def bytes_of(self, rows: int, columns: int) -> int:
        """Bytes of one packed matrix with its scales."""
        r, c = self.scale_shape(rows, columns)
        extra = r * c * (_SCALE_BYTES[self.scale] + (1 if self.zero_point else 0)) + (4 if self.global_scale else 0)
        return rows * columns * self.bits // 8 + extra


def _integer(name: str, element: ElementType, group: int | None, *, zero_point: bool = False) -> WeightFormat:
    return WeightFormat(name=name, element=element, rows=1, columns=group, scale="bfloat16", zero_point=zero_point)


FORMATS: Mapping[str, WeightFormat] = {
    f.name: f
    for f in (
        WeightFormat(
            name="fp8",
            element="e4m3",
            rows=128,
            columns=128,
            scale="float32",
            quantizes_activations=True,
            activation_columns=128,
        ),
        WeightFormat(
            name="fp8_pow2",
            element="e4m3",
            rows=128,
            columns=128,
            scale="float32",
            power_of_two=True,
            quantizes_activations=True,
            activation_columns=128,
        ),
        WeightFormat(
            name="fp8_channel", element="e4m3", rows=1, columns=None, scale="float32", quantizes_activations=True
        ),
        WeightFormat(
            name="fp8_tensor", element="e4m3", rows=None, columns=None, scale="float32", quantizes_activations=True
        ),
        WeightFormat(
            name="mxfp8",
            element="e4m3",
            rows=1,
            columns=32,
            scale="e8m0",
            power_of_two=True,
            quantizes_activations=True,
            activation_columns=32,
        ),
        WeightFormat(name="mxfp4", element="e2m1", rows=1, columns=32, scale="e8m0", power_of_two=True),
        WeightFormat(name="nvfp4", element="e2m1", rows=1, columns=16, scale="e4m3", global_scale=True),
        _integer("int8", "int8", None),
        _integer("int8_g128", "int8", 128),
        _integer("int8_g32", "int8", 32),
        _integer("int4", "int4", 128),
        _integer("int4_g32", "int4", 32),
        _integer("int4_asym", "int4", 128, zero_point=True),
        _integer("int4_g32_asym", "int4", 32, zero_point=True),
    )
}
"""Every format by its name, as ``--rollout-precision`` and ``--train-precision`` take it."""


def get_format(name: str) -> WeightFormat:
    """Return the format of this name; a UsageError lists the names where there is none."""
    if name not in FORMATS:
        raise UsageError(f"{name} is not a precision; use one of {', '.join(FORMATS)}.")
    return FORMATS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec:
    """Which layers of a decoder are quantized, and how.

    ``packed``: their parameters hold the packed tensors, as in an engine; otherwise they keep the model's dtype and are
    quantized in every forward, as in training. The first ``layers_at_start`` and the last ``layers_at_end`` layers keep
    the model's dtype; with ``experts_only`` so does everything but routed experts. Scales are stored such that the
    parameters can be sharded over ``tensor_parallel_size`` ranks. ``backward`` is the precision of gradients' GEMMs.
    """

    format: WeightFormat
    packed: bool
    layers_at_start: int = 0
    layers_at_end: int = 0
    experts_only: bool = False
    tensor_parallel_size: int = 1
    backward: BackwardPrecision = "wide"
