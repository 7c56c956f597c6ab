"""LoRA adapters of ``miles serve``: those of --lora-paths, and the room for them and for later ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.lora_config import LoraServingConfig
from miles.backends.native.runner.lora import list_served_modules
from miles.core.errors import UsageError
from miles.kernels.numerics import Numerics
from miles.models.lora.factors import LoraFactors, read_factors
from miles.models.spec import DecoderSpec

__all__ = ["LoraServing", "build_lora_serving", "load_adapters"]

_DEFAULT_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraServing:
    """The room for adapters, and the adapters to load at start: name, folder and factors of each."""

    shape: LoraShape
    adapters: tuple[tuple[str, Path, LoraFactors], ...]


def build_lora_serving(config: LoraServingConfig, spec: DecoderSpec, numerics: Numerics) -> LoraServing | None:
    """Read the adapters of --lora-paths; None if no adapters are served; raises UsageError."""
    if not config.is_enabled:
        return None
    modules = list_served_modules(spec, config.lora_target_modules, numerics)
    adapters: dict[str, tuple[str, Path, LoraFactors]] = {}
    for word in config.lora_paths:
        name, separator, folder = word.partition("=")
        if not separator:
            folder = name
        if not name or not folder or name in adapters:
            raise UsageError(f"--lora-paths {word} must be NAME=FOLDER, and each name is given once.")
        adapters[name] = (name, Path(folder), read_factors(Path(folder), spec))
    largest = max((factors.rank for _, _, factors in adapters.values()), default=_DEFAULT_RANK)
    shape = LoraShape(
        num_slots=config.max_loras_per_batch,
        max_rank=config.max_lora_rank or largest,
        modules=modules,
        max_loaded=config.max_loaded_loras,
    )
    return LoraServing(shape=shape, adapters=tuple(adapters.values()))


def load_adapters(engine: NativeEngine, serving: LoraServing | None) -> None:
    """Load the adapters of --lora-paths into an engine."""
    for name, folder, factors in () if serving is None else serving.adapters:
        engine.load_lora(name, factors, folder=folder)
