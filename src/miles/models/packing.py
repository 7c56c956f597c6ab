"""Packing: quantize the parameters of a decoder into the tensors that a packed decoder of the same spec holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from miles.core.errors import MilesError
from miles.models.quantization import plan_quantization
from miles.models.spec import DecoderSpec
from miles.precision.quantize import quantize

__all__ = ["pack_params", "packed_spec"]


def packed_spec(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of the decoder that holds packed parameters."""
    if spec.quantization is None or spec.quantization.packed:
        return spec
    return replace(spec, quantization=replace(spec.quantization, packed=True))


@torch.no_grad()
def pack_params(spec: DecoderSpec, params: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Quantize the parameters that ``spec`` quantizes, and return all others as they are.

    ``params`` are rounded to ``dtype`` first, as a trainer's forward does, so that the bytes are those it multiplied
    with. A weight that is not finite is an error: its block would be, too.
    """
    plan = plan_quantization(spec)
    packed: dict[str, Tensor] = {}
    for name, param in params.items():
        if name not in plan:
            packed[name] = param
            continue
        quantized = plan[name]
        weight = quantize(
            param.detach().to(dtype), quantized.format, quantized.segments, quantized.tensor_parallel_size
        )
        if not bool(weight.scale.float().isfinite().all()):
            raise MilesError(f"{name} has values that are not finite, which cannot be quantized; lower --lr.")
        packed |= weight.tensors(name)
    return packed
