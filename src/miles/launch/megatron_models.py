"""The models of a run as one rank holds them under ``--train-backend megatron``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from miles.backends.megatron.layout import join
from miles.backends.megatron.model import open_megatron
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.layout_memory import recompute_of
from miles.launch.plan import Plan
from miles.launch.policy import Start, spec_beside
from miles.models.spec import DecoderSpec
from miles.train.peers import Peers
from miles.train.roles import TrainModel, ValueModel


def megatron_models(config: Config, plan: Plan, start: Start) -> MegatronModels:
    """Those of this rank; all ranks, who have joined, make theirs at once."""
    return MegatronModels(config, plan, start)


class MegatronModels:
    """``trainer.Models`` that Megatron-Core computes."""

    def __init__(self, config: Config, plan: Plan, start: Start) -> None:
        self._config, self._plan, self._start = config, plan, start
        self._peers: Peers | None = None

    @property
    def peers(self) -> Peers:
        if self._peers is None:  # Megatron's parallel state is the actor's
            self._peers = join(self._plan.layout).peers
        return self._peers

    def actor(self) -> TrainModel:
        start = self._start
        model = self._open(start.folder, start.spec, config=start.config, like=start.folder, flags=self._flags())
        self._peers = model.peers
        return model

    def reference(self, folder: Path) -> TrainModel:
        return self._open(folder, self._start.spec, frozen=True, flags=self._flags())

    def teacher(self, folder: Path) -> TrainModel:
        spec = spec_beside(self._config, self._start, folder)
        return self._open(folder, spec, frozen=True, flags=self._flags())

    def value(self, folder: Path) -> ValueModel:
        raise UsageError("--train-backend megatron has no critic; use --train-backend fsdp.")

    def _flags(self) -> tuple[str, ...]:
        """Megatron's own flags, and what ours mean among them."""
        own, how = self._config.megatron.megatron_flags, recompute_of(self._config.train)
        if how == "none" or "--recompute-granularity" in own:
            return own
        if how == "selective":
            return (*own, "--recompute-granularity", "selective")
        return (*own, "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")

    def _open(self, folder: Path, spec: DecoderSpec, **how: Any) -> Any:
        device = self._start.platform.device
        return open_megatron(folder, spec, self._plan.layout, dtype=self._start.dtype, device=device, **how)
