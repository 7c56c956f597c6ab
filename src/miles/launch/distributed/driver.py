"""Distributed trainer: this process drives the ranks of an SPMD group, and is rank 0 of the main policy's.

    loop -> DistributedTrainer -> sends a command to every rank, runs it on rank 0, collects and compares the results

A process is in one process group, so the ranks of every further policy are processes of their own (``detached``), and
their rank 0 exports the weights to this one. Every rank builds the same policy trainer from the run's config, and
trains on its part of the same batch. A failure on one rank ends all: the others may be waiting for it in a collective,
so their process groups are aborted.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from miles.algo.registry import AlgoHooks
from miles.cluster import platform, process_group
from miles.cluster.executor import Executor
from miles.cluster.spmd import (
    RankChannel,
    RankContext,
    RankLost,
    SpmdGroup,
    log_traceback,
    spawn_ranks,
    summarize_error,
)
from miles.core.errors import CheckpointError, MilesError, TrainerError
from miles.core.serialization import CORE_TYPES, Codec
from miles.core.types import Batch, StepReport, TokenStats, Version
from miles.kernels.numerics import configure_cublas
from miles.launch.build.drafts import build_draft_trainer
from miles.launch.build.hooks import load_algo_hooks
from miles.launch.build.models import (
    BaseCheckpoint,
    LocalModelFactory,
    ModelFactory,
    build_policy_trainer,
    build_reward_model_trainer,
    load_model,
    read_checkpoint,
)
from miles.launch.config import Config
from miles.launch.distributed.ray_placement import get_reservation
from miles.launch.distributed.weight_export import WeightExport, WeightExportEntry, WeightExporter, import_weights
from miles.launch.plan.hardware import count_cores
from miles.launch.plan.plan import Plan, build_plan, scale_batches
from miles.models.decoder import Decoder
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.lora.adapters import LoraAdapters
from miles.train.model_protocols import HasAdapters, ReportsTokenTime, ScoreModel, TrainModel, get_engine_weights
from miles.train.policy_trainer import PolicyTrainer
from miles.train.reward_model_trainer import RewardModelTrainer

if TYPE_CHECKING:
    from miles.cluster.ray.spmd import RayRankLauncher

T = TypeVar("T")

# Seconds a process may take to start, with all that it imports.
_START_TIMEOUT = 300.0
# Largest relative difference between ranks of a number that all of them compute.
_TOLERANCE = 1e-6
# Key in a report's seconds of the rank's own seconds per token.
_SECONDS_PER_TOKEN = "compute_per_token"


# -- one rank -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRanks:
    """Whose ranks these are. With ``detached`` all of them are processes; else this one is rank 0.

    A step has ``batch_factor`` times the samples that the policy's config says, and this machine has ``total_ranks``
    of all policies (0: no others).
    """

    policy: str = "actor"
    batch_factor: int = 1
    detached: bool = False
    total_ranks: int = 0


SINGLE_POLICY = PolicyRanks()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What a rank needs to build its trainer; ``shares_memory`` if the leader is on the same machine."""

    config: Config
    steps: int
    ranks: PolicyRanks
    shares_memory: bool = True


_SETUP_TYPES = (RankSetup, PolicyRanks, WeightExport, WeightExportEntry, Config)
CODEC = Codec((*CORE_TYPES, *_SETUP_TYPES, *(f.type for f in fields(Config) if isinstance(f.type, type))))


