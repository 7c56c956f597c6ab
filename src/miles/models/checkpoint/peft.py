"""PEFT adapter folders: adapter_config.json and adapter_model.safetensors. No torch.

``lora_A.weight`` [rank, inputs] and ``lora_B.weight`` [outputs, rank] of every module; their product times alpha over
rank is added to the module's weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.safetensors_io import StoredTensor, read_json, stored_tensors
from miles.models.lora.targets import LoraSpec, LoraTarget, peft_target_modules, targets_from_modules
from miles.models.spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"
"""Subfolder of a checkpoint for its adapter: beside config.json, libraries would take the model for its base."""

_PREFIX = "base_model.model."
_A = "lora_A.weight"
_B = "lora_B.weight"
# Options of an adapter config that mean another formula than plain LoRA.
_UNSUPPORTED = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


def lora_a_name(target: LoraTarget) -> str:
    """Return the parameter name of a target's A factor."""
    return f"{target.module}.{_A}"


def lora_b_name(target: LoraTarget) -> str:
    """Return the parameter name of a target's B factor."""
    return f"{target.module}.{_B}"


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
        "lora_dropout": 0.0,
        "target_modules": peft_target_modules(spec, lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """An adapter in a folder: its spec, and its stored tensors by parameter name."""

    lora: LoraSpec
    stored: Mapping[str, StoredTensor]


def find_adapter(folder: Path, spec: DecoderSpec) -> PeftAdapter:
    """Read an adapter's config and tensor headers; UsageError if it is none, or does not fit this model."""
    try:
        config = read_json(folder / CONFIG)
        stored = stored_tensors(folder, WEIGHTS)
    except (OSError, CheckpointError) as error:
        raise UsageError(f"{folder} is not a PEFT adapter: {error}") from error
    rank, alpha = _read_rank_and_alpha(folder, config)
    known = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    modules = {name.rpartition(".lora_")[0] for name in known}
    try:
        targets = targets_from_modules(spec, modules)
    except UsageError as error:
        raise UsageError(f"{folder} does not fit: {error}") from error
    for target in targets:
        for name, shape in (
            (lora_a_name(target), (rank, target.inputs)),
            (lora_b_name(target), (target.outputs, rank)),
        ):
            found = known.get(name)
            if found is None or found.shape != shape:
                problem = "is missing" if found is None else f"has shape {found.shape}"
                raise UsageError(f"{folder} does not fit: {name} {problem}, but this model needs {shape}.")
    return PeftAdapter(lora=LoraSpec(rank=rank, alpha=alpha, targets=targets), stored=known)


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
