"""The models of a run as one of several ranks holds them under ``--train-backend fsdp``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.backends.fsdp.adapted import AdaptedModel
from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.sharded import open_sharded
from miles.backends.fsdp.sharded_value import ShardedValue
from miles.backends.fsdp.value import HEAD
from miles.launch.config import Config
from miles.launch.layout_memory import recompute_layers_of, recompute_of
from miles.launch.lora import lora_of, start_of
from miles.launch.plan import Plan
from miles.launch.policy import Start, spec_beside
from miles.models.files import read_config
from miles.train.peers import Peers
from miles.train.roles import TrainModel, ValueModel


def sharded_models(config: Config, plan: Plan, start: Start) -> ShardedModels:
    """Those of this rank; all ranks, who have joined, make theirs at once."""
    return ShardedModels(config, start, Mesh(plan.layout, start.platform.device))


class ShardedModels:
    """``trainer.Models`` cut over the ranks of a mesh."""

    def __init__(self, config: Config, start: Start, mesh: Mesh) -> None:
        self._config, self._start, self._mesh = config, start, mesh

    @property
    def peers(self) -> Peers:
        return self._mesh.peers

    def actor(self) -> TrainModel:
        start, lora = self._start, lora_of(self._config.lora, self._start.spec)
        held = {"config": start.config, "like": start.folder, "frozen": lora is not None, **self._trained()}
        trunk = open_sharded(start.folder, start.spec, self._mesh, **held)
        if lora is None:
            return trunk
        begun, seed = start_of(self._config.lora), self._config.train.seed
        return AdaptedModel(trunk, lora, base=start.folder, seed=seed, start=begun)

    def reference(self, folder: Path) -> TrainModel:
        return open_sharded(folder, self._start.spec, self._mesh, dtype=self._start.dtype, frozen=True)

    def teacher(self, folder: Path) -> TrainModel:
        spec = spec_beside(self._config, self._start, folder)
        return open_sharded(folder, spec, self._mesh, dtype=self._start.dtype, frozen=True)

    def value(self, folder: Path) -> ValueModel:
        spec = spec_beside(self._config, self._start, folder)
        value = ShardedValue(
            open_sharded(folder, spec, self._mesh, config=read_config(folder), like=folder, **self._trained())
        )
        if (folder / HEAD).exists():
            value.load_head(folder)
        return value

    def _trained(self) -> dict[str, Any]:
        """How a model is held that learns."""
        train = self._config.train
        recompute = {"recompute": recompute_of(train), "recompute_layers": recompute_layers_of(train)}
        return {"dtype": self._start.dtype, "cpu_offload": self._config.parallel.fsdp_cpu_offload, **recompute}