class RankTrainer:
    """The trainer of one rank, and the commands that all ranks run together."""

    def __init__(
        self,
        trainer: PolicyTrainer | RewardModelTrainer,
        actor: TrainModel | ScoreModel,
        checkpoint: BaseCheckpoint,
        *,
        sharded: bool = True,
    ) -> None:
        self._trainer = trainer
        self._actor = actor
        self._dtype = checkpoint.dtype
        self._dtypes = _list_kept_dtypes(checkpoint)
        self._device = checkpoint.platform.device
        self._sharded = sharded
        self.commands: Mapping[str, Callable[[Any], Any]] = {
            "step": self.step,
            "save": self.save,
            "load": self.load,
            "sleep": self.sleep,
            "wake": self.wake,
            "weights": self.weights,
            "draft_weights": lambda _: None,
            "release": lambda _: None,
        }

    def export_commands(self, exporter: WeightExporter) -> Mapping[str, Callable[[Any], Any]]:
        """The commands of a rank 0 that is not the leader's process."""

        def export_draft(_: None) -> WeightExport | None:
            weights = self.draft_weights()
            return None if weights is None else exporter.export(weights)

        return {
            **self.commands,
            "weights": lambda _: exporter.export(self.weights(True)),
            "draft_weights": export_draft,
            "release": lambda _: exporter.release(),
        }

    def step(self, batch: Batch) -> StepReport:
        report = _run_without_waiting(self._trainer.step(batch))
        seconds = self._actor.seconds_per_token() if isinstance(self._actor, ReportsTokenTime) else None
        if seconds is None:
            return report
        return replace(report, seconds={**report.seconds, _SECONDS_PER_TOKEN: seconds})

    def save(self, folder: Path) -> CheckpointError | None:
        """Save; an error is returned, since on rank 0 it need not end the run."""
        try:
            _run_without_waiting(self._trainer.save(folder))
        except CheckpointError as error:
            return error
        return None

    def load(self, folder: Path) -> Version:
        _run_without_waiting(self._trainer.load(folder))
        return self._trainer.version

    def sleep(self, _: None) -> None:
        _run_without_waiting(self._trainer.sleep())

    def wake(self, _: None) -> None:
        _run_without_waiting(self._trainer.wake())

    def weights(self, keep: bool | None) -> dict[str, Tensor]:
        """Gather every full parameter in its dtype of the model, one by one; returned if ``keep``."""
        if not self._sharded:
            return get_engine_weights(self._actor)
        gathered: dict[str, Tensor] = {}
        is_frozen = isinstance(self._actor, HasAdapters)  # then its weights are not float32 masters
        with torch.no_grad():
            for name, local in get_engine_weights(self._actor).items():
                dtype = local.dtype if is_frozen else self._dtypes.get(name, self._dtype)
                tensor = self._actor.gather(name, local.to(dtype))
                if keep:
                    gathered[name] = tensor.to(self._device)
        return gathered

    @property
    def device(self) -> torch.device:
        return self._device

    def adapters(self) -> LoraAdapters | None:
        return self._trainer.adapters()

    def draft_weights(self) -> Mapping[str, Tensor] | None:
        return self._trainer.draft_weights()


def _list_kept_dtypes(checkpoint: BaseCheckpoint) -> Mapping[str, torch.dtype]:
    """The dtypes of parameters that are not in the model's, such as correction biases and tables of experts."""
    if isinstance(checkpoint.spec, HfAdapterSpec):
        return {}
    decoder = Decoder(
        replace(checkpoint.spec, quantization=None, adapters=None),
        device="meta",
        dtype=checkpoint.dtype,
        numerics=checkpoint.numerics,
    )
    return {name: p.dtype for name, p in decoder.named_parameters() if p.dtype != checkpoint.dtype}


