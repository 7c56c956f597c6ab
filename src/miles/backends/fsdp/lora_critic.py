"""Adapter critic of PPO: the policy's frozen base with LoRA adapters and a value head of its own.

Policy and critic share the base and its decoder; whichever computes has its adapters in the decoder (``in_use``). A
checkpoint has the critic's adapters, in PEFT's format, and its value head, but no weights of the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from miles.backends.fsdp.lora_model import LoraModel, list_factor_matrices
from miles.core.errors import CheckpointError
from miles.models.checkpoint import peft
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.value_head import HEAD
from miles.models.lora.adapters import LoraAdapters
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch
from miles.train.model_protocols import KeptTensors, ValueCallback
from miles.train.optim.optimizer import full_grad_norm
from miles.train.optim.sharded_adam import RankGroup


class HeadCritic(Protocol):
    """A critic over the decoder of the policy, of which the value head alone is trained; every rank has it in full."""

    @property
    def device(self) -> torch.device: ...
    @property
    def head_parameters(self) -> Mapping[str, Tensor]: ...
    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback, /
    ) -> list[KeptTensors]: ...
    def finalize_grads(self) -> None: ...
    def save_head(self, folder: Path) -> None: ...
    def load_head(self, folder: Path) -> None: ...


class LoraCritic:
    """A ValueModel: the ``policy``'s base, new adapters of the same form, and the head of ``critic``."""

    def __init__(self, policy: LoraModel, critic: HeadCritic, *, seed: int) -> None:
        self._policy = policy
        self._critic = critic
        self._adapters = policy.build_adapters(seed=seed)

    @property
    def device(self) -> torch.device:
        return self._critic.device

    @property
    def moments_group(self) -> RankGroup | None:
        """The ranks that share the moments, as of the policy."""
        return self._policy.moments_group

    def adapters(self) -> LoraAdapters:
        """Return the critic's adapters."""
        return self._adapters

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._adapters.parameters, **self._critic.head_parameters}

    def in_use(self) -> AbstractContextManager[None]:
        return self._policy.use_adapters(self._adapters)

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback
    ) -> list[KeptTensors]:
        assert self._policy.adapters() is self._adapters, "values are computed within in_use()"
        return self._policy.run_with_dropout(self._critic.forward_backward_values, micro_batches, callback)

    def finalize_grads(self) -> None:
        self._critic.finalize_grads()
        self._policy.sum_factor_grads(self._adapters)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return full_grad_norm(grads).to(self.device)

    def after_update(self) -> None:
        """The next ``in_use`` merges the new adapters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Every rank has all of it."""
        return local

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return list_factor_matrices(self._adapters)

    def move(self, device: torch.device) -> None:
        """Move what is the critic's own; the policy moves the base."""
        self._adapters.to(device)
        for parameter in self._critic.head_parameters.values():
            parameter.data = parameter.data.to(device)

    def save(self, folder: Path) -> None:
        self._policy.save_adapters(folder, self._adapters)
        self._critic.save_head(folder)

    def save_plan(self) -> SavePlan | None:
        head = tuple(single_tensor_unit(name, value) for name, value in self._critic.head_parameters.items())
        plan = SavePlan(units=(), config={}, extra_files={HEAD: head})
        return self._policy.plan_adapters(plan, self._adapters)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if not peft.has_adapter(folder):
            raise CheckpointError(
                f"{folder} is a critic with weights of its own, and not adapters over the policy's base; add "
                f"--critic-load {folder} to continue it as it is."
            )
        self._adapters.load(self._policy.read_factors(folder))
        self._critic.load_head(folder)
