"""The adapters that a config asks for, found out without torch."""

from __future__ import annotations

from pathlib import Path

from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.models import peft
from miles.models.lora_config import LoraConfig
from miles.models.lora_targets import Lora, chosen
from miles.models.spec import DecoderSpec

_ALPHA = 16.0


def lora_of(config: LoraConfig, spec: DecoderSpec) -> Lora | None:
    """What is trained of a model of ``spec``; None where its weights are. Raises UsageError where that cannot be."""
    if not config.asked:
        return None
    if config.lora_adapter_path is not None:
        return _started(config, Path(config.lora_adapter_path), spec)
    alpha = _ALPHA if config.lora_alpha is None else config.lora_alpha
    return Lora(rank=config.lora_rank, alpha=alpha, targets=chosen(spec, config.target_modules, config.exclude_modules))


def start_of(config: LoraConfig) -> Path | None:
    """The folder of the adapter to start from."""
    return None if config.lora_adapter_path is None else Path(config.lora_adapter_path)


def lora_in(config: Config) -> Lora | None:
    """The same of the model a config names, as far as that can be read."""
    folder = config.models.hf_checkpoint
    spec = None if folder is None else spec_or_none(folder, config.models.model_impl)
    return None if spec is None else lora_of(config.lora, spec)


def _started(config: LoraConfig, folder: Path, spec: DecoderSpec) -> Lora:
    found = peft.find(folder, spec).lora
    if config.lora_rank not in (0, found.rank):
        raise UsageError(
            f"--lora-adapter-path {folder} has rank {found.rank}, and --lora-rank is {config.lora_rank}; leave it out."
        )
    if config.lora_alpha not in (None, found.alpha):
        raise UsageError(
            f"--lora-adapter-path {folder} has alpha {found.alpha:g}, and --lora-alpha is {config.lora_alpha:g}; "
            "leave it out."
        )
    if config.target_modules is None and config.exclude_modules is None:
        return found
    if set(chosen(spec, config.target_modules, config.exclude_modules)) != set(found.targets):
        raise UsageError(
            f"--lora-adapter-path {folder} has adapters of other projections than --target-modules and "
            "--exclude-modules name; leave these out."
        )
    return found
