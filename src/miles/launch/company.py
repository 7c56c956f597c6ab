"""The policies of a run, wired: each with weights of its own has a model, an engine, and a trainer if it learns.

One policy stands behind the loop's doors as it is; of several, a door is what holds theirs together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from miles.algo.cast import CastCredit, Paid
from miles.algo.table import Plugs
from miles.backends.native.engine import NativeEngine
from miles.cluster.local import Inline, Run, Threaded
from miles.core.protocols import Credit, Lease, WeightSync
from miles.core.types import Version
from miles.launch.config import Config
from miles.launch.engines import RolloutEngine, lone_engine, rollout_engine_of, sync_of
from miles.launch.layout_rules import is_team
from miles.launch.mathematics import credit_for, plugs_of
from miles.launch.members import Member, members_of, roles_of, trained
from miles.launch.plan import Plan, plan_of
from miles.launch.policy import Policy, load_model, read_policy
from miles.launch.server_rules import is_remote
from miles.launch.trainer import Trains, TrainsAdapters, trainer_of
from miles.models.door import Model
from miles.schedule.lease import Colocated, Disjoint, Together
from miles.sync.several import SeveralSyncs, Stream
from miles.train.several import Learner, SeveralTrainers
from miles.train.worker import Worker

Weights = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Enrolled:
    """A policy with weights of its own, before anything large is read: its checkpoint, its plan, its plugs."""

    member: Member
    plan: Plan
    policy: Policy
    plugs: Plugs

    @property
    def config(self) -> Config:
        return self.member.config


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """All policies of a run, the main one first, and by name those with weights of their own."""

    members: tuple[Member, ...]
    owners: Mapping[str, Enrolled]

    @property
    def main(self) -> Enrolled:
        return self.owners[self.members[0].name]

    def behind(self, member: Member) -> Enrolled:
        """The one whose weights a policy has."""
        return self.owners[member.weights]

    def notes(self) -> tuple[str, ...]:
        """What a user should know of the policies beside the main one."""
        return tuple(f"policy {m.name}: {_told(m, self.behind(m))}" for m in self.members[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What the loop's doors open to: engines by the names of their policies, and one of each of the others."""

    engines: Mapping[str, RolloutEngine]
    trainer: Trains
    sync: WeightSync
    lease: Lease
    runs: tuple[Run, ...]


def enrol(config: Config, plan: Plan | None = None) -> Company:
    """Look at every policy's checkpoint, tokenizer and plugs; ``plan`` is the main one's where it is known."""
    members = members_of(config)
    owners: dict[str, Enrolled] = {}
    for member in (m for m in members if m.apart):
        own = plan if plan is not None and member is members[0] else plan_of(member.config)
        owners[member.name] = Enrolled(
            member=member,
            plan=_scaled(own, member, len(roles_of(member, members))),
            policy=read_policy(member.config),
            plugs=plugs_of(member.config),
        )
    return Company(members=members, owners=owners)


def credit_of_all(config: Config, company: Company) -> Credit:
    """How a scored group becomes rows: as the one policy has it, or each role by its own knobs."""
    if config.cast.custom_cast_function_path is None:
        return credit_for(company.main.config)
    learning = (m for m in company.members if trained(m, company.members))
    return CastCredit(roles=[Paid(role=m.name, policy=m.weights, credit=credit_for(m.config)) for m in learning])


