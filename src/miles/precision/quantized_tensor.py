"""QuantizedTensor: the packed values of a weight and their scales, in the layout that engine and trainer multiply with.

Shapes: E stacked matrices (may be absent), N rows, K columns, n and k their blocks with a scale; G = K / group.

| element | ``data`` | ``scale`` |
|---|---|---|
| e4m3 | float8_e4m3fn [E, N, K] | [E, n, k]; n = N if blocks of rows would cross from one fused weight to the next |
| int8 | int8 [E, N, K] | bfloat16 [E, N, G] |
| int4, e2m1 | uint8 [E, N, K / 2], the value of the even column in the low half of a byte | [E, N, G] |

int4 values are stored as offset binary (value + 8; with a zero point the unsigned value); ``zero`` is uint8 [E, N, G],
one zero point in a byte. E8M0 scales are uint8 (an exponent with a bias of 127), E4M3 scales are float8_e4m3fn, and
``global_scale`` is float32 [E] ([] for one matrix): a value is ``element * scale * global_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from miles.precision.formats import BackwardPrecision, WeightFormat

__all__ = ["QuantizedActivation", "QuantizedTensor", "StraightThroughWeight", "Weight"]


class QuantizedTensor(NamedTuple):
    """A packed weight. ``row_block`` is the number of rows that share a row of ``scale``."""

    format: WeightFormat
    data: Tensor
    scale: Tensor
    row_block: int
    zero: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, [E, N, K] or [N, K]."""
        if self.format.bits == 8:
            return self.data.shape
        return torch.Size((*self.data.shape[:-1], 2 * self.data.shape[-1]))

    @property
    def column_block(self) -> int:
        """The number of columns that share a scale."""
        return self.format.columns or self.shape[-1]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the packed tensors of the parameter ``name``, by their own names."""
        parts = {"": self.data, "_scale": self.scale, "_zero": self.zero, "_global_scale": self.global_scale}
        return {f"{name}{suffix}": tensor for suffix, tensor in parts.items() if tensor is not None}

    @classmethod
    def from_tensors(
        cls, format: WeightFormat, name: str, tensors: Mapping[str, Tensor], row_block: int
    ) -> QuantizedTensor:
        """Build it from tensors named as by ``tensors``."""
        return cls(
            format,
            tensors[name],
            tensors[f"{name}_scale"],
            row_block,
            tensors.get(f"{name}_zero"),
            tensors.get(f"{name}_global_scale"),
        )


class QuantizedActivation(NamedTuple):
    """Quantized rows [T, K] with float32 scales [T, K / columns]; ``columns`` values of a row share one.

    ``dtype`` is what the rows had, and what results take; ``wide`` are the rows before they were quantized, if
    something else reads them too.
    """

    data: Tensor
    scale: Tensor
    columns: int
    dtype: torch.dtype
    wide: Tensor | None = None


class StraightThroughWeight(NamedTuple):
    """A weight in training: the forward multiplies with ``quantize(weight, format, segments)``, and the gradient of
    that is passed to ``weight`` unchanged (straight-through estimator).
    """

    format: WeightFormat
    weight: Tensor
    segments: tuple[int, ...]
    backward: BackwardPrecision = "wide"

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape


Weight: TypeAlias = Tensor | QuantizedTensor | StraightThroughWeight
"""The weight of a linear layer, or the stacked weights of experts."""
