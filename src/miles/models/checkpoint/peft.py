"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors. No torch.

``lora_A.weight`` [rank, inputs] and ``lora_B.weight`` [outputs, rank] of every module; their product times alpha over
rank is added to the module's weight. Experts that a checkpoint has one by one are modules each. Experts that are one
tensor in the checkpoint are a target parameter, with the factors of all experts in two matrices:
``lora_A.weight`` [experts * rank, inputs], and ``lora_B.weight`` [outputs, rank * experts], experts varying fastest.
The factors of two parameters of one module are nested: ``base_layer.`` is in the names of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.param_slices import HfSlice
from miles.models.checkpoint.safetensors_io import StoredTensor, read_json, stored_tensors
from miles.models.lora.targets import (
    LoraSpec,
    LoraTarget,
    list_targets,
    peft_target_modules,
    peft_target_parameters,
    targets_from_modules,
)
from miles.models.spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"
"""Subfolder of a checkpoint for its adapter: beside config.json, libraries would take the model for its base."""

_PREFIX = "base_model.model."
_A = "lora_A.weight"
_B = "lora_B.weight"
_MAGNITUDE = "lora_magnitude_vector"
# Options of an adapter config that mean another formula than plain LoRA.
_UNSUPPORTED = ("fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


def has_adapter(folder: Path) -> bool:
    """Return whether a checkpoint has an adapter in its subfolder."""
    return (folder / FOLDER / CONFIG).exists()


def lora_a_name(target: LoraTarget) -> str:
    """Return the parameter name of a target's A factor."""
    return f"{target.module}.{_A}"


def lora_b_name(target: LoraTarget) -> str:
    """Return the parameter name of a target's B factor."""
    return f"{target.module}.{_B}"


def magnitude_name(target: LoraTarget) -> str:
    """Return the parameter name of a target's magnitudes (DoRA)."""
    return f"{target.module}.{_MAGNITUDE}"


def list_factor_files(lora: LoraSpec, target: LoraTarget) -> tuple[tuple[HfSlice, ...], tuple[HfSlice, ...]]:
    """Return the tensors in the file that a target's two factors are written as, ``expert`` being the index in them.

    The names are those of parameters (see ``peft_tensor_name``); a factor that experts share is repeated for each. The
    slices of a stacked target have the shape in the file, but not its order (``lora.adapters``).
    """
    shapes = lora.factor_shapes(target)
    if target.is_stacked:
        prefix = _stacked_prefix(lora, target)
        a_rI, b_Or = (lora.rank * target.num_experts, target.inputs), (target.outputs, lora.rank * target.num_experts)
        return (HfSlice(f"{prefix}.{_A}", a_rI, 0, a_rI[0]),), (HfSlice(f"{prefix}.{_B}", b_Or, 0, b_Or[0]),)
    files: list[tuple[HfSlice, ...]] = []
    for factor, shape in zip((_A, _B), shapes, strict=True):
        indices = [None] if not target.num_experts else [min(e, shape[0] - 1) for e in range(target.num_experts)]
        files.append(
            tuple(
                HfSlice(f"{module}.{factor}", shape[-2:], 0, shape[-2], index)
                for module, index in zip(target.modules, indices, strict=True)
            )
        )
    return files[0], files[1]


def list_magnitude_files(lora: LoraSpec, target: LoraTarget) -> tuple[HfSlice, ...]:
    """Return the tensors in the file that a target's magnitudes (DoRA) are written as.

    Experts that a checkpoint has one by one have one each, as PEFT's modules do. For experts that are one tensor PEFT
    has no DoRA; theirs are one tensor here, [experts, outputs].
    """
    shape = target.magnitude_shape
    if target.is_stacked:
        return (HfSlice(f"{_stacked_prefix(lora, target)}.{_MAGNITUDE}", shape, 0, shape[0]),)
    experts = range(target.num_experts) if target.num_experts else (None,)
    return tuple(
        HfSlice(f"{module}.{_MAGNITUDE}", shape[-1:], 0, shape[-1], expert)
        for module, expert in zip(target.modules, experts, strict=True)
    )


def _stacked_prefix(lora: LoraSpec, target: LoraTarget) -> str:
    siblings = [t.module for t in lora.targets if t.is_stacked and t.owner == target.owner]
    return target.owner if target.module == siblings[-1] else f"{target.owner}.base_layer"


def peft_tensor_name(parameter: str) -> str:
    """Return the tensor name of a parameter in the file."""
    return _PREFIX + parameter


def build_peft_config(lora: LoraSpec, spec: DecoderSpec, base: str) -> dict[str, Any]:
    """Build adapter_config.json of ``lora`` over the model in ``base``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": peft_target_modules(spec, lora.targets),
        "target_parameters": peft_target_parameters(lora.targets) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "modules_to_save": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """An adapter in a folder: its spec, and its stored tensors by parameter name."""

    lora: LoraSpec
    stored: Mapping[str, StoredTensor]


def find_adapter(folder: Path, spec: DecoderSpec, *, shared_outer: bool = False) -> PeftAdapter:
    """Read an adapter's config and tensor headers; UsageError if it is none, or does not fit this model.

    ``shared_outer``: its experts share factors, which the file repeats.
    """
    try:
        config = read_json(folder / CONFIG)
        stored = stored_tensors(folder, WEIGHTS)
    except (OSError, CheckpointError) as error:
        raise UsageError(f"{folder} is not a PEFT adapter: {error}") from error
    rank, alpha = _read_rank_and_alpha(folder, config)
    known = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    modules = {name.rpartition(".lora_")[0] for name in known}
    stacked = find_stacked_modules(spec, modules, config)
    try:
        targets = targets_from_modules(spec, modules - stacked.keys() | set(stacked.values()))
    except UsageError as error:
        raise UsageError(f"{folder} does not fit: {error}") from error
    lora = LoraSpec(
        rank=rank,
        alpha=alpha,
        targets=targets,
        shared_outer=shared_outer,
        use_rslora=bool(config.get("use_rslora")),
        use_dora=bool(config.get("use_dora")),
    )
    for target in targets:
        shapes = {piece.hf_name: piece.shape for pieces in list_factor_files(lora, target) for piece in pieces}
        if lora.use_dora:
            shapes |= {piece.hf_name: piece.shape for piece in list_magnitude_files(lora, target)}
        for name, shape in shapes.items():
            found = known.get(name)
            if found is None or found.shape != shape:
                problem = "is missing" if found is None else f"has shape {found.shape}"
                raise UsageError(f"{folder} does not fit: {name} {problem}, but this model needs {shape}.")
    return PeftAdapter(lora=lora, stored=known)


def find_stacked_modules(spec: DecoderSpec, modules: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the module of each pair of factors of a stacked target -> the name of this target."""
    wanted = tuple(config.get("target_parameters") or ())
    found: dict[str, str] = {}
    for target in list_targets(spec):
        own = target.piece.hf_name
        is_wanted = any(own == name or own.endswith(f".{name}") for name in wanted)
        if not target.is_stacked or not is_wanted:
            continue
        inner = f"{target.owner}.base_layer"
        found[inner if inner in modules and inner not in found else target.owner] = target.module
    return found


def _read_rank_and_alpha(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise UsageError(
            f"{folder} holds an adapter of type {config.get('peft_type')}, or one with biases; use a LORA adapter "
            "without biases."
        )
    unsupported = next((key for key in _UNSUPPORTED if config.get(key)), None)
    if unsupported is not None:
        raise UsageError(
            f"{folder} has {unsupported} in its {CONFIG}, which is not supported; use a plain LoRA adapter."
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UsageError(f"{folder / CONFIG} must have r and lora_alpha as numbers above 0.")
    return rank, float(alpha)
