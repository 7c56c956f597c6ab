"""LoRA settings of a run: rank, alpha and target modules from the config or from an adapter folder. No torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from miles.backends.megatron.module_choice import AdaptedPart, list_adapted_parts
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.models.checkpoint import peft
from miles.models.lora.config import LoraConfig
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import DecoderSpec
from miles.precision.formats import QuantizationSpec

_DEFAULT_ALPHA = 16.0


def build_lora(config: LoraConfig, spec: DecoderSpec) -> LoraSpec | None:
    """The adapters to train for a model of ``spec``; None where its weights are trained; raises UsageError."""
    if not config.is_enabled:
        return None
    if config.lora_adapter_path is not None:
        return _read_adapter(config, Path(config.lora_adapter_path), spec)
    alpha = _DEFAULT_ALPHA if config.lora_alpha is None else config.lora_alpha
    lora = LoraSpec(
        rank=config.lora_rank,
        alpha=alpha,
        targets=select_targets(spec, config.target_modules, config.exclude_modules),
        shared_outer=config.experts_shared_outer_loras,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        dropout=config.lora_dropout,
        unmerged=not config.lora_merge,
    )
    _check_shared_outer(config, lora)
    return lora


def _check_shared_outer(config: LoraConfig, lora: LoraSpec) -> None:
    if config.experts_shared_outer_loras and not any(target.num_experts for target in lora.targets):
        raise UsageError(
            "--experts-shared-outer-loras has no effect: no routed experts have adapters; add experts to "
            "--target-modules, or remove it."
        )


def find_megatron_adapted_parts(config: Config, spec: DecoderSpec) -> frozenset[AdaptedPart]:
    """The parts of a model whose adapters or packed base Megatron's modules cannot have; none if other rules refuse
    these.
    """
    try:
        if packs_base(config):
            spec = replace(spec, quantization=get_rollout_quantization(config))
        return list_adapted_parts(spec, build_lora(config.lora, spec))
    except UsageError:
        return frozenset()


def packs_base(config: Config) -> bool:
    """Whether the base under LoRA adapters is packed in engine and trainer: it is frozen, and quantized."""
    return config.lora.is_enabled and config.models.train_precision != "auto"


def get_rollout_quantization(config: Config) -> QuantizationSpec | None:
    """The quantization of the engine's weights, which are also a packed base.

    Scales are stored such that the ranks of an engine can share them; SGLang shards those of a checkpoint itself.
    """
    is_sglang = config.sglang.rollout_backend == "sglang"
    return config.models.rollout_quantization(1 if is_sglang else config.cluster.rollout_num_gpus_per_engine)


def is_unmerged(config: Config) -> bool:
    """Whether LoRA adapters are applied beside the base in engine and trainer: it is packed, or a user asks for it."""
    return config.lora.is_enabled and (packs_base(config) or not config.lora.lora_merge)


def names_versions(config: Config) -> bool:
    """Whether engines of ours hold unmerged adapters as named versions; stock SGLang always does."""
    return is_unmerged(config) and config.lora.lora_versions > 0 and config.sglang.rollout_backend != "sglang"


def shares_reference(config: Config) -> bool:
    """Whether the reference of the policy is the base under its LoRA adapters, and needs no copy of the model."""
    return config.lora.is_enabled and config.train.ref_load in (None, config.models.hf_checkpoint)


def shares_critic(config: Config) -> bool:
    """Whether the critic of PPO is adapters and a head over the policy's base, and needs no copy of the model."""
    train = config.train
    if not config.lora.is_enabled or train.critic_device != "auto":
        return False
    start = train.critic_load
    return start in (None, config.models.hf_checkpoint) or starts_from_critic_adapter(config)


def starts_from_critic_adapter(config: Config) -> bool:
    """Whether --critic-load is a critic that consists of adapters over the base of a policy."""
    if config.train.critic_load is None or not config.lora.is_enabled:
        return False
    folder = Path(config.train.critic_load)
    return peft.has_adapter(folder) and not (folder / "config.json").exists()


def get_adapter_folder(config: LoraConfig) -> Path | None:
    """The folder of the adapter to start from."""
    return None if config.lora_adapter_path is None else Path(config.lora_adapter_path)


def _read_adapter(config: LoraConfig, folder: Path, spec: DecoderSpec) -> LoraSpec:
    lora = peft.find_adapter(folder, spec, shared_outer=config.experts_shared_outer_loras).lora
    _check_shared_outer(config, lora)
    for flag, given, found in (
        ("--use-rslora", config.use_rslora, lora.use_rslora),
        ("--use-dora", config.use_dora, lora.use_dora),
    ):
        if given and not found:
            raise UsageError(f"--lora-adapter-path {folder} was not trained with {flag}; remove {flag}.")
    lora = replace(lora, dropout=config.lora_dropout, unmerged=not config.lora_merge)
    if config.lora_rank not in (0, lora.rank):
        raise UsageError(
            f"--lora-adapter-path {folder} has rank {lora.rank}, but --lora-rank is {config.lora_rank}; "
            "remove --lora-rank."
        )
    if config.lora_alpha not in (None, lora.alpha):
        raise UsageError(
            f"--lora-adapter-path {folder} has alpha {lora.alpha:g}, but --lora-alpha is {config.lora_alpha:g}; "
            "remove --lora-alpha."
        )
    if config.target_modules is None and config.exclude_modules is None:
        return lora
    if set(select_targets(spec, config.target_modules, config.exclude_modules)) != set(lora.targets):
        raise UsageError(
            f"--lora-adapter-path {folder} has adapters on other modules than --target-modules and --exclude-modules "
            "select; remove these flags."
        )
    return lora
