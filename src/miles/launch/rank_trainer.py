"""A trainer of several ranks: the first is this process, the others are children that do what it is told to do.

    the loop -> TeamTrainer -> tells every rank the verb, does its own share, hears what they came to, compares

Every rank builds the same worker out of the run's config and trains on the same batch, of which it takes its part.
Whatever fails on one rank ends all: the others may be waiting for it, so their groups are aborted.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from miles.algo.table import Plugs
from miles.cluster import group, platform
from miles.cluster.local import Run
from miles.cluster.team import Line, Lost, Place, Team, logged, said, spawned
from miles.core.errors import CheckpointError, MilesError, TrainerError
from miles.core.types import Batch, StepReport, Version
from miles.core.wire import NOUNS, Codec
from miles.kernels import arithmetic
from miles.launch.config import Config
from miles.launch.hosting import held
from miles.launch.machine import cores
from miles.launch.mathematics import plugs_of
from miles.launch.plan import Plan, plan_of
from miles.launch.policy import Start, read_start
from miles.launch.trainer import Models, worker_of
from miles.models.lora import Adapters
from miles.train.roles import Paced, TrainModel, weights_of
from miles.train.worker import Worker

if TYPE_CHECKING:
    from miles.cluster.ray.ranks import FarRanks
    from miles.cluster.ray.reserve import Reserved

T = TypeVar("T")


def _fsdp(config: Config, plan: Plan, start: Start) -> Models:
    from miles.launch.sharded_models import sharded_models

    return sharded_models(config, plan, start)


def _megatron(config: Config, plan: Plan, start: Start) -> Models:
    from miles.launch.megatron_models import megatron_models

    return megatron_models(config, plan, start)


BACKENDS: Mapping[str, Callable[[Config, Plan, Start], Models]] = {"fsdp": _fsdp, "megatron": _megatron}
"""Who opens the models of one rank, once the ranks have joined, by the name of ``--train-backend``."""

# The seconds a process may take to start, with all that it imports.
_STARTING = 300.0
# How far apart ranks may be in a number that all of them know.
_CLOSE = 1e-6
# What a rank's report calls the seconds of its own that a token took.
_PACE = "own_per_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a rank must know to build its worker."""

    config: Config
    steps: int


CODEC = Codec((*NOUNS, Opening, Config, *(f.type for f in fields(Config) if isinstance(f.type, type))))


class RankTrainer:
    """What one rank has of the trainer, and the verbs that all ranks do together."""

    def __init__(self, worker: Worker, actor: TrainModel, dtype: torch.dtype, device: torch.device) -> None:
        self._worker, self._actor, self._dtype, self._device = worker, actor, dtype, device
        self.verbs: Mapping[str, Callable[[Any], Any]] = {
            "step": self.step,
            "save": self.save,
            "load": self.load,
            "sleep": self.sleep,
            "wake": self.wake,
            "weights": self.weights,
        }

    def step(self, batch: Batch) -> StepReport:
        report = _now(self._worker.step(batch))
        pace = self._actor.pace() if isinstance(self._actor, Paced) else None
        return report if pace is None else replace(report, seconds={**report.seconds, _PACE: pace})

    def save(self, folder: Path) -> CheckpointError | None:
        """What could not be written, if so: on the first rank that need not be the end of the run."""
        try:
            _now(self._worker.save(folder))
        except CheckpointError as error:
            return error
        return None

    def load(self, folder: Path) -> Version:
        _now(self._worker.load(folder))
        return self._worker.version

    def sleep(self, _: None) -> None:
        _now(self._worker.sleep())

    def wake(self, _: None) -> None:
        _now(self._worker.wake())

    def weights(self, keep: bool | None) -> dict[str, Tensor]:
        """Every parameter whole, as the model computes with it: one after the other, and kept where that is asked."""
        whole: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, local in weights_of(self._actor).items():
                tensor = self._actor.gather(name, local.to(self._dtype))
                if keep:
                    whole[name] = tensor.to(self._device)
        return whole

    def adapters(self) -> Adapters | None:
        return self._worker.adapters()


