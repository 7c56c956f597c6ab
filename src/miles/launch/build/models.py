"""Models of a run: the base checkpoint, the model factory of a process, and the policy trainer built from one.

A ``ModelFactory`` loads the models of a run: whole in one process (``LocalModelFactory``), or the shard of one rank
(``distributed.models_fsdp``, ``distributed.models_megatron``). What is built from them is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from miles.algo.registry import AlgoHooks
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_critic import HeadCritic, LoraCritic
from miles.backends.fsdp.lora_model import LoraBaseModel, LoraModel, LoraReference, UnmergedLoraModel
from miles.backends.fsdp.lora_reward_model import HeadRewardModel, LoraRewardModel
from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster import platform
from miles.cluster.executor import Executor
from miles.cluster.platform import Platform
from miles.cluster.profiler import ProfileSettings, StepProfiler
from miles.core.types import Version
from miles.hooks.registry import MODEL_PROVIDER
from miles.kernels.numerics import Numerics
from miles.launch.build.hooks import load_hook, load_trainer_hooks
from miles.launch.config import Config
from miles.launch.plan.layout_memory import (
    get_frozen_vision,
    get_recompute_layers,
    get_recompute_mode,
    packs_reference,
)
from miles.launch.plan.lora import (
    build_lora,
    get_adapter_folder,
    get_rollout_quantization,
    is_unmerged,
    packs_base,
    shares_critic,
    shares_reference,
    starts_from_critic_adapter,
)
from miles.launch.plan.offload import choose_offload
from miles.launch.plan.plan import Plan, choose_parity_tolerance
from miles.launch.plan.prefix_sharing import choose_prefix_sharing
from miles.models.activation_checkpointing import set_recompute
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.checkpoint.convert import convert_checkpoint, plan_conversion
from miles.models.checkpoint.safetensors_io import config_dtype, read_config
from miles.models.checkpoint.value_head import HEAD
from miles.models.lora.layout import adapter_spec
from miles.models.lora.targets import LoraSpec
from miles.models.model_provider import ModelProvider, apply_model_provider
from miles.models.packing import packed_spec
from miles.models.processor import load_processor
from miles.models.resolve import resolve_spec
from miles.models.spec import AdapterSpec, AttentionSpec, DecoderSpec
from miles.models.tokenizer import HfTokenizer
from miles.precision.formats import QuantizationSpec
from miles.schedule.checkpoints import verify_weights
from miles.train.balance import CostFn, build_flops_cost, build_token_cost
from miles.train.critic import Critic
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.draft_trainer import DraftTrainer
from miles.train.model_protocols import PolicyReference, ScoreModel, TrainModel, ValueModel
from miles.train.policy_trainer import PolicyTrainer
from miles.train.reward_model_trainer import RewardModelTrainer

# -- checkpoints ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseCheckpoint:
    """The checkpoint a run starts from, before its weights are loaded; ``provide`` is the user's model provider.

    Its engine, its trainer and the models beside it (reference, critic, teachers) all have its ``numerics``.
    ``spec`` is the trainer's, and the reference's; the engine's weights have ``rollout_quantization``, and the engine
    has ``rollout_adapters`` beside them if LoRA adapters are trained unmerged.
    """

    folder: Path
    config: Mapping[str, Any]
    spec: DecoderSpec
    trust_remote_code: bool
    platform: Platform
    dtype: torch.dtype
    rollout_dtype: torch.dtype
    numerics: Numerics
    provide: ModelProvider | None = None
    rollout_quantization: QuantizationSpec | None = None
    rollout_adapters: AdapterSpec | None = None

    @property
    def rollout_spec(self) -> DecoderSpec:
        """The spec of the engine's decoder."""
        return self.to_rollout_spec(self.spec)

    def to_rollout_spec(self, spec: DecoderSpec) -> DecoderSpec:
        """The spec of the engine's decoder, for the trainer's ``spec``."""
        return replace(spec, quantization=self.rollout_quantization, adapters=self.rollout_adapters)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheckpoint(BaseCheckpoint):
    """A base checkpoint with its tokenizer, which ranks that only train do not need."""

    tokenizer: HfTokenizer


