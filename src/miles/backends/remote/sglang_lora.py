"""LoRA adapters of servers: which targets stock SGLang takes, its flags, and the names of an adapter. No torch.

SGLang applies adapters beside its weights. It fuses the projections of a layer (query, key and value; gate and up), and
takes an adapter of a fused one only if all its parts have factors: parts without an adapter get factors of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.models.checkpoint.param_slices import HfSlice
from miles.models.checkpoint.peft import list_factor_files, lora_a_name, lora_b_name, peft_tensor_name
from miles.models.lora.layout import group_targets
from miles.models.lora.targets import (
    LoraSpec,
    LoraTarget,
    list_targets,
    peft_target_parameters,
    targets_from_modules,
)
from miles.models.spec import DecoderSpec

__all__ = ["MAX_ADAPTERS", "AdapterFormat", "build_adapter_format", "build_lora_flags", "find_target_problem"]

MAX_ADAPTERS = 8
"""Most adapters that one batch may have: versions whose requests have not ended, and the base."""

# Modules of a decoder layer whose projections SGLang names as the checkpoint does.
_MODULES = ("attention", "mlp")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj")
# Projections that SGLang fuses: an adapter has factors of all of them.
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPieces:
    """A factor of all experts of a target, and what of it each tensor of an adapter's file is."""

    target: LoraTarget
    is_a: bool
    pieces: tuple[HfSlice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFormat:
    """A run's adapter as SGLang takes it.

    ``names`` are the tensors of the adapter by the names under which factors are published, and ``zeros`` the shapes of
    those that are not published because their projections have no adapter. ``problem`` is why SGLang does not take it.

    ``num_versions`` of it stay loaded, on servers of ours, which take any target; 0 if these are sent none by name.
    ``experts`` are the targets of factors that belong to routed experts, which a file has one by one.
    """

    rank: int
    config: Mapping[str, Any]
    names: Mapping[str, str]
    zeros: Mapping[str, tuple[int, ...]]
    problem: str | None = None
    num_versions: int = 0
    experts: Mapping[str, ExpertPieces] = field(default_factory=dict)


def find_target_problem(spec: DecoderSpec, targets: Iterable[LoraTarget]) -> str | None:
    """Why SGLang does not take adapters of these targets, or None."""
    for target in targets:
        if target.is_head:
            return f"{target.module} is the output layer, of which it is sent no adapters"
        parts = target.param_name.split(".")
        if target.is_vision or target.num_experts or parts[2] not in _MODULES or target.short_name not in _PROJECTIONS:
            return f"{target.module} is none of attention's or a dense MLP's projections that it takes adapters of"
        if spec.moe is not None and parts[2] == "mlp":
            return f"with an adapter of {target.module} it would reserve adapters for every routed expert"
    for group in group_targets(list_targets(spec)).values():
        names = {target.short_name for target in group}
        if any(0 < len(names & set(fused)) < len(fused) for fused in _FUSED) and set(group) & set(targets):
            return f"{group[0].module} is not fused with the projections that it is fused with there"
    return None


def build_lora_flags(
    spec: DecoderSpec, lora: LoraSpec, *, device: str, num_adapters: int
) -> dict[str, tuple[str, ...]]:
    """The flags of a server that takes the run's adapters, by their names; a user's own replace them."""
    flags: dict[str, tuple[str, ...]] = {
        "enable-lora": (),
        "max-lora-rank": (str(lora.rank),),
        "lora-target-modules": tuple(_list_short_names(_complete_targets(spec, lora.targets))),
        "max-loras-per-batch": (str(min(MAX_ADAPTERS, num_adapters)),),
        "lora-strict-loading": (),
    }
    if device == "cpu":
        flags["lora-backend"] = ("torch_native",)
    return flags


def build_adapter_format(spec: DecoderSpec, *, num_versions: int = 0) -> AdapterFormat | None:
    """The format of the adapters that a decoder has; None if it has none."""
    adapters = spec.adapters
    if adapters is None:
        return None
    targets = targets_from_modules(spec, adapters.modules)
    lora = LoraSpec(
        rank=adapters.rank,
        alpha=adapters.alpha,
        targets=targets,
        shared_outer=adapters.shared_outer,
        use_rslora=adapters.use_rslora,
    )
    names: dict[str, str] = {}
    zeros: dict[str, tuple[int, ...]] = {}
    experts: dict[str, ExpertPieces] = {}
    complete = targets if num_versions else _complete_targets(spec, targets)
    for target in complete:
        if num_versions and target.num_experts:
            files = zip((lora_a_name(target), lora_b_name(target)), list_factor_files(lora, target), strict=True)
            experts |= {
                name: ExpertPieces(target=target, is_a=name == lora_a_name(target), pieces=pieces)
                for name, pieces in files
            }
        for name, shape in zip((lora_a_name(target), lora_b_name(target)), lora.factor_shapes(target), strict=True):
            if target in targets:
                names[name] = peft_tensor_name(name)
            else:
                zeros[peft_tensor_name(name)] = shape
    # SGLang scales by alpha over rank whatever else the config says.
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": _list_short_names(complete),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_parameters": peft_target_parameters(targets) or None,
    }
    return AdapterFormat(
        rank=lora.rank,
        config=config,
        names=names,
        zeros=zeros,
        problem=find_target_problem(spec, targets),
        num_versions=num_versions,
        experts=experts,
    )


def _complete_targets(spec: DecoderSpec, targets: Sequence[LoraTarget]) -> tuple[LoraTarget, ...]:
    """The targets, and the other parts of what SGLang fuses them with."""
    wanted = set(targets)
    complete: list[LoraTarget] = []
    for group in group_targets(list_targets(spec)).values():
        if wanted & set(group):
            fused = {name for names in _FUSED for name in names}
            complete += [target for target in group if target in wanted or target.short_name in fused]
    return tuple(complete)


def _list_short_names(targets: Iterable[LoraTarget]) -> list[str]:
    return sorted({target.short_name for target in targets})
