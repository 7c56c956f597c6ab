"""Temporary memory of quantizing a weight in a training step, for formats without a kernel that does it. No torch.

A format with a kernel needs the packed weight and its transpose. Elsewhere torch quantizes and dequantizes a whole
parameter, all experts of a layer at once, through several tensors in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod

from miles.models.checkpoint.hf_names import HF_NAMES
from miles.models.checkpoint.param_map import build_layer_map, param_shape
from miles.models.checkpoint.param_slices import ModuleNames
from miles.models.families.registry import find_family
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.quantization import find_quantized_layer, fused_segments, quantizes_layer
from miles.models.spec import DecoderSpec, LayerSpec
from miles.precision.formats import ElementType, QuantizationSpec, ScaleType

__all__ = ["DEQUANTIZE_BYTES", "QUANTIZE_BYTES", "quantize_workspace_bytes"]

QUANTIZE_BYTES: Mapping[tuple[ElementType, ScaleType], float] = {
    ("e4m3", "float32"): 19.0,
    ("e4m3", "e8m0"): 9.0,
    ("e2m1", "e8m0"): 11.0,
    ("e2m1", "e4m3"): 15.3,
    ("int8", "bfloat16"): 16.0,
    ("int4", "bfloat16"): 16.2,
}
"""Bytes at the peak of quantizing in torch, for each value of a weight in half precision."""

DEQUANTIZE_BYTES = 12.2
"""Bytes at the peak of dequantizing in torch, for each value of a weight."""

# The packed weight and its transpose.
_KERNEL_BYTES = 2.0
_KERNEL_BLOCK = 128


def quantize_workspace_bytes(spec: DecoderSpec, *, size: int, fused: bool, experts: int = 1) -> int:
    """Compute the largest temporary of a step for one quantized parameter; 0 if nothing is quantized.

    ``size`` is the bytes of a value of the model, and ``experts`` the number of ranks that share the experts.
    """
    quantization = spec.quantization
    if quantization is None or isinstance(spec, HfAdapterSpec):
        return 0
    layers = {layer for i, layer in enumerate(spec.layers) if quantizes_layer(quantization, i, spec.num_layers)}
    largest = (_layer_workspace(layer, spec.hidden_size, spec.family, quantization, fused, experts) for layer in layers)
    # A weight in float32 is not copied to it first.
    values, each = max(largest, key=lambda pair: pair[0] * pair[1], default=(0, 0.0))
    return round(values * (each if size < 4 else max(0.0, each - 4)))


@lru_cache(maxsize=256)
def _layer_workspace(
    layer: LayerSpec, width: int, family: str, quantization: QuantizationSpec, fused: bool, experts: int
) -> tuple[int, float]:
    """Return the values of the parameter that needs the most, and the bytes for each."""
    names = ModuleNames("layers.0", "", {**HF_NAMES, **find_family(family).names})
    found = (0, 0.0)
    for name, slices in build_layer_map(layer, width, names).items():
        if find_quantized_layer(name, experts_only=quantization.experts_only) is None:
            continue
        *stack, rows, columns = param_shape(slices)
        values = -(-prod(stack) // (experts if stack else 1)) * rows * columns
        each = _bytes_per_value(quantization, rows, fused_segments(slices), fused)
        found = max(found, (values, each), key=lambda pair: pair[0] * pair[1])
    return found


def _bytes_per_value(quantization: QuantizationSpec, rows: int, segments: tuple[int, ...], fused: bool) -> float:
    format = quantization.format
    if quantization.packed:
        return DEQUANTIZE_BYTES
    is_block = format.rows == format.columns == _KERNEL_BLOCK == format.row_block(rows, segments)
    if fused and format.element == "e4m3" and format.scale == "float32" and (is_block or format.rows == 1):
        return _KERNEL_BYTES if quantization.backward == "e4m3" else 1.0 + DEQUANTIZE_BYTES
    return max(QUANTIZE_BYTES[format.element, format.scale], format.bits / 8 + DEQUANTIZE_BYTES)
