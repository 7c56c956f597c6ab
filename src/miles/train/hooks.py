"""User hooks inside the trainer; in distributed training every rank calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from miles.train.model_protocols import ShardedParameters
from miles.train.optim.optimizer import OptimizerProtocol


class InitHook(Protocol):
    """Called when the trained model is loaded and the optimizer is built."""

    def __call__(self, model: ShardedParameters) -> None: ...


class BeforeLogProbsHook(Protocol):
    """Called at the start of a training step, before any log-prob of its tokens is computed."""

    def __call__(self, step: int, model: ShardedParameters) -> None: ...


class BeforeTrainStepHook(Protocol):
    """Called at the start of an optimizer step: number ``update``, from 0, of the training step."""

    def __call__(self, step: int, update: int, model: ShardedParameters, optimizer: OptimizerProtocol) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainHooks:
    """The hooks of a run; None if not set."""

    init: InitHook | None = None
    before_log_probs: BeforeLogProbsHook | None = None
    before_train_step: BeforeTrainStepHook | None = None


NO_TRAIN_HOOKS = TrainHooks()
