"""Policies of a run: for each set of weights a model, an engine, a weight sync, and a trainer if it is trained.

With one policy its trainer, engine and sync are used directly; with several, composites fan out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from miles.algo.advantages import MultiAgentEstimator, RoleEstimator
from miles.algo.registry import AlgoHooks
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster import platform
from miles.cluster.executor import Executor, InlineExecutor, ThreadExecutor
from miles.core.protocols import AdvantageEstimator, Lease, Trainer, WeightSync
from miles.core.types import Version
from miles.launch.build.debug import FrozenTrainer
from miles.launch.build.drafts import build_draft_trainer
from miles.launch.build.engines import (
    GetWeights,
    RolloutEngine,
    build_native_engine,
    build_native_sync,
    get_server_weights,
    load_engine,
)
from miles.launch.build.hooks import build_policy_advantages, load_algo_hooks
from miles.launch.build.models import (
    LocalModelFactory,
    PolicyCheckpoint,
    build_policy_trainer,
    build_reward_model_trainer,
    load_model,
    read_policy,
)
from miles.launch.config import Config
from miles.launch.distributed.driver import DistributedTrainer, PolicyRanks, start_distributed_trainer
from miles.launch.distributed.ray_placement import get_reservation
from miles.launch.distributed.resilient_trainer import RecoveryState, ResilientTrainer
from miles.launch.plan.plan import Plan, build_plan, scale_batches
from miles.launch.plan.topology import build_parallel_dims, is_distributed, is_remote, with_ranks
from miles.launch.policies.config import PolicyConfig, get_policies, is_trained, list_roles
from miles.launch.policies.placement import PolicyPlacement, place_policies
from miles.models.base import CausalLM
from miles.models.checkpoint import hf
from miles.models.lora.adapters import LoraAdapters
from miles.observe.start_timer import StartTimer
from miles.rollout.speculation_metrics import SpeculationMeter
from miles.schedule.device_lease import ColocatedLease, DisjointLease, SleepGroup
from miles.sync.publish import MultiPolicySync, PolicySync
from miles.train.multi_policy import FOLDER, MultiPolicyTrainer, PolicyLearner
from miles.train.policy_trainer import PolicyTrainer

if TYPE_CHECKING:
    from miles.backends.remote.remote_engine import RemoteEngine

Report = Callable[[str], None]
"""Called with a sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with its own weights, before anything large is loaded: its checkpoint, plan, hooks and placement.

    A step of it has ``batch_factor`` times the samples that its config says.
    """

    policy: PolicyConfig
    plan: Plan
    checkpoint: PolicyCheckpoint
    algo_hooks: AlgoHooks
    placement: PolicyPlacement
    batch_factor: int = 1

    @property
    def config(self) -> Config:
        return self.policy.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Policies:
    """All policies of a run, the main one first, and by name those with their own weights."""

    all: tuple[PolicyConfig, ...]
    owners: Mapping[str, PolicySpec]

    @property
    def main(self) -> PolicySpec:
        return self.owners[self.all[0].name]

    def get_owner(self, policy: PolicyConfig) -> PolicySpec:
        """The policy whose weights it has."""
        return self.owners[policy.weights]

    def notes(self) -> tuple[str, ...]:
        """What a user should know about the policies other than the main one."""
        return tuple(f"policy {p.name}: {_describe_policy(p, self.get_owner(p))}" for p in self.all[1:])


class PublishingTrainer(Trainer, Protocol):
    """A trainer whose weights can be published."""

    def weights(self) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltTrainer:
    """A trainer as built: ``local`` is a policy trainer in this process, ``resilient`` one with ranks."""

    trainer: PublishingTrainer
    local: PolicyTrainer | None = None
    resilient: ResilientTrainer | None = None

    @property
    def version(self) -> Version:
        """The version of its weights."""
        source = self.local or self.resilient
        return Version() if source is None else source.version

    def adapters(self) -> LoraAdapters | None:
        """The LoRA adapters it trains, if it does."""
        source = self.local or self.resilient
        return None if source is None else source.adapters()

    def get_draft_weights(self) -> GetWeights | None:
        """The weights of the draft head it trains, if it does: the live ones of a trainer in this process."""
        trainer = self.local or self.resilient
        if trainer is None or trainer.draft_weights() is None:
            return None
        return lambda: trainer.draft_weights() or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStack:
    """What the loop uses: engines by policy name, and one trainer, sync and lease.

    ``servers`` is the main policy's engine where it is remote, ``resilient`` its trainer where it has ranks, ``local``
    where it is in this process. ``with_ranks`` are the trainers of all policies that have ranks. ``get_version``
    returns the number of a policy's version. ``meter`` counts the drafts of engines that it wraps.
    """

    engines: Mapping[str, RolloutEngine]
    native_engines: tuple[NativeEngine, ...]
    servers: RemoteEngine | None
    trainer: PublishingTrainer
    local: PolicyTrainer | None
    resilient: ResilientTrainer | None
    sync: WeightSync
    lease: Lease
    executors: tuple[Executor, ...]
    meter: SpeculationMeter = field(default_factory=SpeculationMeter)
    with_ranks: tuple[ResilientTrainer, ...] = ()
    get_version: Callable[[str], int] = lambda policy: 0


def read_policies(config: Config, plan: Plan | None = None) -> Policies:
    """Read every policy's checkpoint config, tokenizer and hooks; ``plan`` is the main one's where it is known."""
    policies = get_policies(config)
    owners: dict[str, PolicySpec] = {}
    placements = place_policies(policies)
    for policy in (p for p in policies if p.owns_weights):
        is_main, placement = policy is policies[0], placements[policy.name]
        own_plan = plan if plan is not None and is_main else build_plan(policy.config)
        own_plan = replace(own_plan, policy=None if is_main else policy.name, engine_offset=placement.engine_offset)
        own_plan = replace(own_plan, num_policies=sum(each.owns_weights for each in policies))
        if plan is not None:
            own_plan = replace(own_plan, run_dir=plan.run_dir)
        factor = len(list_roles(policy, policies)) * policy.train_every
        owners[policy.name] = PolicySpec(
            policy=policy,
            plan=scale_batches(own_plan, policy.config, factor),
            checkpoint=_place(read_policy(policy.config, None if plan is None else plan.run_dir), placement),
            algo_hooks=load_algo_hooks(policy.config),
            placement=placement,
            batch_factor=factor,
        )
    return Policies(all=policies, owners=owners)


def _place(checkpoint: PolicyCheckpoint, placement: PolicyPlacement) -> PolicyCheckpoint:
    """The checkpoint on the policy's own first device, which its embedded engine has too."""
    device = checkpoint.platform.device
    first = (placement.ranks or placement.engines).start
    if device.type == "cpu" or not first or get_reservation() is not None:
        return checkpoint
    own = platform.consecutive_devices(device, first + 1)[-1]
    return replace(checkpoint, platform=replace(checkpoint.platform, device=own))


