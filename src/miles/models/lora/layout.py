"""LoRA factors as parameters of a decoder: ``X.lora_a`` and ``X.lora_b`` beside ``X.weight``. No torch.

A weight that is fused of several targets has their A factors one after the other in ``lora_a`` [S r, I], and their B
factors in ``lora_b`` [O, r], O being the rows of all targets. On the wire each factor has PEFT's name.

The stacked experts ``X`` have ``X_lora_a`` [S E, r, I] and ``X_lora_b`` [S E, O / S, r]: all experts of the first
target, then those of the second. A factor that experts share is there once for each target. On the wire the factors of
a target's experts are one tensor, whose name has an asterisk for the experts' numbers.

Shapes: I inputs, O outputs of the targets, S targets, E experts, r rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from miles.models.checkpoint.param_slices import HfSlice, ParamMap, concat_slices
from miles.models.checkpoint.peft import lora_a_name, lora_b_name
from miles.models.lora.targets import LoraSpec, LoraTarget, targets_from_modules
from miles.models.spec import AdapterSpec, DecoderSpec

__all__ = [
    "LORA_A",
    "LORA_B",
    "LoraLayout",
    "adapter_spec",
    "build_factor_map",
    "build_layout",
    "build_lora_spec",
    "factor_name",
    "group_targets",
    "plan_adapters",
]

LORA_A = "lora_a"
LORA_B = "lora_b"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLayout:
    """The targets in one weight: which rows of it each covers, ascending, and the scale of their products.

    ``experts`` are, of stacked experts, the numbers of A and of B matrices of a target; a shared factor is one.
    """

    rows: tuple[tuple[int, int], ...]
    rank: int
    scale: float
    experts: tuple[int, int] | None = None


def adapter_spec(lora: LoraSpec) -> AdapterSpec:
    """Return the adapters as a part of the spec of a decoder."""
    return AdapterSpec(
        rank=lora.rank,
        alpha=lora.alpha,
        modules=tuple(target.module for target in lora.targets),
        shared_outer=lora.shared_outer,
        use_rslora=lora.use_rslora,
    )


def factor_name(param_name: str, factor: str) -> str:
    """Return the name of a weight's factor in a decoder.

    >>> factor_name("layers.0.attention.qkv.weight", LORA_A)
    'layers.0.attention.qkv.lora_a'
    >>> factor_name("layers.0.moe.down", LORA_B)
    'layers.0.moe.down_lora_b'
    """
    if param_name.endswith(".weight"):
        return f"{param_name.removesuffix('.weight')}.{factor}"
    return f"{param_name}_{factor}"


def build_layout(lora: LoraSpec, targets: Sequence[LoraTarget]) -> LoraLayout:
    """Return the layout of the targets in one weight."""
    experts = None
    if targets[0].num_experts:
        a_ErI, b_EOr = lora.factor_shapes(targets[0])
        experts = a_ErI[0], b_EOr[0]
    rows = tuple(target.rows for target in targets)
    return LoraLayout(rows=rows, rank=lora.rank, scale=lora.scale, experts=experts)


@lru_cache(maxsize=8)
def plan_adapters(spec: DecoderSpec) -> Mapping[str, LoraLayout]:
    """Return the layout of every weight with adapters, by its parameter name; empty if the decoder has none."""
    lora = build_lora_spec(spec)
    if lora is None:
        return {}
    return {name: build_layout(lora, targets) for name, targets in group_targets(lora.targets).items()}


def build_factor_map(spec: DecoderSpec) -> ParamMap:
    """Map every factor of a decoder to the tensors it consists of on the wire."""
    lora = build_lora_spec(spec)
    if lora is None:
        return {}
    factors: dict[str, tuple[HfSlice, ...]] = {}
    for name, targets in group_targets(lora.targets).items():
        shapes = [lora.factor_shapes(target) for target in targets]
        factors[factor_name(name, LORA_A)] = concat_slices(
            *((lora_a_name(target), a) for target, (a, _) in zip(targets, shapes, strict=True))
        )
        factors[factor_name(name, LORA_B)] = concat_slices(
            *((lora_b_name(target), b) for target, (_, b) in zip(targets, shapes, strict=True))
        )
    return factors


def group_targets(targets: Iterable[LoraTarget]) -> dict[str, list[LoraTarget]]:
    """Return the targets of each decoder parameter."""
    grouped: dict[str, list[LoraTarget]] = {}
    for target in targets:
        grouped.setdefault(target.param_name, []).append(target)
    return grouped


def build_lora_spec(spec: DecoderSpec) -> LoraSpec | None:
    """Return the adapters that a decoder holds, as the targets of its own spec, which may be that of one rank."""
    adapters = spec.adapters
    if adapters is None:
        return None
    return LoraSpec(
        rank=adapters.rank,
        alpha=adapters.alpha,
        targets=targets_from_modules(spec, adapters.modules),
        shared_outer=adapters.shared_outer,
        use_rslora=adapters.use_rslora,
    )