def _now(work: Coroutine[Any, Any, T]) -> T:
    """The result of something that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a rank's own work waited for something")


class _Here:
    """A ``Run`` that does the work at once."""

    apart = False

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None: ...


def _open(config: Config, plan: Plan, start: Start, *, steps: int, plugs: Plugs) -> RankTrainer:
    """This rank's trainer; all ranks, who have joined, open theirs at once."""
    models = BACKENDS[config.train.train_backend](config, plan, start)
    actor = models.actor()
    worker = worker_of(config, plan, start, _Here(), models, actor, steps=steps, plugs=plugs)
    return RankTrainer(worker, actor, start.dtype, start.platform.device)


def _share_cores(config: Config, world: int) -> None:
    """Ranks on a CPU that each took every core would wait for one another."""
    if config.cluster.num_threads is None:
        torch.set_num_threads(max(1, cores() // world))


# -- followers ------------------------------------------------------------------------------


def follow(place: Place, line: Line) -> None:
    """A follower's whole life: be told of the run, join the others, build, obey until told to end."""
    line.say("here")
    verb, opening = line.hear()
    if verb == "close":
        return
    arithmetic.use(opening.config.models.parity)
    device = group.join(place)
    found = platform.find(device.type, threads=opening.config.cluster.num_threads)
    if device.type == "cpu":
        _share_cores(opening.config, place.world)
    with group.told():
        start = read_start(opening.config, replace(found, device=device))
        plan, plugs = plan_of(opening.config), plugs_of(opening.config)
        rank = _open(opening.config, plan, start, steps=opening.steps, plugs=plugs)
        group.bound(place.patience)
    line.say("open", socket.gethostname())
    while True:
        verb, content = line.hear()
        if verb == "close":
            group.leave()
            return
        with group.told():
            found = rank.verbs[verb](content)
        if isinstance(found, CheckpointError):
            raise found
        line.say(verb, found if isinstance(found, StepReport | Version) else None)


# -- the leader -----------------------------------------------------------------------------


def lead(config: Config, plan: Plan, policy: Start, run: Run, *, steps: int, plugs: Plugs) -> TeamTrainer:
    """Start the other ranks, join them, and build this one's share."""
    if held() is None:
        devices = platform.several(policy.platform.device, plan.layout.world)
    else:  # every rank sees its own device alone
        devices = [policy.platform.device] * plan.layout.world
    return lead_on(devices, config, plan, policy, run, steps=steps, plugs=plugs)


def lead_on(
    devices: Sequence[torch.device], config: Config, plan: Plan, policy: Start, run: Run, *, steps: int, plugs: Plugs
) -> TeamTrainer:
    """The same with a rank on each of these devices, of which several may be one."""
    cluster = held()
    far = None if cluster is None or len(devices) == 1 else _far_ranks(cluster)
    team = Team(
        "the trainer",
        [str(device) for device in devices],
        follow,
        codec=CODEC,
        apart=far is not None or len(set(devices)) == len(devices),
        patience=60.0 * config.parallel.distributed_timeout_minutes,
        error=TrainerError,
        mend="the same command goes on from the last checkpoint",
        logs=plan.run_dir.resolve() / "logs",
        starts=spawned if far is None else far,
        heartbeat=config.faults.heartbeat_timeout,
        meeting="" if far is None else far.meeting,
    )
    trainer = TeamTrainer(team, run)
    try:
        team.replies(_STARTING)
        team.tell("open", Opening(config=config, steps=steps))
        trainer.open(partial(_opened, team, config, plan, policy, steps=steps, plugs=plugs))
        team.feel()
        return trainer
    except BaseException:
        trainer.close()
        raise


def _far_ranks(cluster: Reserved) -> FarRanks:
    from miles.cluster.ray.ranks import FarRanks

    return FarRanks(cluster)


def _opened(team: Team, config: Config, plan: Plan, policy: Start, *, steps: int, plugs: Plugs) -> RankTrainer:
    team.watch(group.abort)  # also while they meet
    device = group.join(team.place)
    if device.type == "cpu":
        _share_cores(config, team.world)
    start = replace(policy, platform=replace(policy.platform, device=device))
    rank = _open(config, plan, start, steps=steps, plugs=plugs)
    group.bound(team.patience)
    return rank


class TeamTrainer:
    """Rank 0 of a team, and the trainer the loop sees; implements the Trainer door.

    Ranks that do not come to the same result, or do not come to one, end the run in one sentence.
    """

    def __init__(self, team: Team, run: Run) -> None:
        self._team, self._run = team, run
        self._rank: RankTrainer | None = None
        self._hosts = [socket.gethostname()]
        self.paces: Mapping[str, float] = {}
        """What each rank called its own of the last step, in seconds a token."""

    def open(self, build: Callable[[], RankTrainer]) -> None:
        """Build this rank's share while the others, who have been told to, build theirs."""
        self._rank = self._own(build)
        self._hosts += self._team.replies()

    async def step(self, batch: Batch) -> StepReport:
        return await self._run(lambda: self.together("step", batch))

    async def save(self, folder: Path) -> None:
        failure = await self._run(lambda: self.together("save", folder))
        if failure is not None:
            raise failure

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self.together("load", folder))

    async def sleep(self) -> None:
        await self._run(lambda: self.together("sleep"))

    async def wake(self) -> None:
        await self._run(lambda: self.together("wake"))

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, put together anew: whoever takes them may keep them."""
        return self.together("weights", None, own=True)

    def adapters(self) -> Adapters | None:
        """The factors that are trained in place of the weights, if they are; every rank has them all."""
        assert self._rank is not None
        return self._rank.adapters()

    @property
    def team(self) -> Team:
        """The other ranks."""
        return self._team

    async def lost(self) -> None:
        """Wait for a rank to end that should not, and raise what is to be said of it."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(ended.set)

        self._team.watch(tell)
        await ended.wait()
        self._team.check()

    def close(self) -> None:
        """End all ranks; none is left when this returns."""
        broken = bool(self._team.fault)
        self._team.close()
        group.leave(broken=broken)

    def together(self, verb: str, content: Any = None, *, own: Any = None) -> Any:
        """All ranks do ``verb``; the first perhaps with ``own`` in place of the others' content."""
        assert self._rank is not None
        with self._team.turn:
            self._team.tell(verb, content)
            mine = self._own(partial(self._rank.verbs[verb], content if own is None else own))
            replies = self._team.replies()
            if isinstance(mine, StepReport):
                self.paces = self._paced([mine, *replies])
            for rank, theirs in enumerate(replies, 1):
                if difference := _difference(mine, theirs):
                    raise self._team.lose(
                        f"rank {rank} of {self._team.world} came to another result than rank 0: {difference}"
                    )
            return mine

    def _paced(self, reports: Sequence[StepReport]) -> dict[str, float]:
        named = zip((f"rank {rank} on {host}" for rank, host in enumerate(self._hosts)), reports, strict=True)
        return {name: report.seconds[_PACE] for name, report in named if _PACE in report.seconds}

    def _own(self, work: Callable[[], T]) -> T:
        """This rank's share: an error here leaves the others in the middle, so it ends them."""
        try:
            with group.told():
                return work()
        except Lost as error:
            raise self._team.lose(error=error) from error
        except MilesError as error:  # all ranks come to it alike
            self._team.lose(f"rank 0 of {self._team.world} failed: {said(error)}")
            raise
        except Exception as error:
            cause = f"rank 0 of {self._team.world} failed: {said(error)}{logged(error, self._team.place)}"
            raise self._team.lose(cause) from error


def _difference(mine: Any, theirs: Any) -> str:
    """Where another rank's result is not this one's; empty where they agree."""
    if isinstance(mine, Version) and mine != theirs:
        return f"its weights are version {theirs.number}, and not {mine.number}"
    if not isinstance(mine, StepReport):
        return ""
    if found := _difference(mine.version, theirs.version):
        return found
    if odd := sorted(mine.metrics.keys() ^ theirs.metrics.keys()):
        return f"only one of them has the metric {odd[0]}"
    for name, value in mine.metrics.items():
        other = theirs.metrics[name]
        same = math.isclose(value, other, rel_tol=_CLOSE, abs_tol=_CLOSE) or (math.isnan(value) and math.isnan(other))
        if not same:
            return f"{name} is {other:.9g} there, and {value:.9g} here"
    return ""