def build_advantages(config: Config, policies: Policies) -> AdvantageEstimator:
    """The advantage estimator: that of the only policy, or one for each trained role."""
    if config.multi_agent.custom_cast_function_path is None:
        return build_policy_advantages(policies.main.config)
    roles = [
        RoleEstimator(role=p.name, policy=p.weights, estimator=build_policy_advantages(p.config))
        for p in policies.all
        if is_trained(p, policies.all)
    ]
    return MultiAgentEstimator(roles=roles)


def build_stack(
    policies: Policies, *, overlap: bool, steps: int, recovery: RecoveryState, report: Report, timer: StartTimer
) -> PolicyStack:
    """Models, engines and trainers for ``steps`` steps, in which trainer and engines ``overlap`` or take turns."""
    timer.lap("prompts")
    owners, main = policies.owners, policies.main.policy.name
    # A remote engine is monitored while a step is trained, so training must not block this thread.
    remote = any(is_remote(owner.config) for owner in owners.values())
    detached = [name for name, owner in owners.items() if owner.placement.detached]
    train_executor: Executor = ThreadExecutor("trainer") if overlap or remote or detached else InlineExecutor()
    # Policies with ranks are trained at the same time, and a thread waits for each.
    rank_executors = {name: ThreadExecutor(f"trainer of {name}") for name in detached}
    executors: dict[str, Executor] = {
        name: ThreadExecutor(f"engine {name}") if overlap else InlineExecutor() for name in owners
    }
    # Ranks that share a model load only their own shard.
    models = {name: None if _has_ranks(o) else load_model(o.checkpoint) for name, o in owners.items()}
    timer.lap("weights")
    natives, remotes = _build_engines(policies, executors, models, report)
    timer.lap("engine")
    engines: dict[str, RolloutEngine] = {**natives, **remotes}
    trainers = {
        name: build_trainer(
            o,
            rank_executors.get(name, train_executor),
            models[name],
            steps=steps,
            recovery=_select_recovery(recovery, policies, o),
            report=report,
            total_ranks=sum(len(each.placement.ranks) for each in owners.values() if _has_ranks(each)),
        )
        for name, o in owners.items()
        if not o.policy.frozen
    }
    timer.lap("trainer")
    syncs = {
        name: _build_sync(o, trainers.get(name), models[name], natives.get(name), remotes.get(name), executors[name])
        for name, o in owners.items()
    }
    trainer, sync = trainers[main].trainer, syncs[main]
    if len(owners) > 1:
        trainer, sync = _combine_policies(owners, trainers, syncs, main)
    colocated = engines and not overlap
    offloads = policies.main.config.schedule.offload_rollout is not False
    return PolicyStack(
        engines=engines,
        native_engines=tuple(natives.values()),
        servers=remotes.get(main),
        trainer=trainer,
        local=trainers[main].local,
        resilient=trainers[main].resilient,
        sync=sync,
        lease=ColocatedLease(engine=SleepGroup(list(engines.values()) if offloads else ()), trainer=trainer)
        if colocated
        else DisjointLease(),
        executors=(*executors.values(), train_executor, *rank_executors.values()),
        with_ranks=tuple(built.resilient for built in trainers.values() if built.resilient is not None),
        get_version=lambda policy: trainers[policy].version.number if policy in trainers else 0,
    )