def _run_without_waiting(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the trainer of a rank waited for something")


class _SyncExecutor:
    """An Executor that calls the function at once."""

    is_threaded = False

    async def __call__(self, work: Callable[[], T]) -> T:
        return work()

    def close(self) -> None: ...


def _is_sharded(config: Config, context: RankContext) -> bool:
    """Whether ranks share a model; else a single one, which no others may join later, has it as one process would."""
    return context.leader_is_rank or context.world_size > 1 or config.train.train_backend != "fsdp"


def _build_model_factory(config: Config, plan: Plan, checkpoint: BaseCheckpoint, *, sharded: bool) -> ModelFactory:
    """The factory of ``--train-backend``, once the ranks have joined."""
    if not sharded:
        return LocalModelFactory(config, checkpoint, load_model(checkpoint))
    if config.train.train_backend == "megatron":
        from miles.launch.distributed.models_megatron import MegatronModelFactory

        return MegatronModelFactory(config, plan, checkpoint)
    from miles.launch.distributed.models_fsdp import build_fsdp_factory

    return build_fsdp_factory(config, plan, checkpoint)


def _build_rank_trainer(
    config: Config,
    plan: Plan,
    checkpoint: BaseCheckpoint,
    *,
    steps: int,
    algo_hooks: AlgoHooks,
    policy: str,
    sharded: bool = True,
) -> RankTrainer:
    """The trainer of this rank; all ranks, which have joined, build theirs at once."""
    models = _build_model_factory(config, plan, checkpoint, sharded=sharded)
    if config.algo.loss_type == "rm_loss":
        scorer = models.reward_model()
        reward_trainer = build_reward_model_trainer(config, plan, _SyncExecutor(), models, scorer, steps=steps)
        return RankTrainer(reward_trainer, scorer, checkpoint)
    actor = models.actor()
    draft = build_draft_trainer(config, checkpoint, models.dp_group)
    trainer = build_policy_trainer(
        config,
        plan,
        checkpoint,
        _SyncExecutor(),
        models,
        actor,
        steps=steps,
        algo_hooks=algo_hooks,
        draft=draft,
        name=policy,
    )
    return RankTrainer(trainer, actor, checkpoint, sharded=sharded)


def _share_cores(config: Config, ranks: int) -> None:
    """Divide the cores among ranks on a CPU, which would otherwise slow each other down."""
    if config.cluster.num_threads is None:
        torch.set_num_threads(max(1, count_cores() // ranks))


def set_train_env_vars(config: Config) -> None:
    """Set --train-env-vars in this process, before libraries read them."""
    os.environ.update({name: str(value) for name, value in config.cluster.train_env_vars.items()})


def run_rank(context: RankContext, channel: RankChannel) -> None:
    """The main function of every rank but the leader: receive the setup, join, build, run commands until closed."""
    channel.send("here")
    command, setup = channel.receive()
    if command == "close":
        return
    rank = _build_rank(context, setup)
    channel.send("open", socket.gethostname())
    is_first = context.rank == 0
    exporter = WeightExporter(rank.device, shares_memory=setup.shares_memory)
    commands = rank.export_commands(exporter) if is_first else rank.commands
    while True:
        command, content = channel.receive()
        if command == "close":
            exporter.release()
            process_group.destroy_process_group()
            return
        with process_group.convert_group_errors():
            result = commands[command](content)
        if isinstance(result, CheckpointError):
            if not is_first:
                raise result
            result = str(result)  # the leader decides what becomes of the run
        channel.send(command, result if isinstance(result, StepReport | Version | WeightExport | str) else None)


def _build_rank(context: RankContext, setup: RankSetup) -> RankTrainer:
    config: Config = setup.config
    ranks = setup.ranks
    set_train_env_vars(config)
    configure_cublas(config.models.numerics)
    sharded = _is_sharded(config, context)
    device = process_group.init_process_group(context) if sharded else process_group.set_device(context)
    found = platform.detect_platform(device.type, threads=config.cluster.num_threads)
    if device.type == "cpu":
        _share_cores(config, ranks.total_ranks or context.world_size)
    with process_group.convert_group_errors():
        checkpoint = read_checkpoint(config, replace(found, device=device))
        plan = scale_batches(build_plan(config), config, ranks.batch_factor)
        if ranks.detached and plan.transport != "served":  # no engine uses the weights in place
            plan = replace(plan, transport="gathered")
        rank = _build_rank_trainer(
            config,
            plan,
            checkpoint,
            steps=setup.steps,
            algo_hooks=load_algo_hooks(config),
            policy=ranks.policy,
            sharded=sharded,
        )
        process_group.set_group_timeouts(context.timeout)
    return rank


# -- the leader -----------------------------------------------------------------------------


def start_distributed_trainer(
    config: Config,
    plan: Plan,
    checkpoint: BaseCheckpoint,
    run: Executor,
    *,
    steps: int,
    algo_hooks: AlgoHooks,
    ranks: PolicyRanks = SINGLE_POLICY,
) -> DistributedTrainer:
    """Start the other ranks, join them, and build the trainer of rank 0; or start all of them."""
    if get_reservation(ranks.policy) is None:
        devices = platform.consecutive_devices(checkpoint.platform.device, plan.layout.world)
    else:  # every rank sees only its own device
        devices = [checkpoint.platform.device] * plan.layout.world
    return start_on_devices(devices, config, plan, checkpoint, run, steps=steps, algo_hooks=algo_hooks, ranks=ranks)


def start_on_devices(
    devices: Sequence[torch.device],
    config: Config,
    plan: Plan,
    checkpoint: BaseCheckpoint,
    run: Executor,
    *,
    steps: int,
    algo_hooks: AlgoHooks,
    ranks: PolicyRanks = SINGLE_POLICY,
) -> DistributedTrainer:
    """A distributed trainer with a rank on each of these devices, which may repeat."""
    launcher = _build_ray_launcher(ranks.policy) if ranks.detached or len(devices) > 1 else None
    rendezvous, store = "" if launcher is None else launcher.rendezvous, None
    if launcher is not None and ranks.detached:
        store, rendezvous = process_group.serve_rendezvous(launcher.address)
    logs = plan.run_dir.resolve() / "logs"
    group = SpmdGroup(
        f"the trainer of {ranks.policy}" if ranks.detached else "the trainer",
        [str(device) for device in devices],
        run_rank,
        codec=CODEC,
        exclusive_devices=launcher is not None or len(set(devices)) == len(devices),
        timeout=60.0 * config.parallel.distributed_timeout_minutes,
        error=TrainerError,
        hint="the same command resumes from the last checkpoint",
        log_dir=logs / ranks.policy if ranks.detached else logs,
        launcher=spawn_ranks if launcher is None else launcher,
        heartbeat_timeout=config.fault_tolerance.heartbeat_timeout,
        rendezvous=rendezvous,
        leader_is_rank=not ranks.detached,
    )
    trainer = DistributedTrainer(group, run, device=checkpoint.platform.device, store=store)
    try:
        group.gather_replies(_START_TIMEOUT)
        setup = RankSetup(config=config, steps=steps, ranks=ranks, shares_memory=launcher is None)
        group.broadcast("open", setup)
        if ranks.detached:
            trainer.open_detached()
        else:
            trainer.open(partial(_join_ranks, group, plan, checkpoint, setup, algo_hooks))
        group.start_heartbeat_monitor()
        return trainer
    except BaseException:
        trainer.close()
        raise


def _build_ray_launcher(policy: str) -> RayRankLauncher | None:
    cluster = get_reservation(policy)
    if cluster is None:
        return None
    from miles.cluster.ray.spmd import RayRankLauncher

    return RayRankLauncher(cluster)


def _join_ranks(
    group: SpmdGroup, plan: Plan, checkpoint: BaseCheckpoint, setup: RankSetup, algo_hooks: AlgoHooks
) -> RankTrainer:
    group.watch(process_group.abort_process_groups)  # also while ranks are joining
    config, ranks = setup.config, setup.ranks
    device = process_group.init_process_group(group.context)
    if device.type == "cpu":
        _share_cores(config, ranks.total_ranks or group.world_size)
    placed = replace(checkpoint, platform=replace(checkpoint.platform, device=device))
    rank = _build_rank_trainer(config, plan, placed, steps=setup.steps, algo_hooks=algo_hooks, policy=ranks.policy)
    process_group.set_group_timeouts(group.timeout)
    return rank


class DistributedTrainer:
    """Leader of an SPMD group, and the core.protocols.Trainer that the loop uses.

    Ranks with different results, or without one, end the run with an error. The weights of detached ranks are copied
    to ``device``; ``store`` is their rendezvous, if this process serves it.
    """

    def __init__(
        self, group: SpmdGroup, run: Executor, *, device: torch.device | None = None, store: object | None = None
    ) -> None:
        self._group = group
        self._device = device or torch.device("cpu")
        self._store = store
        self._detached = not group.context.leader_is_rank
        self._run = run
        self._rank: RankTrainer | None = None
        self._hosts = [socket.gethostname()]
        self.seconds_per_token: Mapping[str, float] = {}
        """Each rank's own seconds per token in the last step."""

    def open(self, build: Callable[[], RankTrainer]) -> None:
        """Build the trainer of rank 0 while the other ranks build theirs."""
        self._rank = self._run_own(build)
        self._hosts += self._group.gather_replies()

    def open_detached(self) -> None:
        """Wait until the ranks, none of which is this process, have built their trainers."""
        self._hosts = self._group.gather_replies()

    async def step(self, batch: Batch) -> StepReport:
        return await self._run(lambda: self.run_all("step", batch))

    async def save(self, folder: Path) -> None:
        failure = await self._run(lambda: self.run_all("save", folder))
        if failure is not None:
            raise failure

    async def load(self, folder: Path) -> None:
        await self._run(lambda: self.run_all("load", folder))

    async def sleep(self) -> None:
        await self._run(lambda: self.run_all("sleep"))

    async def wake(self) -> None:
        await self._run(lambda: self.run_all("wake"))

    def weights(self) -> Mapping[str, Tensor]:
        """All weights, gathered into new tensors that the caller may keep."""
        return self.run_all("weights", None, own_content=True)

    def adapters(self) -> LoraAdapters | None:
        """The LoRA adapters, if they are trained and this process is a rank: every rank has all of them."""
        if self._detached:
            return None
        assert self._rank is not None
        return self._rank.adapters()

    def draft_weights(self) -> Mapping[str, Tensor] | None:
        """Copies of the draft model's weights, if one is trained; every rank has all of them."""
        if self._detached:
            return self.run_all("draft_weights")
        assert self._rank is not None
        weights = self._rank.draft_weights()
        return None if weights is None else {name: tensor.clone() for name, tensor in weights.items()}

    @property
    def group(self) -> SpmdGroup:
        """The other ranks."""
        return self._group

    async def wait_for_loss(self) -> None:
        """Wait until a rank ends unexpectedly, and raise why."""
        ended, loop = asyncio.Event(), asyncio.get_running_loop()

        def set_ended() -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits
                loop.call_soon_threadsafe(ended.set)

        self._group.watch(set_ended)
        await ended.wait()
        self._group.raise_if_failed()

    def close(self) -> None:
        """Stop all ranks; none is left when this returns."""
        broken = bool(self._group.fault)
        self._group.close()
        self._store = None
        if not self._detached:
            process_group.destroy_process_group(broken=broken)

    def run_all(self, command: str, content: Any = None, *, own_content: Any = None) -> Any:
        """Run ``command`` on all ranks; rank 0 may have content of its own."""
        with self._group.lock:
            self._group.broadcast(command, content)
            if self._detached:
                own, *replies = self._group.gather_replies()
                own = self._read_detached(command, own)
            else:
                assert self._rank is not None
                run = partial(self._rank.commands[command], content if own_content is None else own_content)
                own = self._run_own(run)
                replies = self._group.gather_replies()
            if isinstance(own, StepReport):
                self.seconds_per_token = self._read_seconds_per_token([own, *replies])
            for rank, reply in enumerate(replies, 1):
                if difference := _describe_difference(own, reply):
                    raise self._group.fail(
                        f"rank {rank} of {self._group.world_size} has another result than rank 0: {difference}"
                    )
            return _merge_reports([own, *replies]) if isinstance(own, StepReport) else own

    def _read_detached(self, command: str, reply: Any) -> Any:
        """The result of a rank 0 in another process."""
        if isinstance(reply, WeightExport):
            weights = import_weights(reply, self._device)
            self._group.broadcast("release")
            self._group.gather_replies()
            return weights
        return CheckpointError(reply) if command == "save" and reply is not None else reply

    def _read_seconds_per_token(self, reports: Sequence[StepReport]) -> dict[str, float]:
        names = (f"rank {rank} on {host}" for rank, host in enumerate(self._hosts))
        pairs = zip(names, reports, strict=True)
        return {name: r.seconds[_SECONDS_PER_TOKEN] for name, r in pairs if _SECONDS_PER_TOKEN in r.seconds}

    def _run_own(self, work: Callable[[], T]) -> T:
        """Run the part of rank 0; an error leaves the other ranks in the middle of a step, so it ends them."""
        group, rank = self._group, f"rank 0 of {self._group.world_size}"
        try:
            with process_group.convert_group_errors():
                return work()
        except RankLost as error:
            raise group.fail(error=error) from error
        except MilesError as error:  # every rank has the same error
            group.fail(f"{rank} failed: {summarize_error(error)}")
            raise
        except Exception as error:
            cause = f"{rank} failed: {summarize_error(error)}{log_traceback(error, group.context)}"
            raise group.fail(cause) from error


def _merge_reports(reports: Sequence[StepReport]) -> StepReport:
    """The report of rank 0, with the spans of all ranks and the trained tokens of all."""
    spans = [replace(span, lane=f"rank {rank}") for rank, report in enumerate(reports) for span in report.spans]
    stats = [report.token_stats for report in reports if report.token_stats is not None]
    return replace(reports[0], spans=tuple(spans), token_stats=TokenStats.merge(stats) if stats else None)


def _describe_difference(own: Any, other: Any) -> str:
    """How the result of another rank differs from that of rank 0; empty where they agree."""
    if isinstance(own, Version) and own != other:
        return f"its weights are version {other.number}, not {own.number}"
    if not isinstance(own, StepReport):
        return ""
    if difference := _describe_difference(own.version, other.version):
        return difference
    if odd := sorted(own.metrics.keys() ^ other.metrics.keys()):
        return f"only one of them has the metric {odd[0]}"
    for name, value in own.metrics.items():
        theirs = other.metrics[name]
        equal = math.isclose(value, theirs, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
        if not equal and not (math.isnan(value) and math.isnan(theirs)):
            return f"{name} is {theirs:.9g} there and {value:.9g} here"
    return ""
