"""The training plane of a run: one process that has all of it, or the first of a team of ranks.

The models of a run are opened by a ``Models``: whole in one process, or one rank's part of each as a backend holds it
(``rank_trainer.BACKENDS``). What is made of them is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from miles.algo.config import WITH_CRITIC
from miles.algo.table import Plugs
from miles.backends.fsdp.adapted import AdaptedModel
from miles.backends.fsdp.model import FsdpModel
from miles.backends.fsdp.reward import FsdpReward
from miles.cluster.local import Run
from miles.core.protocols import Trainer
from miles.core.types import Version
from miles.launch.config import Config
from miles.launch.critics import critic_of, whole_value
from miles.launch.dumped import Idle
from miles.launch.hooks import hooks_of
from miles.launch.layout_memory import adapted_by_rank, held_by_rank, recompute_layers_of, recompute_of
from miles.launch.layout_rules import layout_of, with_ranks
from miles.launch.lora import lora_of, start_of
from miles.launch.plan import Plan
from miles.launch.policy import Policy, Start, load_model, load_other
from miles.models.door import Model
from miles.models.lora import Adapters
from miles.models.recompute import set_recompute
from miles.train.balance import flops_of
from miles.train.peers import ALONE, Peers
from miles.train.reward import RewardTrainer
from miles.train.roles import TrainModel, ValueModel
from miles.train.worker import Worker


class Trains(Trainer, Protocol):
    """A trainer whose weights can be published."""

    def weights(self) -> Mapping[str, Tensor]: ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A trainer that may train adapters in place of the weights."""

    def adapters(self) -> Adapters | None: ...


class Models(Protocol):
    """The models of a run as this rank has them, each opened when asked for; all ranks ask in the same order."""

    @property
    def peers(self) -> Peers: ...

    def actor(self) -> TrainModel: ...

    def reference(self, folder: Path) -> TrainModel:
        """A frozen model of the policy's architecture."""
        ...

    def teacher(self, folder: Path) -> TrainModel:
        """A frozen model of whatever architecture."""
        ...

    def value(self, folder: Path) -> ValueModel:
        """What the critic starts from."""
        ...


class WholeModels:
    """``Models`` of one process, that has its ``model`` for an actor already."""

    peers = ALONE

    def __init__(self, config: Config, policy: Start, model: Model) -> None:
        self._config, self._policy, self._model = config, policy, model

    def how(self) -> dict[str, Any]:
        """How the actor is held and saved."""
        again = recompute_of(self._config.train)
        set_recompute(self._model, again, recompute_layers_of(self._config.train))
        return {"config": self._policy.config, "like": self._policy.folder, "gradient_checkpointing": again != "none"}

    def actor(self) -> TrainModel:
        config, policy = self._config, self._policy
        lora = lora_of(config.lora, policy.spec)
        if lora is None:
            return FsdpModel(self._model, **self.how())
        trunk = FsdpModel(self._model, **self.how(), frozen=True)
        start = start_of(config.lora)
        return AdaptedModel(trunk, lora, base=policy.folder, seed=config.train.seed, start=start)

    def reference(self, folder: Path) -> TrainModel:
        return FsdpModel(load_model(self._policy, folder), config=self._policy.config, frozen=True)

    def teacher(self, folder: Path) -> TrainModel:
        return FsdpModel(load_other(self._config, self._policy, folder), frozen=True)

    def value(self, folder: Path) -> ValueModel:
        return whole_value(self._config, self._policy, folder)


def trainer_of(
    config: Config,
    plan: Plan,
    policy: Policy,
    run: Run,
    model: Model | None,
    *,
    steps: int,
    plugs: Plugs,
    name: str = "actor",
) -> Trains:
    """The training plane: ``model`` as the actor, and others that the loss asks for; or as a reward model.

    Without a model a team is started, which reads its own.
    """
    if model is None:
        from miles.launch.mending import MendedTrainer
        from miles.launch.rank_trainer import TeamTrainer, lead

        def team(ranks: int) -> TeamTrainer:
            sized = with_ranks(config, ranks)
            laid_out = replace(plan, layout=layout_of(sized))
            return lead(sized, laid_out, policy, run, steps=steps, plugs=plugs)

        most, slow = config.faults.trainer_max_restarts, config.faults.slow_rank_factor
        return MendedTrainer(team, config.cluster.actor_num_gpus_per_node, run, most=most, slow=slow)
    if config.observe.debug_rollout_only:
        return Idle(model)
    models = WholeModels(config, policy, model)
    if config.algo.loss_type == "rm_loss":
        count, scores = plan.num_steps_per_rollout, FsdpReward(model, **models.how())
        how = {"train": config.train, "hooks": hooks_of(config)}
        return RewardTrainer(scores, **how, steps=count, updates=steps * count, run=run)
    return worker_of(config, plan, policy, run, models, models.actor(), steps=steps, plugs=plugs, name=name)


def worker_of(
    config: Config,
    plan: Plan,
    policy: Start,
    run: Run,
    models: Models,
    actor: TrainModel,
    *,
    steps: int,
    plugs: Plugs,
    name: str = "actor",
) -> Worker:
    """What one rank does of a run of ``steps`` training steps of the policy ``name``."""
    updates = steps * plan.num_steps_per_rollout
    return Worker(
        actor,
        algo=config.algo,
        train=config.train,
        steps=plan.num_steps_per_rollout,
        updates=updates,
        temperature=config.rollout.rollout_temperature,
        run=run,
        reference=None if plan.reference is None else models.reference(plan.reference),
        critic=None if plan.critic is None else critic_of(config, models.value(plan.critic), models.peers, updates),
        teachers=[models.teacher(folder) for folder in plan.teachers.values()],
        plugs=plugs,
        hooks=hooks_of(config),
        version=Version(name),
        parity_tolerance=config.schedule.parity_tolerance,
        parity_stop=config.schedule.parity_stop,
        parity_no_replay_interval=config.schedule.parity_no_replay_interval,
        offload=_offload(config, plan, policy),
        lends=plan.transport == "shared",
        peers=models.peers,
        price=flops_of(policy.spec) if config.train.balance_by == "flops" else None,
    )


def _offload(config: Config, plan: Plan, policy: Start) -> bool:
    """Should the optimizer make room for the engine? As told; else where it would be in the way."""
    if config.train.offload_train is not None:
        return config.train.offload_train
    models = 2 if config.algo.advantage_estimator in WITH_CRITIC and config.train.critic_device == "auto" else 1
    dtype, train = str(policy.dtype).removeprefix("torch."), config.train
    how, lora = {"moments": train.optimizer_state_dtype}, lora_of(config.lora, policy.spec)
    if lora is not None:
        own = adapted_by_rank(policy.spec, plan.layout, dtype, lora, **how).optimizer
    else:
        own = held_by_rank(policy.spec, plan.layout, dtype, **how, optimizer=train.optimizer).optimizer
    return models * own > policy.platform.free_bytes() // 4
