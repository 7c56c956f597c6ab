"""Quantized Hugging Face tensors of a packed decoder: the names and layouts of a quantized checkpoint, without a file.

``packed_map`` has the names under which ``miles serve`` takes packed weights; these are those of other servers, which
load tensors as a checkpoint has them (``X.weight`` and ``X.weight_scale_inv`` of block FP8).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.save_plan import SaveUnit, plan_unit, quant_method
from miles.models.quantization import QuantizedParam, plan_quantization
from miles.models.spec import DecoderSpec
from miles.precision.quantize import row_block
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["iter_quantized_hf"]


def iter_quantized_hf(spec: DecoderSpec, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a packed decoder as a quantized checkpoint has them: views for FP8, else maybe copies.

    ``weights`` may be some of its parameters; a packed one has all its tensors then.
    """
    plan, units = plan_quantization(spec), _plan_units(spec)
    for name, unit in units.items():
        if name not in weights:
            continue
        if name not in plan:
            for piece in unit.pieces:
                yield piece.hf_name, piece.view(weights[name])
            continue
        packed = _find_packed(name, plan[name], weights)
        for header, tensor in zip(unit.headers(), unit.views(packed), strict=True):
            yield header.name, tensor


def _find_packed(name: str, quantized: QuantizedParam, weights: Mapping[str, Tensor]) -> QuantizedTensor:
    rows = weights[name].shape[-2]
    block = row_block(quantized.format, rows, quantized.segments, quantized.tensor_parallel_size)
    return QuantizedTensor.from_tensors(quantized.format, name, weights, block)


@lru_cache(maxsize=8)
def _plan_units(spec: DecoderSpec) -> Mapping[str, SaveUnit]:
    """The tensors that every parameter is written as; CheckpointError if the format does not allow one of them."""
    pieces = build_param_map(spec)
    formats = {name: quantized.format for name, quantized in plan_quantization(spec).items()}
    method = quant_method(pieces, formats)
    # The dtype of a unit is that of a file; published tensors keep their own.
    return {name: plan_unit(name, own, torch.bfloat16, formats.get(name), method) for name, own in pieces.items()}