def stage_of(company: Company, *, overlap: bool, steps: int) -> Stage:
    """Models, engines and trainers for a run of ``steps`` steps, whose planes ``overlap`` or take turns."""
    owners, main = company.owners, company.main.member.name
    # Servers are watched while a step is trained, which would take too long in this thread.
    remote = any(is_remote(o.config) for o in owners.values())
    trainer_run: Run = Threaded("trainer") if overlap or remote else Inline()
    runs: dict[str, Run] = {name: Threaded(f"engine {name}") if overlap else Inline() for name in owners}
    # Ranks that share a model read each its own part of it.
    models = {name: None if is_team(o.config) else load_model(o.policy) for name, o in owners.items()}
    engines = _engines(company, runs, models) if company.main.plan.samples else {}
    trainers = {
        name: _trainer(o, trainer_run, models[name], steps) for name, o in owners.items() if not o.member.frozen
    }
    syncs = {
        name: _publication(o, trainers.get(name), models[name], engines.get(name), runs[name])
        for name, o in owners.items()
    }
    trainer, sync = trainers[main], syncs[main]
    if len(owners) > 1:
        learners = {
            name: Learner(trainer=_worker(t), every=owners[name].member.train_every) for name, t in trainers.items()
        }
        trainer = SeveralTrainers(learners, main)
        sync = SeveralSyncs(
            {name: Stream(sync=its, version=_version(learners.get(name), name)) for name, its in syncs.items()}, main
        )
    turns = engines and not overlap
    return Stage(
        engines=engines,
        trainer=trainer,
        sync=sync,
        lease=Colocated(engine=Together(list(engines.values())), trainer=trainer) if turns else Disjoint(),
        runs=(*runs.values(), trainer_run),
    )


async def lone_stage(company: Company) -> dict[str, NativeEngine]:
    """An engine for each policy with the weights of its checkpoint, as version 0, and nothing that trains."""
    return {
        name: await lone_engine(shared_out(o.member, at, len(company.owners)), o.policy, name=name)
        for at, (name, o) in enumerate(company.owners.items())
    }


def shared_out(member: Member, at: int, count: int) -> Config:
    """The policy's config as the ``at``-th of ``count`` engines of one device has it: each takes an equal part.

    What is asked for of the memory is asked for of what those before have left.
    """
    whole = member.config.native.engine_memory_fraction
    if count == 1 or "engine_memory_fraction" in member.given:
        return member.config
    part = (whole / count) / (1 - at * whole / count)
    return replace(member.config, native=replace(member.config.native, engine_memory_fraction=part))


def _engines(company: Company, runs: Mapping[str, Run], models: Mapping[str, Model | None]) -> dict[str, RolloutEngine]:
    count, alone = len(company.owners), len(company.owners) == 1
    return {
        name: rollout_engine_of(
            shared_out(o.member, at, count),
            o.plan,
            o.policy,
            runs[name],
            models[name],
            name="engine 0" if alone else f"engine of {name}",
        )
        for at, (name, o) in enumerate(company.owners.items())
    }


def _trainer(owner: Enrolled, run: Run, model: Model | None, steps: int) -> Trains:
    member = owner.member
    return trainer_of(
        owner.config,
        owner.plan,
        owner.policy,
        run,
        model,
        steps=max(1, steps // member.train_every),
        plugs=owner.plugs,
        name=member.name,
    )


def _publication(
    owner: Enrolled, trainer: Trains | None, model: Model | None, engine: RolloutEngine | None, run: Run
) -> WeightSync:
    weights = _frozen(model) if trainer is None else trainer.weights
    copies = owner.plan.transport == "copy" and trainer is not None
    told = {"adapters": trainer.adapters} if isinstance(trainer, TrainsAdapters) else {}
    return sync_of(owner.config, owner.plan, owner.policy, engine, weights, run, copies=copies, **told)


def _frozen(model: Model | None) -> Weights:
    assert model is not None, "a frozen policy is held whole"
    held = {name: p.detach() for name, p in model.named_parameters()}
    return lambda: held


def _worker(trainer: Trains) -> Worker:
    assert isinstance(trainer, Worker), "of several policies each is trained whole, on what it sampled"
    return trainer


def _version(learner: Learner | None, name: str) -> Callable[[], Version]:
    return (lambda: Version(name)) if learner is None else (lambda: learner.trainer.version)


def _scaled(plan: Plan, member: Member, roles: int) -> Plan:
    """The plan of a policy that has several roles, or the rows of several steps, in each of its own steps."""
    times = roles * member.train_every
    if member.config.train.global_batch_size is not None:
        return replace(plan, num_steps_per_rollout=plan.num_steps_per_rollout * times)
    return replace(plan, global_batch_size=plan.global_batch_size * times)


def _told(member: Member, owner: Enrolled) -> str:
    if not member.apart:
        return f"the weights of {member.weights}"
    if member.frozen:
        return f"{owner.policy.folder}, frozen"
    every = "every step" if member.train_every == 1 else f"every {member.train_every} steps"
    return f"{owner.policy.folder}, trained {every}"