def read_policy(config: Config, run_dir: Path | None = None) -> PolicyCheckpoint:
    """Read the checkpoint's config, its tokenizer and the device; raises before anything large is loaded.

    Images that trajectories use are kept in ``media/`` of ``run_dir``.
    """
    assert config.models.hf_checkpoint is not None
    verify_weights(Path(config.models.hf_checkpoint))
    base = read_checkpoint(config, platform.detect_platform(config.cluster.device, threads=config.cluster.num_threads))
    values = {field.name: getattr(base, field.name) for field in fields(base)}
    tokenizer = load_processor(
        base.folder,
        media=config.media.build_store(None if run_dir is None else run_dir / "media"),
        trust_remote_code=base.trust_remote_code,
        cache_bytes=config.media.image_cache_mib << 20,
        reads_images=base.spec.vision is not None,
    )
    return PolicyCheckpoint(**values, tokenizer=tokenizer)


def read_checkpoint(config: Config, found: Platform) -> BaseCheckpoint:
    """Read the checkpoint's config, for loading it on ``found``."""
    assert config.models.hf_checkpoint is not None
    folder = Path(config.models.hf_checkpoint)
    raw = read_config(folder)
    dtype, rollout_dtype = hf.choose_dtype(config.models.dtype, raw, found.device), config.models.rollout_dtype
    spec = limit_positions(resolve_spec(folder, config.models.model_impl), config.rollout.rollout_max_context_len)
    rollout_quantization = get_rollout_quantization(config)
    lora = build_lora(config.lora, spec) if is_unmerged(config) else None
    quantization = rollout_quantization if packs_base(config) else config.models.train_quantization()
    return BaseCheckpoint(
        folder=folder,
        config=raw,
        spec=replace(spec, quantization=quantization),
        trust_remote_code=config.models.trust_remote_code,
        platform=found,
        dtype=dtype,
        rollout_dtype=dtype if rollout_dtype == "auto" else hf.choose_dtype(rollout_dtype, raw, found.device),
        numerics=resolve_numerics(config),
        provide=load_hook(config, MODEL_PROVIDER),
        rollout_quantization=rollout_quantization,
        rollout_adapters=None if lora is None else adapter_spec(lora),
    )


def resolve_numerics(config: Config) -> Numerics:
    """The numerics of the run's models. SGLang scales an FP8 KV cache in its own way, which no trainer here follows."""
    numerics = config.models.numerics
    return replace(numerics, kv_cache_dtype="auto") if config.sglang.rollout_backend == "sglang" else numerics


def resolve_side_spec(config: Config, policy: BaseCheckpoint, folder: Path) -> DecoderSpec:
    """The spec of another model that reads the policy's contexts."""
    return limit_positions(resolve_spec(folder, config.models.model_impl), policy.spec.max_positions)


def limit_positions(spec: DecoderSpec, context: int | None) -> DecoderSpec:
    """The spec for contexts of at most ``context`` tokens.

    It only matters for LongRoPE, which has short and long factors: a run uses one set of them throughout.
    """
    mixers = (layer.mixer for layer in spec.layers)
    longrope = any(isinstance(m, AttentionSpec) and m.rope is not None and m.rope.kind == "longrope" for m in mixers)
    if context is None or not longrope:
        return spec
    return replace(spec, max_positions=min(context, spec.max_positions))


def load_model(policy: BaseCheckpoint, folder: Path | None = None, *, keep_stored: bool = True) -> CausalLM:
    """The policy's model with its weights on the device, or that of another checkpoint of its architecture.

    ``keep_stored`` as in ``hf.load_model``.
    """
    model = hf.load_model(
        folder or policy.folder,
        policy.spec,
        device=policy.platform.device,
        dtype=policy.dtype,
        numerics=policy.numerics,
        trust_remote_code=policy.trust_remote_code,
        keep_stored=keep_stored,
    )
    return apply_model_provider(model, policy.provide)


