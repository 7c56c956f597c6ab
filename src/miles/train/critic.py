"""PPO critic: a value model trained beside the policy and never sent to engines.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.policy_loss import ValueLoss
from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.train.advantages import BatchWithAdvantages
from miles.train.batch_tensors import MicroBatch
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.grad_accumulation import MetricSums
from miles.train.model_protocols import KeptTensors, ValueModel
from miles.train.optim.lr_scheduler import build_critic_lr_schedule
from miles.train.optim.optimizer import build_optimizer

_VALUE = "value"
CRITIC_FOLDER = "critic"
"""Subfolder of a checkpoint."""


class Critic:
    """A value model with its own optimizer and schedule, for ``updates`` optimizer steps in the whole run.

    It may be on another device than the policy: micro-batches are copied there and values back. With a
    ``dedicated_device`` it never makes room for an engine.
    """

    def __init__(
        self,
        model: ValueModel,
        *,
        algo: AlgoConfig,
        train: TrainConfig,
        updates: int,
        dedicated_device: bool = False,
        dp_group: DataParallelGroup = SINGLE_RANK,
    ) -> None:
        self.dedicated_device = dedicated_device
        self._model = model
        self._dp_group = dp_group
        self._saver = checkpoint.build_saver(train)
        self._loss = ValueLoss(clip=algo.value_clip)
        trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
        schedule = build_critic_lr_schedule(train, updates=updates)
        self._optimizer = build_optimizer(
            trained, replace(train, vision_lr=None), schedule, model=model, lr_flag="--critic-lr"
        )

    @property
    def updates(self) -> int:
        """Number of optimizer steps so far."""
        return self._optimizer.updates

    @torch.no_grad()
    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Return the value before each trained token, on the device of each micro-batch."""

        def keep(_: int, value_R: Tensor) -> tuple[None, KeptTensors]:
            return None, {_VALUE: value_R}

        with self._model.in_use():
            found = self._model.forward_backward_values([rows.to(self._model.device) for rows in micro_batches], keep)
        return [kept[_VALUE].to(rows.tokens_T.device) for kept, rows in zip(found, micro_batches, strict=True)]

    def update(self, batches: Sequence[BatchWithAdvantages]) -> dict[str, float]:
        """One optimizer step on a global batch."""
        device, sums = self._model.device, MetricSums()
        micro_batches = [batch.micro_batch.to(device) for batch in batches]

        def compute_loss(index: int, value_R: Tensor) -> tuple[Tensor, KeptTensors]:
            old_R, return_R = batches[index].value_R, batches[index].return_R
            assert old_R is not None and return_R is not None, "advantages without the critic's values"
            output = self._loss(value_R, old_R.to(device), return_R.to(device), micro_batches[index].aggregator())
            return output.loss, {name: value.detach() for name, value in output.metrics.items()}

        with self._model.in_use():
            results = self._model.forward_backward_values(micro_batches, compute_loss)
        for kept in results:
            for name, value in kept.items():
                sums.add(name, value)
        self._model.finalize_grads()
        grad_norm, lr = self._optimizer.step()
        self._model.after_update()
        return sums.to_floats(self._dp_group) | {"critic_grad_norm": grad_norm, "critic_lr": lr}

    def save(self, folder: Path, version: Version) -> None:
        """Write it into a subfolder of the checkpoint ``folder``."""
        (folder / CRITIC_FOLDER).mkdir(exist_ok=True)  # the first rank creates it
        checkpoint.save(folder / CRITIC_FOLDER, self._model, self._optimizer, version, self._dp_group, self._saver)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no critic, which --advantage-estimator ppo needs to resume; "
                f"to start from its weights alone use --hf-checkpoint {folder}."
            )
        checkpoint.load(folder / CRITIC_FOLDER, self._model, self._optimizer, self._dp_group)

    def move(self, device: torch.device) -> None:
        """Move the weights and the optimizer state to ``device``."""
        self._model.move(device)
        self._optimizer.move(device)
