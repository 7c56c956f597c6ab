"""A user's own functions inside the trainer; where ranks share a model, every one of them calls them alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from miles.train.optim import Updates
from miles.train.roles import Stored


class Init(Protocol):
    """The model that learns has its weights, and the optimizer is made."""

    def __call__(self, model: Stored) -> None: ...


class BeforeLogProbs(Protocol):
    """A training step begins, and no log-prob of its tokens has been computed yet."""

    def __call__(self, step: int, model: Stored) -> None: ...


class BeforeTrainStep(Protocol):
    """An optimizer step begins: number ``update``, from 0, of the training step."""

    def __call__(self, step: int, update: int, model: Stored, optimizer: Updates) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Those that a run has."""

    init: Init | None = None
    before_log_probs: BeforeLogProbs | None = None
    before_train_step: BeforeTrainStep | None = None


NO_HOOKS = Hooks()