def load_side_model(config: Config, policy: BaseCheckpoint, folder: Path) -> CausalLM:
    """A model of any architecture that reads the policy's contexts."""
    return load_model(replace(policy, spec=resolve_side_spec(config, policy, folder), provide=None), folder)


def build_hf_conversion(config: Config) -> Callable[[Path, Path], None] | None:
    """Writes the model of a checkpoint as --save-hf-precision says; None where that is the checkpoint's own."""
    quantizes = config.schedule.save_hf_precision == "rollout"
    if config.train.ckpt_format == "torch_dist":
        from miles.backends.megatron.convert import export_hf

        return partial(_export_quantized, config, export_hf) if quantizes else export_hf
    return partial(_quantize_checkpoint, config) if quantizes else None


def _export_quantized(config: Config, export_hf: Callable[[Path, Path], None], checkpoint: Path, target: Path) -> None:
    """Export the model of a checkpoint in another format as wide as it is, beside ``target``, and quantize that."""
    with TemporaryDirectory(dir=target.parent, prefix=f"{target.name}-") as folder:
        export_hf(checkpoint, Path(folder) / "wide")
        _quantize_checkpoint(config, Path(folder) / "wide", target)


def _quantize_checkpoint(config: Config, checkpoint: Path, target: Path) -> None:
    quantization = config.models.rollout_quantization(1)
    assert quantization is not None, "a rule requires a format"
    dtype = hf.choose_dtype(config_dtype(read_config(checkpoint)) or "bfloat16", {}, "cpu")
    plan = plan_conversion(checkpoint, format=quantization.format, dtype=dtype, quantization=quantization)
    convert_checkpoint(plan, target)


# -- factories ------------------------------------------------------------------------------


class ModelFactory(Protocol):
    """Loads the models of a run as one rank has them; all ranks call it in the same order."""

    @property
    def dp_group(self) -> DataParallelGroup: ...

    def actor(self) -> TrainModel: ...

    def reference(self, folder: Path) -> TrainModel:
        """A frozen model of the policy's architecture."""
        ...

    def teacher(self, folder: Path) -> TrainModel:
        """A frozen model of any architecture."""
        ...

    def value(self, folder: Path) -> ValueModel:
        """The model the critic starts from."""
        ...

    def value_head(self) -> HeadCritic:
        """A value head over the decoder of the actor, which is frozen."""
        ...

    def reward_model(self) -> ScoreModel:
        """The checkpoint's decoder with a scalar head, trained as a reward model."""
        ...


def choose_save_dtype(config: Config, policy: BaseCheckpoint) -> torch.dtype | None:
    """The dtype the policy's model came in, where --dtype auto trains it in float32."""
    if config.models.dtype != "auto" or policy.dtype != torch.float32:
        return None
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(config_dtype(policy.config) or "")


