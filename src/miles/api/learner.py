"""The training half of a policy: samples to gradients, gradients to weights, weights and optimizer to checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.algo.advantages import build_samples
from miles.algo.config import CRITIC_ESTIMATORS, OFFLINE_LOSSES, AlgoConfig
from miles.algo.registry import ALGORITHMS, AlgoHooks
from miles.api.functions import adapt_loss
from miles.api.options import list_algorithm_options
from miles.api.samples import PolicySample, group_samples
from miles.core.errors import CheckpointError, UsageError, storage_errors
from miles.core.protocols import AdvantageEstimator
from miles.core.types import Author, Floats, Sample
from miles.launch.build.hooks import build_policy_advantages
from miles.launch.config import Config
from miles.schedule.checkpoints import CheckpointDirectory, Cursor, read_cursor
from miles.train.policy_trainer import Objective, PolicyTrainer

LossLike = Callable[..., Any] | str
"""A function of the log-probs and advantages, or the name of an algorithm or loss."""


class Learner:
    """Trains the policy of ``trainer`` on samples; ``estimator`` gives the samples of the policy's own algorithm."""

    def __init__(self, config: Config, trainer: PolicyTrainer, estimator: AdvantageEstimator) -> None:
        self.trainer = trainer
        self._config = config
        self._objectives: dict[str, tuple[Objective | None, AdvantageEstimator]] = {"": (None, estimator)}

    async def forward_backward(
        self, samples: Sequence[PolicySample], loss: LossLike | None, advantages: Sequence[float] | None
    ) -> dict[str, float]:
        if not samples:
            raise UsageError("forward_backward() has no samples; give at least one.")
        objective, estimator = self._find_objective(loss)
        if advantages is not None:
            rows = _build_rows(samples, advantages)
        else:
            self._check_rewards(samples, objective)
            rows = [row for group in group_samples(samples) for row in estimator(group)]
        return await self.trainer.forward_backward(rows, objective)

    async def log_probs(self, samples: Sequence[PolicySample]) -> list[Floats]:
        if not samples:
            return []
        first = [replace(s, trajectory=replace(s.trajectory, branches=s.trajectory.branches[:1])) for s in samples]
        return await self.trainer.log_probs(_build_rows(first, [0.0] * len(first)))

    async def save(self, folder: Path, state: Mapping[str, Any]) -> Path:
        """Write a checkpoint into ``folder``, complete or not at all; returns its folder."""
        with storage_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        number = self.trainer.version.number
        directory = CheckpointDirectory(folder)
        name = await directory.save(Cursor(step=number, version=number, source=state), self.trainer.save)
        return directory.get_path(name)

    async def load(self, folder: Path) -> Mapping[str, Any]:
        """Load a checkpoint, or the newest of a folder of them; returns what ``save`` was given."""
        path, cursor = find_state(folder)
        await self.trainer.load(path)
        return cursor.source

    def _find_objective(self, loss: LossLike | None) -> tuple[Objective | None, AdvantageEstimator]:
        """The objective of a loss (None is the trainer's own), and the estimator that belongs to it."""
        if loss is None:
            return self._objectives[""]
        if callable(loss):
            algo = replace(self._config.algo, loss_type="custom_loss")
            objective = self.trainer.build_objective(algo, AlgoHooks(loss_fn=adapt_loss(loss)))
            return objective, self._build_estimator(replace(algo, loss_type="policy_loss"))
        if loss not in self._objectives:
            algo = self._name_algorithm(loss)
            self._objectives[loss] = self.trainer.build_objective(algo), self._build_estimator(algo)
        return self._objectives[loss]

    def _name_algorithm(self, loss: str) -> AlgoConfig:
        algo = self._config.algo
        named = {"loss_type": "policy_loss"} if loss == "policy_loss" else list_algorithm_options(loss)
        if named.get("advantage_estimator") in CRITIC_ESTIMATORS and algo.advantage_estimator not in CRITIC_ESTIMATORS:
            raise UsageError(f"loss {loss!r} needs a critic; open the policy with algorithm={loss!r}.")
        if named.get("loss_type") == "rm_loss":
            raise UsageError("a reward model has a trainer of its own; use miles.train with algorithm='reward_model'.")
        kind = {"loss_type": "policy_loss"} if loss in ALGORITHMS else {}
        return replace(algo, **kind, **named)

    def _build_estimator(self, algo: AlgoConfig) -> AdvantageEstimator:
        return build_policy_advantages(replace(self._config, algo=algo))

    def _check_rewards(self, samples: Sequence[PolicySample], objective: Objective | None) -> None:
        algo = self._config.algo if objective is None else objective.algo
        missing = [number for number, sample in enumerate(samples) if sample.reward is None]
        if missing and algo.loss_type not in OFFLINE_LOSSES:
            raise UsageError(f"sample {missing[0]} has no reward; call score() first, or give advantages.")


def find_state(folder: Path) -> tuple[Path, Cursor]:
    """The checkpoint that ``folder`` is, or the newest of a folder of checkpoints or of a run."""
    if (folder / "cursor.json").is_file():
        return folder, read_cursor(folder)
    for directory in (folder, folder / "checkpoints"):
        found = CheckpointDirectory(directory).latest()
        if found is not None:
            return found
    raise CheckpointError(f"{folder} has no state of a policy; name the folder that save_state() was given.")


def _build_rows(samples: Sequence[PolicySample], advantages: Sequence[float]) -> list[Sample]:
    if len(advantages) != len(samples):
        raise UsageError(f"there are {len(advantages)} advantages for {len(samples)} samples; give one for each.")
    return [
        row
        for sample, advantage in zip(samples, advantages, strict=True)
        for row in build_samples(
            sample.prompt.id, sample.trajectory, advantage=float(advantage), trained_author=Author.POLICY
        )
    ]
