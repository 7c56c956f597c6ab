"""LoRA factors as parameters of a decoder: ``X.lora_a`` and ``X.lora_b`` beside ``X.weight``. No torch.

A weight that is fused of several targets has their A factors one after the other in ``lora_a`` [S r, I], and their B
factors in ``lora_b`` [O, r], O being the rows of all targets. On the wire each factor has PEFT's name.

Shapes: I inputs, O outputs of the targets, S targets, r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from miles.models.checkpoint.param_slices import HfSlice, ParamMap, concat_slices
from miles.models.checkpoint.peft import lora_a_name, lora_b_name
from miles.models.lora.targets import LoraSpec, LoraTarget, targets_from_modules
from miles.models.spec import AdapterSpec, DecoderSpec

__all__ = ["LORA_A", "LORA_B", "LoraLayout", "adapter_spec", "build_factor_map", "factor_name", "plan_adapters"]

LORA_A = "lora_a"
LORA_B = "lora_b"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayout:
    """The targets in one weight: which rows of it each covers, ascending, and the scale of their products."""

    rows: tuple[tuple[int, int], ...]
    rank: int
    scale: float


def adapter_spec(lora: LoraSpec) -> AdapterSpec:
    """Return the adapters as a part of the spec of a decoder."""
    return AdapterSpec(rank=lora.rank, alpha=lora.alpha, modules=tuple(target.module for target in lora.targets))


def factor_name(param_name: str, factor: str) -> str:
    """Return the name of a weight's factor in a decoder.

    >>> factor_name("layers.0.attention.qkv.weight", LORA_A)
    'layers.0.attention.qkv.lora_a'
    """
    return f"{param_name.removesuffix('.weight')}.{factor}"


@lru_cache(maxsize=8)
def plan_adapters(spec: DecoderSpec) -> Mapping[str, LoraLayout]:
    """Return the layout of every weight with adapters, by its parameter name; empty if the decoder has none."""
    adapters = spec.adapters
    if adapters is None:
        return {}
    return {
        name: LoraLayout(
            rows=tuple(target.rows for target in targets),
            rank=adapters.rank,
            scale=adapters.scale,
        )
        for name, targets in _targets_by_param(spec, adapters).items()
    }


def build_factor_map(spec: DecoderSpec) -> ParamMap:
    """Map every factor of a decoder to the tensors it consists of on the wire."""
    adapters = spec.adapters
    if adapters is None:
        return {}
    factors: dict[str, tuple[HfSlice, ...]] = {}
    for name, targets in _targets_by_param(spec, adapters).items():
        factors[factor_name(name, LORA_A)] = concat_slices(
            *((lora_a_name(target), (adapters.rank, target.inputs)) for target in targets)
        )
        factors[factor_name(name, LORA_B)] = concat_slices(
            *((lora_b_name(target), (target.outputs, adapters.rank)) for target in targets)
        )
    return factors


def _targets_by_param(spec: DecoderSpec, adapters: AdapterSpec) -> dict[str, list[LoraTarget]]:
    targets: dict[str, list[LoraTarget]] = {}
    for target in targets_from_modules(spec, adapters.modules):
        targets.setdefault(target.param_name, []).append(target)
    return targets