class LocalModelFactory:
    """The ``ModelFactory`` of a single process, which has loaded ``model`` as its actor already."""

    dp_group = SINGLE_RANK

    def __init__(self, config: Config, policy: BaseCheckpoint, model: CausalLM) -> None:
        self._config = config
        self._policy = policy
        self._model = model

    def actor(self) -> TrainModel:
        config, policy = self._config, self._policy
        lora = build_lora(config.lora, policy.spec)
        base = LocalModel(
            self._model,
            config=policy.config,
            like=policy.folder,
            save_dtype=choose_save_dtype(config, policy),
            gradient_checkpointing=self._set_recompute(self._model),
            frozen=lora is not None,
            frozen_vision=get_frozen_vision(config.train),
        )
        if lora is None:
            return base
        return build_lora_model(config, policy, base, lora)

    def reference(self, folder: Path) -> TrainModel:
        policy = self._policy
        if packs_reference(self._config):
            policy = replace(policy, spec=packed_spec(policy.spec))
        # A policy in training quantizes its weights itself, also those of a quantized checkpoint.
        model = load_model(policy, folder, keep_stored=packs_base(self._config))
        return LocalModel(model, config=policy.config, frozen=True)

    def teacher(self, folder: Path) -> TrainModel:
        return LocalModel(load_side_model(self._config, self._policy, folder), frozen=True)

    def value(self, folder: Path) -> ValueModel:
        model = load_side_model(self._config, self._place_critic(), folder)
        value = LocalCritic(
            model,
            config=read_config(folder),
            like=folder,
            gradient_checkpointing=self._set_recompute(model),
            frozen_vision=get_frozen_vision(self._config.train),
        )
        if (folder / HEAD).exists():
            value.load_head(folder)
        return value

    def value_head(self) -> HeadCritic:
        return LocalCritic(self._model, gradient_checkpointing=self._set_recompute(self._model))

    def reward_model(self) -> ScoreModel:
        config, policy = self._config, self._policy
        model = RewardModel(
            self._model,
            config=policy.config,
            like=policy.folder,
            gradient_checkpointing=self._set_recompute(self._model),
        )
        lora = build_lora(config.lora, policy.spec)
        if lora is None:
            return model
        return build_lora_reward_model(config, policy, model, lora)

    def _set_recompute(self, model: CausalLM) -> bool:
        """Set activation recomputation on ``model``; whether any is used."""
        recompute = get_recompute_mode(self._config.train)
        set_recompute(model, recompute, get_recompute_layers(self._config.train))
        return recompute != "none"

    def _place_critic(self) -> BaseCheckpoint:
        """The checkpoint with the critic's device and the dtype for it."""
        config = self._config
        policy = self._policy
        name = self._config.train.critic_device
        device = policy.platform.device if name == "auto" else platform.parse_device(name, "--critic-device")
        if device == policy.platform.device:
            return policy
        dtype = hf.choose_dtype(config.models.dtype, policy.config, device)
        return replace(policy, platform=replace(policy.platform, device=device), dtype=dtype)


def build_lora_model(config: Config, policy: BaseCheckpoint, base: LoraBaseModel, lora: LoraSpec) -> LoraModel:
    """The adapters over a frozen model."""
    kind = UnmergedLoraModel if is_unmerged(config) else LoraModel
    return kind(base, lora, base=policy.folder, seed=config.train.seed, start=get_adapter_folder(config.lora))


def build_lora_reward_model(
    config: Config, policy: BaseCheckpoint, model: HeadRewardModel, lora: LoraSpec
) -> LoraRewardModel:
    """The adapters and the score head over a frozen model."""
    start = get_adapter_folder(config.lora)
    return LoraRewardModel(model, lora, base=policy.folder, seed=config.train.seed, start=start)


# -- the policy trainer ---------------------------------------------------------------------


def build_policy_trainer(
    config: Config,
    plan: Plan,
    policy: BaseCheckpoint,
    run: Executor,
    models: ModelFactory,
    actor: TrainModel,
    *,
    steps: int,
    algo_hooks: AlgoHooks,
    draft: DraftTrainer | None = None,
    name: str = "actor",
) -> PolicyTrainer:
    """The trainer of one rank for ``steps`` training steps of the policy ``name``."""
    updates = steps * plan.num_steps_per_rollout
    critic = None
    if plan.critic is not None:
        critic = Critic(
            _build_value_model(config, plan.critic, models, actor),
            algo=config.algo,
            train=config.train,
            updates=updates,
            dedicated_device=config.train.critic_device != "auto",
            dp_group=models.dp_group,
        )
    return PolicyTrainer(
        actor,
        algo=config.algo,
        train=config.train,
        steps=plan.num_steps_per_rollout,
        updates=updates,
        temperature=config.rollout.rollout_temperature,
        run=run,
        reference=_build_reference(config, plan, models, actor),
        critic=critic,
        teachers=[models.teacher(folder) for folder in plan.teachers.values()],
        draft=draft,
        algo_hooks=algo_hooks,
        hooks=load_trainer_hooks(config),
        version=Version(name),
        parity_tolerance=choose_parity_tolerance(config),
        parity_stop=config.schedule.parity_stop,
        parity_no_replay_interval=config.schedule.parity_no_replay_interval,
        offload=_offloads_optimizer(config, plan, policy, models.dp_group),
        shares_weights=plan.transport == "shared",
        frees_cache=plan.transport != "shared",
        dp_group=models.dp_group,
        cost_fn=_choose_cost(config, policy.spec),
        patches_per_feature=1 if policy.spec.vision is None else policy.spec.vision.merge_size**2,
        prefix_cost=choose_prefix_sharing(config, plan, policy.spec).cost,
        record_tokens=config.observe.save_rollouts and config.observe.save_trainer_logprobs,
        profiler=StepProfiler(build_profile_settings(config, plan.run_dir), f"rank-{_get_rank(models.dp_group)}"),
    )


