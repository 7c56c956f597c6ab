"""FSDP model factory: the models of a run as one rank holds them under ``--train-backend fsdp``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.head_models import FsdpCritic, FsdpRewardModel
from miles.launch.build.models import (
    BaseCheckpoint,
    build_lora_model,
    build_lora_reward_model,
    choose_save_dtype,
    resolve_side_spec,
)
from miles.launch.config import Config
from miles.launch.plan.layout_memory import get_frozen_vision, get_recompute_layers, get_recompute_mode
from miles.launch.plan.lora import build_lora
from miles.launch.plan.plan import Plan
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.checkpoint.value_head import HEAD
from miles.models.spec import DecoderSpec
from miles.train.dp_group import DataParallelGroup
from miles.train.model_protocols import ScoreModel, TrainModel, ValueModel


def build_fsdp_factory(config: Config, plan: Plan, checkpoint: BaseCheckpoint) -> FsdpModelFactory:
    """The factory of this rank; all ranks, which have joined, build theirs at once."""
    mesh = FsdpMesh(plan.layout, checkpoint.platform.device, numerics=checkpoint.numerics)
    return FsdpModelFactory(config, checkpoint, mesh)


class FsdpModelFactory:
    """A ``ModelFactory`` of models sharded over the ranks of a device mesh."""

    def __init__(self, config: Config, checkpoint: BaseCheckpoint, mesh: FsdpMesh) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._mesh = mesh
        self._base: FsdpModel | None = None

    @property
    def dp_group(self) -> DataParallelGroup:
        return self._mesh.dp_group

    def actor(self) -> TrainModel:
        checkpoint, config = self._checkpoint, self._config
        lora = build_lora(config.lora, checkpoint.spec)
        base = self._load_trained(
            checkpoint.folder,
            checkpoint.spec,
            checkpoint.config,
            frozen=lora is not None,
            save_dtype=choose_save_dtype(config, checkpoint),
        )
        if lora is None:
            return base
        self._base = base
        return build_lora_model(config, checkpoint, base, lora)

    def reference(self, folder: Path) -> TrainModel:
        return self._load_frozen(folder, self._checkpoint.spec)

    def teacher(self, folder: Path) -> TrainModel:
        return self._load_frozen(folder, resolve_side_spec(self._config, self._checkpoint, folder))

    def value(self, folder: Path) -> ValueModel:
        spec = resolve_side_spec(self._config, self._checkpoint, folder)
        value = FsdpCritic(self._load_trained(folder, spec, read_config(folder), frozen=False))
        if (folder / HEAD).exists():
            value.load_head(folder)
        return value

    def value_head(self) -> FsdpCritic:
        assert self._base is not None, "the actor with adapters is loaded first"
        return FsdpCritic(self._base)

    def reward_model(self) -> ScoreModel:
        checkpoint, config = self._checkpoint, self._config
        lora = build_lora(config.lora, checkpoint.spec)
        base = self._load_trained(checkpoint.folder, checkpoint.spec, checkpoint.config, frozen=lora is not None)
        model = FsdpRewardModel(base, config=checkpoint.config)
        return model if lora is None else build_lora_reward_model(config, checkpoint, model, lora)

    def _load_trained(
        self,
        folder: Path,
        spec: DecoderSpec,
        config: Mapping[str, Any],
        *,
        frozen: bool,
        save_dtype: torch.dtype | None = None,
    ) -> FsdpModel:
        """A model that is trained, or whose adapters are if it is ``frozen``."""
        train = self._config.train
        model = FsdpModel(
            spec,
            self._mesh,
            config=config,
            like=folder,
            dtype=self._checkpoint.dtype,
            save_dtype=save_dtype,
            frozen=frozen,
            frozen_vision=get_frozen_vision(train),
            cpu_offload=self._config.parallel.fsdp_cpu_offload,
            recompute=get_recompute_mode(train),
            recompute_layers=get_recompute_layers(train),
        )
        model.load(folder)
        return model

    def _load_frozen(self, folder: Path, spec: DecoderSpec) -> FsdpModel:
        model = FsdpModel(spec, self._mesh, dtype=self._checkpoint.dtype, frozen=True)
        model.load(folder)
        return model
