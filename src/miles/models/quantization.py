"""Quantization plan of a decoder: the format and the fused segments of each quantized parameter. No torch.

Quantized are the projections of attention and MLA, MLPs, shared and routed experts, and the large projections of
recurrent layers. Embeddings, the head, norms, routers, indexers and small projections keep the model's dtype, and so
does MLA's ``kv_b``, which the engine absorbs into queries and outputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from miles.core.errors import UsageError
from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import HfSlice, param_shape, weight_segments
from miles.models.spec import DecoderSpec
from miles.precision.formats import BackwardPrecision, QuantizationSpec, WeightFormat

__all__ = [
    "MEGATRON_RECIPES",
    "QuantizedParam",
    "count_packed_columns",
    "find_quantized_layer",
    "fused_segments",
    "plan_quantization",
    "quantizes_layer",
]

MEGATRON_RECIPES: Mapping[str, str] = {
    "fp8": "blockwise",
    "fp8_pow2": "blockwise",
    "fp8_tensor": "tensorwise",
    "mxfp8": "mxfp8",
}
"""The ``fp8_recipe`` of Transformer Engine for a format."""

_EXPERTS = re.compile(r"layers\.(\d+)\.moe\.(gate_up|up|down)")
_LINEARS = re.compile(
    r"layers\.(\d+)\.((attention|relative)\.(qkv|output)|mla\.(q|q_a|q_b|kv_a|output)|compressed\.(q_a|q_b|kv|output)|delta\.(qkvz|output)|kda\.(qkv|output)"
    r"|mamba\.(input|output)|short_conv\.(input|output)|mlp\.(gate_up|up|down)|moe\.shared\.(gate_up|up|down)"
    r"|moe\.(into|outof))\.weight"
)


@dataclass(frozen=True, slots=True)
class QuantizedParam:
    """How one parameter is quantized. ``segments`` are the rows of the checkpoint's tensors that it is fused of."""

    format: WeightFormat
    segments: tuple[int, ...]
    packed: bool
    tensor_parallel_size: int = 1
    backward: BackwardPrecision = "wide"

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the names of the packed tensors."""
        return ("", *self.format.suffixes)


@lru_cache(maxsize=8)
def plan_quantization(spec: DecoderSpec) -> Mapping[str, QuantizedParam]:
    """Return the quantized parameters of a decoder by name; UsageError if a shape does not allow the format."""
    quantization = spec.quantization
    if quantization is None:
        return {}
    plan: dict[str, QuantizedParam] = {}
    for name, slices in build_param_map(spec).items():
        if not _is_quantized(name, spec, quantization):
            continue
        columns = param_shape(slices)[-1]
        _check_columns(name, columns, quantization.format)
        segments = fused_segments(slices)
        plan[name] = QuantizedParam(
            quantization.format,
            segments,
            quantization.packed,
            quantization.tensor_parallel_size,
            quantization.backward,
        )
    return plan


def _is_quantized(name: str, spec: DecoderSpec, quantization: QuantizationSpec) -> bool:
    layer = find_quantized_layer(name, experts_only=quantization.experts_only)
    return layer is not None and quantizes_layer(quantization, layer, spec.num_layers)


def find_quantized_layer(name: str, *, experts_only: bool) -> int | None:
    """Return the layer of a parameter that can be quantized; None for those that keep the model's dtype."""
    match = _EXPERTS.fullmatch(name) or (None if experts_only else _LINEARS.fullmatch(name))
    return None if match is None else int(match[1])


def quantizes_layer(quantization: QuantizationSpec, layer: int, num_layers: int) -> bool:
    """Return whether a layer is not one of those at the start or end that keep the model's dtype."""
    return quantization.layers_at_start <= layer < num_layers - quantization.layers_at_end


def fused_segments(slices: Sequence[HfSlice]) -> tuple[int, ...]:
    """The rows of each tensor of the checkpoint in the parameter, or in one expert's matrix."""
    if slices[0].expert is not None:
        return tuple(each.stop - each.start for each in slices if each.expert == 0)
    shape = param_shape(tuple(slices))
    if slices[0].matrix_rows is not None:
        return weight_segments(tuple(slices))
    if len(shape) == 3:  # experts that are stacked in the checkpoint
        return (shape[1],)
    return tuple(each.stop - each.start for each in slices)


def _check_columns(name: str, columns: int, format: WeightFormat) -> None:
    group = format.columns or columns
    needed = 1 if format.name.startswith("fp8") else group
    if columns % needed:
        raise UsageError(
            f"{name} has {columns} input channels, which {format.name} cannot quantize in groups of {group}; choose "
            "another precision, such as one with smaller groups."
        )


def count_packed_columns(spec: DecoderSpec, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return how many columns of a weight one column of its packed tensor has, given the shapes of all parameters."""
    slices = build_param_map(spec) if spec.quantization is not None else {}
    return {
        name: param_shape(slices[name])[-1] // shapes[name][-1]
        for name, quantized in plan_quantization(spec).items()
        if quantized.packed
    }
