"""Megatron model factory: the models of a run as one rank holds them under ``--train-backend megatron``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles.backends.fsdp.lora_critic import HeadCritic
from miles.backends.megatron.config import build_recompute_flags
from miles.backends.megatron.head_models import (
    MegatronCritic,
    MegatronRewardModel,
    MegatronScoreHead,
    MegatronValueHead,
)
from miles.backends.megatron.model import MegatronModel, load_megatron_model
from miles.backends.megatron.parallel_state import initialize_parallel_state
from miles.launch.build.models import BaseCheckpoint, build_lora_model, build_lora_reward_model, resolve_side_spec
from miles.launch.config import Config
from miles.launch.plan.layout_memory import get_frozen_vision, get_recompute_layers, get_recompute_mode
from miles.launch.plan.lora import build_lora
from miles.launch.plan.plan import Plan
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.checkpoint.sequence_classifier import SCORE
from miles.models.checkpoint.value_head import HEAD, value_head_shapes
from miles.models.lora.targets import LoraSpec
from miles.models.spec import DecoderSpec
from miles.train.dp_group import DataParallelGroup
from miles.train.model_protocols import ScoreModel, TrainModel, ValueModel


class MegatronModelFactory:
    """A ``ModelFactory`` of Megatron-Core models; all ranks, which have joined, build theirs at once."""

    def __init__(self, config: Config, plan: Plan, checkpoint: BaseCheckpoint) -> None:
        self._config = config
        self._plan = plan
        self._checkpoint = checkpoint
        self._dp_group: DataParallelGroup | None = None
        self._actor: MegatronModel | None = None

    @property
    def dp_group(self) -> DataParallelGroup:
        if self._dp_group is None:  # Megatron's parallel state belongs to the actor
            self._dp_group = initialize_parallel_state(self._plan.layout).dp_group
        return self._dp_group

    def actor(self) -> TrainModel:
        checkpoint, config = self._checkpoint, self._config
        lora = build_lora(config.lora, checkpoint.spec)
        model = self._load(
            checkpoint.folder,
            checkpoint.spec,
            config=checkpoint.config,
            frozen=lora is not None,
            transformer_engine=lora is None,
            lora=lora,
        )
        self._dp_group = model.dp_group
        self._actor = model
        return model if lora is None else build_lora_model(config, checkpoint, model, lora)

    def reference(self, folder: Path) -> TrainModel:
        return self._load(folder, self._checkpoint.spec, frozen=True, balanced=False)

    def teacher(self, folder: Path) -> TrainModel:
        spec = resolve_side_spec(self._config, self._checkpoint, folder)
        return self._load(folder, spec, frozen=True, balanced=False)

    def value(self, folder: Path) -> ValueModel:
        spec = resolve_side_spec(self._config, self._checkpoint, folder)
        head = value_head_shapes(spec.hidden_size)
        backbone = self._load(folder, spec, config=read_config(folder), frozen=False, scalar_head=head, balanced=False)
        value = MegatronCritic(backbone)
        if (folder / HEAD).exists():
            value.load_head(folder)
        return value

    def value_head(self) -> HeadCritic:
        assert self._actor is not None, "the actor with adapters is loaded first"
        return MegatronValueHead(self._actor)

    def reward_model(self) -> ScoreModel:
        checkpoint, config = self._checkpoint, self._config
        lora = build_lora(config.lora, checkpoint.spec)
        backbone = self._load(
            checkpoint.folder,
            checkpoint.spec,
            config=checkpoint.config,
            frozen=lora is not None,
            transformer_engine=lora is None,
            lora=lora,
            scalar_head=None if lora is not None else {SCORE: (1, checkpoint.spec.hidden_size)},
        )
        self._dp_group = backbone.dp_group
        if lora is None:
            return MegatronRewardModel(backbone, config=checkpoint.config)
        head = MegatronScoreHead(backbone, config=checkpoint.config)
        return build_lora_reward_model(config, checkpoint, head, lora)

    def _get_flags(self) -> tuple[str, ...]:
        """Megatron's own flags, and ours under its names."""
        train = self._config.train
        recompute = build_recompute_flags(get_recompute_mode(train), get_recompute_layers(train))
        return (*self._config.megatron.megatron_flags, *recompute)

    def _load(
        self,
        folder: Path,
        spec: DecoderSpec,
        *,
        config: Mapping[str, Any] | None = None,
        frozen: bool,
        transformer_engine: bool = True,
        lora: LoraSpec | None = None,
        scalar_head: Mapping[str, tuple[int, ...]] | None = None,
        balanced: bool = True,
    ) -> MegatronModel:
        """A model that is trained, or ``frozen``; saved with ``config`` if that is given."""
        return load_megatron_model(
            folder,
            spec,
            self._plan.layout,
            dtype=self._checkpoint.dtype,
            device=self._checkpoint.platform.device,
            config=config,
            like=None if config is None else folder,
            frozen=frozen,
            transformer_engine=transformer_engine,
            lora=lora,
            flags=self._get_flags(),
            scalar_head=scalar_head,
            balanced=balanced,
            numerics=self._checkpoint.numerics,
            frozen_vision=get_frozen_vision(self._config.train),
        )