def build_reward_model_trainer(
    config: Config, plan: Plan, run: Executor, models: ModelFactory, model: ScoreModel, *, steps: int
) -> RewardModelTrainer:
    """The reward model's trainer of one rank, for ``steps`` training steps."""
    return RewardModelTrainer(
        model,
        train=config.train,
        hooks=load_trainer_hooks(config),
        steps=plan.num_steps_per_rollout,
        updates=steps * plan.num_steps_per_rollout,
        run=run,
        dp_group=models.dp_group,
    )


def _get_rank(dp_group: DataParallelGroup) -> int:
    return torch.distributed.get_rank() if dp_group is not SINGLE_RANK else 0


def build_profile_settings(config: Config, run_dir: Path) -> ProfileSettings:
    """What --use-pytorch-profiler and --record-memory-history ask for."""
    o = config.observe
    return ProfileSettings(
        folder=run_dir / "profiles",
        targets=frozenset(o.profile_target) if o.use_pytorch_profiler else frozenset(),
        first=o.profile_step_start,
        end=o.profile_step_end,
        memory_folder=None if o.memory_snapshot_dir is None else Path(o.memory_snapshot_dir),
        memory_steps=o.memory_snapshot_num_steps if o.record_memory_history else None,
    )


def _build_reference(
    config: Config, plan: Plan, models: ModelFactory, actor: TrainModel
) -> TrainModel | PolicyReference | None:
    """The reference: the actor's base with the adapters off if that is the same model, else a model of its own."""
    if plan.reference is None:
        return None
    if shares_reference(config):
        assert isinstance(actor, LoraModel)
        return LoraReference(actor)
    return models.reference(plan.reference)


def _build_value_model(config: Config, folder: Path, models: ModelFactory, actor: TrainModel) -> ValueModel:
    """The critic: adapters and a head over the actor's base if it starts from that, else a model of its own."""
    if not shares_critic(config):
        return models.value(folder)
    assert isinstance(actor, LoraModel)
    critic = LoraCritic(actor, models.value_head(), seed=config.train.seed + 1)
    if starts_from_critic_adapter(config):
        critic.load(folder)
    return critic


def _choose_cost(config: Config, spec: DecoderSpec) -> CostFn | None:
    """What --balance-by balances; None for the number of tokens."""
    if config.train.balance_by == "flops":
        return build_flops_cost(spec)
    return None if spec.vision is None else build_token_cost(spec)


def _offloads_optimizer(config: Config, plan: Plan, policy: BaseCheckpoint, dp_group: DataParallelGroup) -> bool:
    """Whether the trainer's state is offloaded while engines sample; the same on all ranks."""
    found = policy.platform
    nominal = None if found.peak is None else found.peak.memory_bytes
    memory = min(found.memory_bytes, nominal or found.memory_bytes)
    choice = choose_offload(config, plan, resolve_spec(policy.folder, config.models.model_impl), memory)
    if choice.offloads or not choice.is_automatic:
        return choice.offloads
    # Other processes may have memory that the plan does not know of.
    return bool(dp_group.union_names(["short"] if choice.optimizer > found.free_bytes() else []))