def _has_ranks(owner: PolicySpec) -> bool:
    """Whether an SPMD group trains the policy."""
    return not owner.policy.frozen and (owner.placement.detached or is_distributed(owner.config))


def _select_recovery(recovery: RecoveryState, policies: Policies, owner: PolicySpec) -> RecoveryState:
    """What one of several policies recovers from."""
    if len(policies.owners) == 1:
        return recovery
    policy, is_main = owner.policy, owner is policies.main
    subfolder = "" if is_main else f"{FOLDER}/{policy.name}"
    return replace(recovery, policy=policy.name, every=policy.train_every, subfolder=subfolder)


def _combine_policies(
    owners: Mapping[str, PolicySpec],
    trainers: Mapping[str, BuiltTrainer],
    syncs: Mapping[str, WeightSync],
    main: str,
) -> tuple[MultiPolicyTrainer, MultiPolicySync]:
    learners: dict[str, PolicyLearner] = {}
    for name, built in trainers.items():
        trainer = built.local or built.resilient
        assert trainer is not None, "rules refuse other trainers of several policies"
        learners[name] = PolicyLearner(trainer=trainer, every=owners[name].policy.train_every)
    streams = {
        name: PolicySync(sync=sync, version=_make_version_getter(learners.get(name), name))
        for name, sync in syncs.items()
    }
    return MultiPolicyTrainer(learners, main), MultiPolicySync(streams, main)


def _make_version_getter(learner: PolicyLearner | None, name: str) -> Callable[[], Version]:
    return (lambda: Version(name)) if learner is None else (lambda: learner.trainer.version)


# -- engines and weight syncs ---------------------------------------------------------------


async def load_engines(policies: Policies) -> dict[str, NativeEngine]:
    """An engine for each policy with the weights of its checkpoint, as version 0, for runs that do not train."""
    return {
        name: await load_engine(
            split_engine_memory(owner.policy, index, len(policies.owners)), owner.checkpoint, name=name
        )
        for index, (name, owner) in enumerate(policies.owners.items())
    }


def split_engine_memory(policy: PolicyConfig, index: int, count: int) -> Config:
    """The policy's config for the engine ``index`` of ``count`` on one GPU: each takes an equal part of the memory.

    An engine takes its fraction of what those before it left.
    """
    fraction = policy.config.native.engine_memory_fraction
    if count == 1 or "engine_memory_fraction" in policy.own_options:
        return policy.config
    part = (fraction / count) / (1 - index * fraction / count)
    return replace(policy.config, native=replace(policy.config.native, engine_memory_fraction=part))


def _build_engines(
    policies: Policies,
    executors: Mapping[str, Executor],
    models: Mapping[str, CausalLM | None],
    report: Report,
) -> tuple[dict[str, NativeEngine], dict[str, RemoteEngine]]:
    """Native and remote engines by policy; none where the run does not sample."""
    natives: dict[str, NativeEngine] = {}
    remotes: dict[str, RemoteEngine] = {}
    count = len(policies.owners) if policies.main.plan.samples else 0
    for name, owner in list(policies.owners.items())[:count]:
        beside = _list_engines_beside(policies, owner)
        config = split_engine_memory(owner.policy, beside.index(name), len(beside))
        if is_remote(config):
            from miles.launch.build.servers import build_remote_engine

            label = "engine" if count == 1 else f"engine of {name}"
            remotes[name] = build_remote_engine(config, owner.plan, owner.checkpoint, name=label, report=report)
        else:
            label = "engine 0" if count == 1 else f"engine of {name}"
            natives[name] = build_native_engine(
                config,
                owner.checkpoint,
                executors[name],
                models[name],
                name=label,
                frees_cache=owner.plan.transport != "shared",
            )
    return natives, remotes


