"""The folder of an adapter as the PEFT library reads and writes it: adapter_config.json and its tensors. No torch.

``lora_A.weight`` [rank, inputs] and ``lora_B.weight`` [outputs, rank] of every module; what is added to the module's
weight is their product times alpha over rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.core.errors import CheckpointError, UsageError
from miles.models.files import Stored, read_json, stored_tensors
from miles.models.lora_targets import Lora, Target, leaves, of_modules
from miles.models.spec import DecoderSpec

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FOLDER = "adapter"
"""Where a checkpoint keeps its adapter: beside the config of a whole model, libraries would take that for its base."""

_PREFIX, _A, _B = "base_model.model.", "lora_A.weight", "lora_B.weight"
# What an adapter may say, and mean another formula than the one here.
_OTHERWISE = ("use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "modules_to_save")


def a_of(target: Target) -> str:
    """The parameter that reads a target's inputs."""
    return f"{target.module}.{_A}"


def b_of(target: Target) -> str:
    """The parameter that writes a target's outputs."""
    return f"{target.module}.{_B}"


def stored_name(parameter: str) -> str:
    """What a parameter is called in the file."""
    return _PREFIX + parameter


def config_for(lora: Lora, spec: DecoderSpec, base: str) -> dict[str, Any]:
    """What adapter_config.json says of ``lora`` over the model in ``base``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": leaves(spec, lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An adapter in a folder: what it is, and where its tensors lie, by parameter."""

    lora: Lora
    stored: Mapping[str, Stored]


def find(folder: Path, spec: DecoderSpec) -> Found:
    """Look at an adapter without reading its tensors; UsageError where it is none, or none of this model."""
    try:
        told = read_json(folder / CONFIG)
        stored = stored_tensors(folder, WEIGHTS)
    except (OSError, CheckpointError) as error:
        raise UsageError(f"{folder} is no adapter in PEFT's format: {error}") from error
    rank, alpha = _numbers(folder, told)
    known = {name.removeprefix(_PREFIX): place for name, place in stored.items()}
    modules = {name.rpartition(".lora_")[0] for name in known}
    try:
        targets = of_modules(spec, modules)
    except UsageError as error:
        raise UsageError(f"{folder} does not fit: {error}") from error
    for target in targets:
        for name, shape in ((a_of(target), (rank, target.inputs)), (b_of(target), (target.outputs, rank))):
            there = known.get(name)
            if there is None or there.shape != shape:
                found = "is missing" if there is None else f"has shape {there.shape}"
                raise UsageError(f"{folder} does not fit: {name} {found}, and this model's has {shape}.")
    return Found(lora=Lora(rank=rank, alpha=alpha, targets=targets), stored=known)


def _numbers(folder: Path, told: Mapping[str, Any]) -> tuple[int, float]:
    if told.get("peft_type") != "LORA" or told.get("bias", "none") != "none":
        raise UsageError(
            f"{folder} holds an adapter of kind {told.get('peft_type')}, or one with biases; give a LORA one."
        )
    odd = next((key for key in _OTHERWISE if told.get(key)), None)
    if odd is not None:
        raise UsageError(f"{folder} has {odd} in its {CONFIG}, which is not computed here; give a plain LoRA adapter.")
    rank, alpha = told.get("r"), told.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UsageError(f"{folder / CONFIG} does not say r and lora_alpha as numbers above 0.")
    return rank, float(alpha)
