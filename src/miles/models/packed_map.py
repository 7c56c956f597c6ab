"""Names of packed weights on the wire: a Hugging Face name for the values, and one with a suffix for their scales.

``X.q_proj.weight`` has the packed rows of that projection, ``X.q_proj.weight_scale`` their scales (and ``_zero``,
``_global_scale``). Tensors that belong to all rows of a fused parameter have the parameter's own name. LoRA factors
have PEFT's names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import HfSlice, param_shape
from miles.models.lora.layout import build_factor_map
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.spec import DecoderSpec
from miles.precision.quantize import packed_layout, row_block

__all__ = ["build_packed_map"]


@lru_cache(maxsize=8)
def build_packed_map(spec: DecoderSpec) -> Mapping[str, tuple[HfSlice, ...]]:
    """Map every parameter of a decoder, which may be packed and have adapters, to its tensors on the wire."""
    wide = build_param_map(spec)
    plan = {name: quantized for name, quantized in plan_quantization(spec).items() if quantized.packed}
    params: dict[str, tuple[HfSlice, ...]] = {}
    for name, slices in wide.items():
        params |= _pack_slices(name, slices, plan[name]) if name in plan else {name: slices}
    return params | build_factor_map(spec)


def _pack_slices(name: str, slices: tuple[HfSlice, ...], quantized: QuantizedParam) -> dict[str, tuple[HfSlice, ...]]:
    format, parts = quantized.format, quantized.tensor_parallel_size
    shape = param_shape(slices)
    block = row_block(format, shape[-2], quantized.segments, parts)
    packed: dict[str, tuple[HfSlice, ...]] = {}
    for suffix, (packed_shape, _) in packed_layout(format, shape, quantized.segments, parts).items():
        own = f"{name}{suffix}"
        if len(packed_shape) < len(shape):
            rows = packed_shape[0] if packed_shape else 1
            packed[own] = (HfSlice(own, tuple(packed_shape), 0, rows),)
        elif slices[0].matrix_rows is not None:
            rows = block if suffix else 1
            packed[own] = tuple(_pack_stacked(each, suffix, rows, packed_shape[-1]) for each in slices)
        elif slices[0].expert is None and len(shape) == 3:  # stacked in the checkpoint as well
            packed[own] = (HfSlice(f"{slices[0].hf_name}{suffix}", tuple(packed_shape), 0, packed_shape[0]),)
        else:
            packed[own] = tuple(_pack_slice(each, suffix, block if suffix else 1, packed_shape[-1]) for each in slices)
    return packed


def _pack_stacked(piece: HfSlice, suffix: str, block: int, columns: int) -> HfSlice:
    """``_pack_slice`` of stacked experts of which the checkpoint has gates and ups in two tensors."""
    assert piece.matrix_rows is not None
    start, stop = piece.matrix_rows[0] // block, -(-piece.matrix_rows[1] // block)
    shape = (piece.shape[0], stop - start, columns)
    return replace(piece, hf_name=f"{piece.hf_name}{suffix}", shape=shape, matrix_rows=(start, stop))


def _pack_slice(piece: HfSlice, suffix: str, block: int, columns: int) -> HfSlice:
    """The part of a packed tensor with ``block`` rows of the weight to a row of its own."""
    start, stop = piece.start // block, -(-piece.stop // block)
    return replace(
        piece,
        hf_name=f"{piece.hf_name}{suffix}",
        shape=(stop - start, columns),
        start=start,
        stop=stop,
        transposed=False,
    )