def _list_engines_beside(policies: Policies, owner: PolicySpec) -> list[str]:
    """The policies whose engines have a device of the owner's engines, the owner among them."""
    devices = set(owner.placement.engines)
    owners = policies.owners.items()
    return [name for name, other in owners if other is owner or devices & set(other.placement.engines)]


def _build_sync(
    owner: PolicySpec,
    built: BuiltTrainer | None,
    model: CausalLM | None,
    native: NativeEngine | None,
    remote: RemoteEngine | None,
    executor: Executor,
) -> WeightSync:
    weights = _get_frozen_weights(owner.checkpoint, model) if built is None else built.trainer.weights
    adapters: Callable[[], LoraAdapters | None] = (lambda: None) if built is None else built.adapters
    draft = None if built is None else built.get_draft_weights()
    if remote is not None:
        from miles.launch.build.servers import build_remote_sync

        published = get_server_weights(owner.config, owner.checkpoint, weights, draft)
        return build_remote_sync(owner.config, owner.plan, owner.checkpoint, remote, published, executor, adapters)
    copies = owner.plan.transport == "copy" and built is not None
    return build_native_sync(
        owner.config, owner.checkpoint, native, weights, executor, copies=copies, adapters=adapters(), draft=draft
    )


def _get_frozen_weights(checkpoint: PolicyCheckpoint, model: CausalLM | None) -> GetWeights:
    assert model is not None, "a frozen policy is loaded in this process"
    weights = {name: p.detach() for name, p in model.named_parameters()}
    head = model.head()
    weights |= dict(hf.zero_factors(checkpoint.rollout_spec, head.device, head.dtype))
    return lambda: weights


# -- trainers -------------------------------------------------------------------------------


def build_trainer(
    owner: PolicySpec,
    executor: Executor,
    model: CausalLM | None,
    *,
    steps: int,
    recovery: RecoveryState,
    report: Report,
    total_ranks: int = 0,
) -> BuiltTrainer:
    """The trainer of a policy: in this process with ``model`` as the actor, or an SPMD group without one."""
    config, plan, checkpoint = owner.config, owner.plan, owner.checkpoint
    steps = max(1, steps // owner.policy.train_every)
    if model is None:
        resilient = ResilientTrainer(
            partial(_start_ranks, owner, executor, steps, total_ranks),
            config.cluster.actor_num_gpus_per_node,
            executor,
            max_restarts=config.fault_tolerance.trainer_max_restarts,
            slow_factor=config.fault_tolerance.slow_rank_factor,
            recovery=recovery,
            report=report,
            version=Version(owner.policy.name),
        )
        return BuiltTrainer(trainer=resilient, resilient=resilient)
    if config.observe.debug_rollout_only:
        return BuiltTrainer(trainer=FrozenTrainer(model))
    models = LocalModelFactory(config, checkpoint, model)
    if config.algo.loss_type == "rm_loss":
        reward_trainer = build_reward_model_trainer(config, plan, executor, models, models.reward_model(), steps=steps)
        return BuiltTrainer(trainer=reward_trainer)
    local = build_policy_trainer(
        config,
        plan,
        checkpoint,
        executor,
        models,
        models.actor(),
        steps=steps,
        algo_hooks=owner.algo_hooks,
        draft=build_draft_trainer(config, checkpoint, models.dp_group),
        name=owner.policy.name,
    )
    return BuiltTrainer(trainer=local, local=local)


def _start_ranks(owner: PolicySpec, executor: Executor, steps: int, total_ranks: int, ranks: int) -> DistributedTrainer:
    config = with_ranks(owner.config, ranks)
    plan = replace(owner.plan, layout=build_parallel_dims(config))
    own = PolicyRanks(
        policy=owner.policy.name,
        batch_factor=owner.batch_factor,
        detached=owner.placement.detached,
        total_ranks=total_ranks if owner.plan.policy is not None or total_ranks > ranks else 0,
    )
    return start_distributed_trainer(
        config, plan, owner.checkpoint, executor, steps=steps, algo_hooks=owner.algo_hooks, ranks=own
    )


def _describe_policy(policy: PolicyConfig, owner: PolicySpec) -> str:
    if not policy.owns_weights:
        return f"the weights of {policy.weights}"
    if policy.frozen:
        return f"{owner.checkpoint.folder}, frozen"
    every = "every step" if policy.train_every == 1 else f"every {policy.train_every} steps"
    return f"{owner.checkpoint.folder}, trained {every}"
