"""LoRA factors of an adapter in PEFT's format, checked against a model: for engines that serve adapters unmerged.

The routed experts of a layer are one module, whose name has an asterisk for their numbers (``LoraTarget.module``).

Shapes: I inputs, O outputs, r rank, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file
from torch import Tensor

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint.peft import CONFIG, WEIGHTS, find_stacked_modules, peft_tensor_name
from miles.models.checkpoint.safetensors_io import read_json
from miles.models.lora.adapters import decode_factor
from miles.models.lora.targets import LoraTarget, list_targets
from miles.models.spec import DecoderSpec

__all__ = ["LoraFactors", "ModuleFactors", "parse_factors", "read_factors"]

_A, _B = ".lora_A.weight", ".lora_B.weight"
# Options of an adapter config that mean another formula than LoRA or rsLoRA.
_UNSUPPORTED = ("use_dora", "fan_in_fan_out", "modules_to_save", "layer_replication", "lora_bias", "use_qalora")


@dataclass(frozen=True, slots=True)
class ModuleFactors:
    """The factors of one projection, whose product times ``scale`` is added to its weight; of experts, for each."""

    a_rI: Tensor
    b_Or: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a_rI.shape[-2]


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """All factors of an adapter, by the names of its modules in the checkpoint."""

    modules: Mapping[str, ModuleFactors]

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(factors.rank for factors in self.modules.values())


def read_factors(folder: Path, spec: DecoderSpec) -> LoraFactors:
    """Read a PEFT folder; UsageError if it is none, or does not fit the model."""
    try:
        config, tensors = read_json(folder / CONFIG), load_file(folder / WEIGHTS)
    except (OSError, CheckpointError, safetensors.SafetensorError) as error:
        raise UsageError(f"{folder} is not a PEFT adapter: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{folder / CONFIG} is not a JSON object.")
    return parse_factors(config, tensors, spec, where=str(folder))


def parse_factors(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], spec: DecoderSpec, *, where: str
) -> LoraFactors:
    """Return the factors of an adapter's config and tensors; UsageError if they do not fit the model.

    ``where`` says in messages which adapter it is.
    """
    _check_config(config, where)
    prefix = peft_tensor_name("")
    known = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    names = {name.removesuffix(_A).removesuffix(_B) for name in known}
    stacked = {target: name for name, target in find_stacked_modules(spec, names, config).items()}
    targets: dict[str, LoraTarget] = {}
    for target in list_targets(spec):
        if target.is_stacked:
            targets |= {stacked[target.module]: target} if target.module in stacked else {}
        elif not target.is_vision:
            targets |= dict.fromkeys(target.modules, target)
    modules: dict[str, ModuleFactors] = {}
    for name in known:
        module = name.removesuffix(_A).removesuffix(_B)
        if module == name or module not in targets:
            raise UsageError(
                f"{where} does not fit: it has {name}, which is no LoRA factor of a projection of this model."
            )
        target = targets[module]
        if target.module not in modules:
            own = (module,) if target.is_stacked else target.modules
            modules[target.module] = _read_module(known, target, own, config, where)
    if not modules:
        raise UsageError(f"{where} does not fit: it has no factors of any module.")
    return LoraFactors(modules)


def _read_module(
    known: Mapping[str, Tensor], target: LoraTarget, names: Sequence[str], config: Mapping[str, Any], where: str
) -> ModuleFactors:
    """Return the factors of a target from those of its modules ``names``, which are one, or one for each expert."""
    missing = next((name for name in names if name + _A not in known and name + _B not in known), None)
    if missing is not None:
        raise UsageError(
            f"{where} does not fit: it has adapters of some experts only: {missing} has none; all experts of a layer "
            "need one."
        )
    found = [_check_shapes(known, target, name, config, where) for name in names]
    if not target.num_experts:
        return found[0]
    if len({(each.rank, each.scale) for each in found}) > 1:
        raise UsageError(f"{where} does not fit: the experts of {target.module} have different ranks or alphas.")
    a_ErI = decode_factor([each.a_rI for each in found], is_a=True, target=target)
    b_EOr = decode_factor([each.b_Or for each in found], is_a=False, target=target)
    return ModuleFactors(a_ErI, b_EOr, found[0].scale)


def _check_config(config: Mapping[str, Any], where: str) -> None:
    if config.get("peft_type", "LORA") != "LORA" or config.get("bias", "none") != "none":
        raise UsageError(
            f"{where} is an adapter of type {config.get('peft_type')}, or one with biases; use a LORA adapter without "
            "biases."
        )
    unsupported = next((key for key in _UNSUPPORTED if config.get(key)), None)
    if unsupported is not None:
        raise UsageError(f"{where} has {unsupported} in its {CONFIG}, which is not supported; use LoRA or rsLoRA.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise UsageError(f"the {CONFIG} of {where} must have r and lora_alpha as numbers above 0.")
    for key, kind in (("rank_pattern", int), ("alpha_pattern", (int, float))):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict) or not all(
            isinstance(value, kind) and value > 0 and _is_pattern(pattern) for pattern, value in patterns.items()
        ):
            raise UsageError(f"the {CONFIG} of {where} must have {key} as patterns and numbers above 0.")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _check_shapes(
    known: Mapping[str, Tensor], target: LoraTarget, module: str, config: Mapping[str, Any], where: str
) -> ModuleFactors:
    a_rI, b_Or = known.get(module + _A), known.get(module + _B)
    if a_rI is None or b_Or is None:
        raise UsageError(f"{where} does not fit: {module} has only one of {_A[1:]} and {_B[1:]}.")
    rank = _match_pattern(config.get("rank_pattern"), module, config["r"])
    rows = rank * target.num_experts if target.is_stacked else rank
    for name, tensor, shape in ((_A, a_rI, (rows, target.inputs)), (_B, b_Or, (target.outputs, rows))):
        if tuple(tensor.shape) != shape:
            raise UsageError(
                f"{where} does not fit: {module}{name} has shape {tuple(tensor.shape)}, but this model and rank need "
                f"{shape}."
            )
        if not tensor.is_floating_point() or not bool(tensor.float().isfinite().all()):
            raise UsageError(f"{where} does not fit: {module}{name} has values that are no finite numbers.")
    alpha = _match_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    return ModuleFactors(a_rI, b_Or, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _match_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of PEFT's first pattern that matches the end of a module's name."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default
