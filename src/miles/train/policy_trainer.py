"""Policy trainer: one training step turns a batch into a new version of the weights.

    batch -> global batches (one optimizer step each) -> micro-batches -> gradient -> update

If advantages need the whole batch, the log-probs and values of all tokens are computed before the first update.

Blocking work goes through ``run``.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from miles.algo.config import CRITIC_ESTIMATORS, OFFLINE_LOSSES, PREFERENCE_LOSSES, AlgoConfig
from miles.algo.correction_schedule import CorrectionChoice, build_correction_schedule
from miles.algo.importance_sampling import finalize_metrics
from miles.algo.loss_aggregation import Reducer
from miles.algo.registry import NO_ALGO_HOOKS, AlgoHooks, build_loss, build_reducer, select_metric_reducer
from miles.cluster.executor import Executor
from miles.cluster.profiler import StepProfiler
from miles.core.errors import CheckpointError, ParityError, UsageError
from miles.core.types import Batch, Floats, Sample, StepReport, TimeSpan, TokenStats, Version
from miles.models.accounting.prefix_sharing import PrefixCost
from miles.models.lora.adapters import LoraAdapters
from miles.train.advantages import AdvantageComputer, BatchLogprobs, BatchWithAdvantages, build_advantage_computer
from miles.train.balance import CostFn
from miles.train.batch_tensors import FlatBatch, MicroBatch, RoutedExpertsCache, flatten_batch, group_by_trajectory
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.correction import CorrectionSelector, correction_metrics
from miles.train.critic import Critic
from miles.train.distillation import build_teachers
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.draft_trainer import DraftTrainer
from miles.train.grad_accumulation import GradAccumulator, LogprobReader, MetricSums, build_micro_batches
from miles.train.hooks import NO_TRAIN_HOOKS, TrainHooks
from miles.train.model_protocols import (
    HasAdapters,
    PolicyReference,
    ProvidesFeatures,
    TrainModel,
    get_engine_weights,
)
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import MASTER, OptimizerProtocol, build_optimizer
from miles.train.parity_check import accumulate_parity, check_exact_parity, format_parity_error, parity_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A loss with what it needs besides the model: token weights, log-probs, batch-level advantages, correction.

    ``reward_reference`` is the reference model of a KL in the reward.
    """

    algo: AlgoConfig
    reducer: Reducer
    metric_reducer: Reducer
    reader: LogprobReader
    correction: CorrectionSelector
    advantages: AdvantageComputer | None
    reward_reference: TrainModel | PolicyReference | None
    gradient: GradAccumulator

    @property
    def is_policy_loss(self) -> bool:
        """Whether it is a loss on sampled responses."""
        return self.algo.loss_type not in OFFLINE_LOSSES

    def flatten(self, trajectories: Sequence[Sequence[Sample]]) -> FlatBatch:
        """Return the samples of some trajectories as one global batch."""
        return flatten_batch(trajectories, self.reducer, self.metric_reducer)


class PolicyTrainer:
    """Trains ``actor``; implements the Trainer protocol.

    ``steps`` is the number of optimizer steps per batch, ``updates`` that of the whole run (for the LR schedule). The
    policy loss divides logits by ``temperature``, the engine's sampling temperature. ``reference`` is the reference
    model of the KL. A ``critic`` is trained on every batch too, possibly alone in the first steps. ``teachers`` are
    local distillation teachers, one per sample; without any, the samples carry the log-probs of served teachers. A
    ``draft`` model is trained on the policy's hidden states, and changes nothing of the policy. With
    ``shares_weights`` an engine uses the policy's weights in place. Each rank of ``dp_group`` trains its part of the
    batch, balanced by tokens or by ``cost_fn``. The vision tower computes a feature of an image from
    ``patches_per_feature`` patches. ``prefix_cost`` decides for each global batch whether samples share prefixes, where
    --share-prefix leaves that open. With ``record_tokens`` reports have the log-prob and entropy of each trained token,
    from the forward pass that trains on it. Asleep, it also returns memory that torch has cached to the driver if it
    ``frees_cache``, for an engine in another process. ``clock`` reads the seconds since the epoch.
    """

    def __init__(
        self,
        actor: TrainModel,
        *,
        algo: AlgoConfig,
        train: TrainConfig,
        steps: int,
        updates: int,
        temperature: float,
        run: Executor,
        reference: TrainModel | PolicyReference | None = None,
        critic: Critic | None = None,
        teachers: Sequence[TrainModel] = (),
        draft: DraftTrainer | None = None,
        algo_hooks: AlgoHooks = NO_ALGO_HOOKS,
        hooks: TrainHooks = NO_TRAIN_HOOKS,
        version: Version | None = None,
        parity_tolerance: float = 0.01,
        parity_stop: float | None = None,
        parity_no_replay_interval: int = 0,
        offload: bool = True,
        shares_weights: bool = True,
        frees_cache: bool = True,
        dp_group: DataParallelGroup = SINGLE_RANK,
        cost_fn: CostFn | None = None,
        patches_per_feature: int = 1,
        prefix_cost: PrefixCost | None = None,
        record_tokens: bool = False,
        profiler: StepProfiler | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.version = version or Version()
        self._actor, self._critic = actor, critic
        self._reference, self._draft = reference, draft
        self._algo = algo
        self._train, self._hooks = train, hooks
        self._run, self._clock = run, clock
        self._device, self._steps = actor.device, steps
        self._dp_group, self._cost_fn = dp_group, cost_fn
        self._patches_per_feature = patches_per_feature
        self._prefix_cost = prefix_cost
        self._record_tokens = record_tokens
        self._profiler = profiler or StepProfiler()
        self._saver = checkpoint.build_saver(train, torch_dist=train.ckpt_format == "torch_dist")
        self._parity_stop = parity_stop
        self._no_replay_interval = parity_no_replay_interval
        self._schedule = build_correction_schedule(tolerance=parity_tolerance, stop=parity_stop)
        self._temperature, self._teachers = temperature, tuple(teachers)
        self._offload, self._frees_cache = offload and actor.device.type != "cpu", frees_cache
        frozen = [*teachers] if reference is None else [reference, *teachers]
        self._offloaded_models = frozen if shares_weights else [actor, *frozen]
        self._critic_only_updates = train.num_critic_only_steps * steps if critic is not None else 0
        self._pending: list[list[BatchWithAdvantages]] = []
        if draft is not None:
            assert isinstance(actor, ProvidesFeatures), "a rule requires a model with features"
            actor.enable_features(draft.draft.spec.capture_layers)
        self._objective = self.build_objective(algo, algo_hooks)
        self._optimizer = self._build_optimizer(updates - self._critic_only_updates)
        if hooks.init is not None:
            hooks.init(actor)

    def build_objective(self, algo: AlgoConfig, hooks: AlgoHooks = NO_ALGO_HOOKS) -> Objective:
        """Return the objective of a loss: the trainer's own, or another one for ``forward_backward``."""
        _check_options(algo, self._temperature, self._reference, self._critic)
        is_policy_loss = algo.loss_type not in OFFLINE_LOSSES
        temperature, chunk = self._temperature, self._train.log_probs_chunk_size
        reader = LogprobReader(
            temperature=temperature if is_policy_loss else 1.0,
            chunk=chunk,
            max_tokens=None if algo.entropy_coef else self._train.max_tokens_per_gpu,
        )
        group = self._dp_group
        return Objective(
            algo=algo,
            reducer=build_reducer(algo, hooks),
            metric_reducer=select_metric_reducer(algo),
            reader=reader,
            correction=CorrectionSelector(algo=algo, schedule=self._schedule, custom=hooks.correction, dp_group=group),
            advantages=build_advantage_computer(algo, group, self._actor.device) if is_policy_loss else None,
            reward_reference=self._reference if algo.kl_coef else None,
            gradient=GradAccumulator(
                actor=self._actor,
                reference=self._reference if algo.use_kl_loss or not algo.kl_coef else None,
                loss_fn=build_loss(algo, hooks),
                reader=reader,
                distillation=build_teachers(algo, self._teachers, temperature=temperature, chunk=chunk, dp_group=group),
                draft=self._draft,
                record_tokens=self._record_tokens,
            ),
        )

    def _build_optimizer(self, updates: int) -> OptimizerProtocol:
        trained = {name: p for name, p in self._actor.parameters().items() if p.requires_grad}
        lr_schedule = build_lr_schedule(self._train, updates=max(1, updates))
        return build_optimizer(trained, self._train, lr_schedule, model=self._actor)

    async def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``; the report's version is the new one."""
        return await self._run(lambda: self._profile_step(batch))

    async def forward_backward(self, samples: Sequence[Sample], objective: Objective | None = None) -> dict[str, float]:
        """Add the gradient of one global batch to that of earlier calls; returns its metrics.

        ``objective`` is one of ``build_objective``, by default the trainer's own. With ``optim_step`` after each global
        batch, the weights are those of ``step``.
        """
        return await self._run(lambda: self._forward_backward(samples, objective or self._objective))

    async def optim_step(self, lr: float | None = None) -> StepReport:
        """Update the weights by the gradient of ``forward_backward``; the report's version is the new one.

        ``lr`` replaces the learning rate of the schedule.
        """
        return await self._run(lambda: self._optim_step(lr))

    async def log_probs(self, samples: Sequence[Sample]) -> list[Floats]:
        """Return the log-probs of each sample's trained tokens under the current weights."""
        return await self._run(lambda: self._compute_logprobs(samples))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._save(folder))

    async def load(self, folder: Path) -> None:
        self.version = await self._run(lambda: self._load(folder))

    async def sleep(self) -> None:
        """Release the accelerator for the engine: everything moves to the host except what the engine uses in place.

        Those are the policy's weights if ``shares_weights``. A critic with a dedicated device stays there.
        """
        if self._device.type != "cpu":
            await self._run(self._release)

    async def wake(self) -> None:
        if self._offload:
            await self._run(lambda: self._move(self._device))

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live weights by name; the next step changes them in place."""
        return get_engine_weights(self._actor)

    def draft_weights(self) -> Mapping[str, Tensor] | None:
        """Return the live weights of the draft model, if one is trained; the next step changes them in place."""
        return None if self._draft is None else self._draft.weights()

    def adapters(self) -> LoraAdapters | None:
        """Return the trained LoRA adapters, if any."""
        return self._actor.adapters() if isinstance(self._actor, HasAdapters) else None

    def _save(self, folder: Path) -> None:
        mtp = {} if self._draft is None else self._draft.save(folder, self.version)
        checkpoint.save(folder, self._actor, self._optimizer, self.version, self._dp_group, self._saver, extra=mtp)
        if self._critic is not None:
            self._critic.save(folder, self.version)

    def _load(self, folder: Path) -> Version:
        if self._critic is not None:
            self._critic.load(folder)
        if self._draft is not None:
            self._draft.load(folder)
        version = checkpoint.load(folder, self._actor, self._optimizer, self._dp_group)
        self._restore_reference(folder, version.number)
        return version

    def _restore_reference(self, folder: Path, version: int) -> None:
        """Load the reference of --ref-update-interval: the policy of an earlier checkpoint, beside this one."""
        every = self._train.ref_update_interval
        updated = 0 if every is None else version - version % every
        if not updated or self._reference is None:
            return
        if updated == version:
            self._update_reference()
            return
        earlier = checkpoint.find_version(folder, updated)
        if earlier is None:
            raise CheckpointError(
                f"{folder} cannot be continued: the reference of --ref-update-interval {every} is version {updated} of "
                "the policy, which no checkpoint beside it has; keep more with --keep-checkpoints."
            )
        self._reference.load(earlier)

    @torch.no_grad()
    def _update_reference(self) -> None:
        assert self._reference is not None, "a rule requires a reference"
        if isinstance(self._reference, PolicyReference):
            self._reference.track()
            return
        targets = self._reference.parameters()
        for name, parameter in self._actor.parameters().items():
            targets[name].copy_(parameter)
        self._reference.after_update()

    def _release(self) -> None:
        if self._offload:
            self._move(torch.device("cpu"))
        if self._frees_cache:  # an engine in another process cannot use what torch has cached here
            torch.cuda.empty_cache()

    def _move(self, device: torch.device) -> None:
        self._optimizer.move(device)
        if self._draft is not None:
            self._draft.move(device)
        for model in self._offloaded_models:
            model.move(device)
        if self._critic is not None and not self._critic.dedicated_device:
            self._critic.move(device)

    def _advance_version(self) -> None:
        """Count an update of the weights, and do what options ask for after so many."""
        self.version = self.version.next()
        every = self._train.ref_update_interval
        if every is not None and self.version.number % every == 0:
            self._update_reference()
        if self._train.reset_optimizer_states:
            self._reset_optimizer()

    def _profile_step(self, batch: Batch) -> StepReport:
        with self._profiler.profile_step(batch.step):
            return self._step(batch)

    def _step(self, batch: Batch) -> StepReport:
        started = self._clock()
        objective = self._objective
        flats = self._build_global_batches(batch.samples)
        plan = [self._build_micro_batches(objective, flat) for flat in flats]
        packed = self._clock()
        critic_only = self._critic is not None and self._critic.updates < self._critic_only_updates
        if self._hooks.before_log_probs is not None:
            self._hooks.before_log_probs(batch.step, self._actor)
        with self._profiler.profile_part("train_log_probs"):
            old_logprobs = self._compute_old_logprobs(objective, flats, plan, critic_only=critic_only)
        previous = self._clock()
        seconds = {"pack": packed - started, "old_logprobs": previous - packed}
        with_advantages, extra_metrics = self._compute_advantages(objective, plan, old_logprobs)
        if objective.advantages is not None:
            now = self._clock()
            seconds["returns"], previous = now - previous, now
        sums = MetricSums()
        if batch.probe and objective.is_policy_loss and not self._has_current_samples(flats[0]):
            self._compare_probe(batch.probe, sums)
        extra_metrics |= self._measure_without_replay(plan[0])
        choice = None
        if not critic_only:
            choice = self._choose_correction(objective, plan[0], old_logprobs[0], sums, stale=self._is_stale(flats))
        steps: list[dict[str, float]] = []
        with self._profiler.profile_part("train_actor"):
            for number, (part, old) in enumerate(zip(with_advantages, old_logprobs, strict=True)):
                if self._hooks.before_train_step is not None:
                    self._hooks.before_train_step(batch.step, number, self._actor, self._optimizer)
                rows, first = [each.micro_batch for each in part], number == 0
                metrics = (
                    self._compare_only(rows, sums, first=first)
                    if critic_only
                    else self._accumulate(objective, rows, old, sums, first=first, choice=choice) | self._update()
                )
                steps.append(metrics if self._critic is None else metrics | self._critic.update(part))
        metrics = _mean_over_steps(steps) | parity_metrics(sums, self._dp_group) | correction_metrics(choice)
        metrics |= _batch_metrics(flats) | extra_metrics
        metrics["micro_batches"] = float(sum(len(rows) for rows in plan) * self._dp_group.dp_size)
        if self._train.share_prefix or (self._train.share_prefix is None and self._prefix_cost is not None):
            metrics["tokens_shared"] = _count_saved_tokens(plan, self._dp_group)
        token_stats = _collect_token_stats(sums) if self._record_tokens else None
        seconds["optimize"] = self._clock() - previous
        self._advance_version()
        return StepReport(
            version=self.version,
            metrics=metrics,
            seconds=seconds,
            spans=_list_spans(started, seconds),
            token_stats=token_stats,
        )

    def _forward_backward(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        flat = objective.flatten(group_by_trajectory(samples))
        rows = self._build_micro_batches(objective, flat)
        old_logprobs = self._compute_old_logprobs(objective, [flat], [rows], critic_only=False)
        with_advantages, extra_metrics = self._compute_advantages(objective, [rows], old_logprobs)
        sums = MetricSums()
        choice = self._choose_correction(objective, rows, old_logprobs[0], sums, stale=self._is_stale([flat]))
        micro_batches = [each.micro_batch for each in with_advantages[0]]
        metrics = self._accumulate(objective, micro_batches, old_logprobs[0], sums, first=True, choice=choice)
        self._pending.append(with_advantages[0])
        metrics |= parity_metrics(sums, self._dp_group) | correction_metrics(choice)
        return metrics | _batch_metrics([flat]) | extra_metrics

    def _optim_step(self, lr: float | None) -> StepReport:
        if not self._pending:
            raise UsageError("optim_step() has no gradient to apply; call forward_backward() first.")
        pending, self._pending = self._pending, []
        metrics = self._update(lr)
        if self._critic is not None:
            metrics |= _mean_over_steps([self._critic.update(part) for part in pending])
        self._advance_version()
        return StepReport(version=self.version, metrics=metrics)

    def _compute_logprobs(self, samples: Sequence[Sample]) -> list[Floats]:
        # Micro-batches reorder samples, which are found again by their ids.
        numbered = [replace(s, prompt_id=n, trajectory=0, samples_per_trajectory=1) for n, s in enumerate(samples)]
        objective = self._objective
        micro_batches = self._build_micro_batches(objective, objective.flatten([[s] for s in numbered]))
        found: list[Floats] = [np.empty(0, np.float32) for _ in samples]
        for logp_R, rows in zip(
            objective.reader.compute_frozen(self._actor, micro_batches), micro_batches, strict=True
        ):
            values_R = logp_R.float().cpu().numpy()
            sample_R = rows.sample_R.cpu().numpy()
            for b, (number, _) in enumerate(rows.sample_ids):
                found[number] = values_R[sample_R == b]
        return found

    def _reset_optimizer(self) -> None:
        """Forget the moments, and keep master weights and the number of updates."""
        state = self._optimizer.state()
        masters = {name: state[name].clone() for name in state if name.startswith(f"{MASTER}.")}
        self._optimizer.load(masters, updates=self._optimizer.updates)

    def _compute_advantages(
        self, objective: Objective, plan: list[list[MicroBatch]], old_logprobs: list[list[Tensor | None]]
    ) -> tuple[list[list[BatchWithAdvantages]], dict[str, float]]:
        """Return the micro-batches with batch-level advantages, if configured, and their metrics."""
        if objective.advantages is None:
            return [[BatchWithAdvantages(micro_batch=rows) for rows in part] for part in plan], {}
        pairs = zip(plan, old_logprobs, strict=True)
        inputs = [each for part, old in pairs for each in self._collect_logprobs(objective, part, old)]
        results, metrics = objective.advantages(inputs)
        remaining = iter(results)
        return [[next(remaining) for _ in part] for part in plan], metrics

    def _collect_logprobs(
        self, objective: Objective, micro_batches: list[MicroBatch], old_logprobs: list[Tensor | None]
    ) -> list[BatchLogprobs]:
        ref_logprobs: Sequence[Tensor | None] = [None] * len(micro_batches)
        values: Sequence[Tensor | None] = [None] * len(micro_batches)
        if objective.reward_reference is not None:
            unreplayed = [rows.without_replay() for rows in micro_batches]
            ref_logprobs = objective.reader.compute_frozen(objective.reward_reference, unreplayed)
        if self._critic is not None:
            values = self._critic.values(micro_batches)
        return [
            BatchLogprobs(micro_batch=rows, old_logp_R=old, ref_logp_R=ref, value_R=value)
            for rows, old, ref, value in zip(micro_batches, old_logprobs, ref_logprobs, values, strict=True)
        ]

    def _build_global_batches(self, samples: Sequence[Sample]) -> list[FlatBatch]:
        """Split the batch into the global batches of its optimizer steps; trajectories stay in order and complete."""
        trajectories = group_by_trajectory(samples)
        size, rest = divmod(len(trajectories), self._steps)
        assert not rest and size, f"{len(trajectories)} trajectories cannot make {self._steps} equal global batches"
        flats = [self._objective.flatten(trajectories[i : i + size]) for i in range(0, len(trajectories), size)]
        firsts = accumulate((len(flat.samples) for flat in flats[:-1]), initial=0)
        return [replace(flat, first_index=first) for flat, first in zip(flats, firsts, strict=True)]

    def _build_micro_batches(self, objective: Objective, flat: FlatBatch) -> list[MicroBatch]:
        micro_batches = build_micro_batches(
            flat,
            self._train,
            device=self._actor.device,
            replay=objective.algo.use_rollout_routing_replay,
            replay_indexer=objective.algo.use_rollout_indexer_replay,
            paired=objective.algo.loss_type in PREFERENCE_LOSSES,
            dp_group=self._dp_group,
            cost_fn=self._cost_fn,
            patches_per_feature=self._patches_per_feature,
            prefix_cost=self._prefix_cost,
        )
        if not objective.algo.use_routing_replay:
            return micro_batches
        return [replace(rows, routed_cache=RoutedExpertsCache()) for rows in micro_batches]

    def _compute_old_logprobs(
        self, objective: Objective, flats: Sequence[FlatBatch], plan: list[list[MicroBatch]], *, critic_only: bool
    ) -> list[list[Tensor | None]]:
        """Return the old log-probs of the ratio, or of a KL in the reward; None uses the step's own forward pass.

        The trainer's own forward pass is the better estimate for tokens of the current version. It cannot reproduce
        tokens of older versions, so a batch with such tokens uses the engine's log-probs, unless the correction is
        about the very difference between the two.
        """
        algo, reader = objective.algo, objective.reader
        if not objective.is_policy_loss:
            return [[None] * len(part) for part in plan]
        use_engine = algo.use_rollout_logprobs
        if use_engine is None:
            use_engine = not objective.correction.active and self._is_stale(flats)
        if use_engine:
            if algo.use_routing_replay and len(plan) > 1 and not critic_only:
                for part in plan:
                    reader.compute_frozen(self._actor, part)  # fills the routed experts caches
            return [[rows.engine_logp_R for rows in part] for part in plan]
        unneeded = len(plan) == 1 and not objective.correction.needs_old_logprobs
        if objective.reward_reference is None and (unneeded or critic_only):
            return [[None] * len(part) for part in plan]
        return [list(reader.compute_frozen(self._actor, part)) for part in plan]

    def _is_stale(self, flats: Sequence[FlatBatch]) -> bool:
        """Return whether any trained token was sampled by another version than the current one."""
        return any(bool((f.versions_N[f.mask_N] != self.version.number).any()) for f in flats)

    def _has_current_samples(self, flat: FlatBatch) -> bool:
        """Return whether any sample was sampled by the current version alone."""
        return bool((flat.oldest_S == self.version.number).any())

    def _compare_probe(self, samples: Sequence[Sample], sums: MetricSums) -> None:
        """Compare engine and trainer on samples that are not trained on, if the batch has only older ones."""
        flat = self._objective.flatten([[s] for s in samples])
        micro_batches = build_micro_batches(
            flat,
            self._train,
            device=self._actor.device,
            replay=self._algo.use_rollout_routing_replay,
            replay_indexer=self._algo.use_rollout_indexer_replay,
            dp_group=self._dp_group,
            patches_per_feature=self._patches_per_feature,
        )
        self._compare(micro_batches, sums)

    def _compare(self, micro_batches: Sequence[MicroBatch], sums: MetricSums) -> None:
        """Accumulate the parity of engine and trainer over micro-batches."""
        logprobs = self._objective.reader.compute_frozen(self._actor, micro_batches)
        for logp_R, rows in zip(logprobs, micro_batches, strict=True):
            accumulate_parity(logp_R, rows, self.version.number, sums, numerics=self._actor.numerics)

    def _measure_without_replay(self, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
        """Measure the parity of one micro-batch without the engine's replay, at the configured interval."""
        every, algo = self._no_replay_interval, self._algo
        replays = algo.use_rollout_routing_replay or algo.use_rollout_indexer_replay
        due = replays and every and self.version.number % every == 0
        if not due or not micro_batches:
            return {}
        first = micro_batches[0]
        has_records = first.replay_TLk is not None or first.indexer_TLk is not None
        if not self._dp_group.union_names(["replayed"] if has_records else []):
            return {}
        sums = MetricSums()
        self._compare([first.without_replay()], sums)
        metrics = parity_metrics(sums, self._dp_group)
        return {"parity_mean_abs_no_replay": metrics["parity_mean_abs"]} if metrics else {}

    def _compare_only(self, micro_batches: list[MicroBatch], sums: MetricSums, *, first: bool) -> dict[str, float]:
        """Check the parity of engine and trainer in a step that trains only the critic."""
        if first:
            self._compare(micro_batches, sums)
            self._check_parity(sums)
        return {}

    def _choose_correction(
        self,
        objective: Objective,
        micro_batches: list[MicroBatch],
        old_logprobs: list[Tensor | None],
        sums: MetricSums,
        *,
        stale: bool,
    ) -> CorrectionChoice | None:
        """Choose the correction from the parity of the first global batch, if it is automatic."""
        if not objective.correction.auto:
            return None
        for rows, old_logp_R in zip(micro_batches, old_logprobs, strict=True):
            assert old_logp_R is not None, "the automatic correction needs the old log-probs"
            accumulate_parity(old_logp_R, rows, self.version.number, sums, numerics=self._actor.numerics)
        return objective.correction.choose(parity_metrics(sums, self._dp_group), self.version.number, stale=stale)

    def _accumulate(
        self,
        objective: Objective,
        micro_batches: list[MicroBatch],
        old_logprobs: list[Tensor | None],
        sums: MetricSums,
        *,
        first: bool,
        choice: CorrectionChoice | None,
    ) -> dict[str, float]:
        """Accumulate the gradient of a global batch; returns the metrics of its loss."""
        step_sums = MetricSums()
        gradient = objective.gradient
        loss_fn = objective.correction.correct_loss(gradient.loss_fn, choice, micro_batches, old_logprobs)
        logprobs = replace(gradient, loss_fn=loss_fn).accumulate(micro_batches, old_logprobs, step_sums)
        sums.token_stats += step_sums.token_stats
        for logp_R, rows in zip(logprobs, micro_batches, strict=True):
            if first and choice is None:
                accumulate_parity(logp_R, rows, self.version.number, sums, numerics=self._actor.numerics)
        if first:
            self._check_parity(sums)
        return finalize_metrics(step_sums.to_floats(self._dp_group)) | step_sums.expert_imbalance(self._dp_group)

    def _update(self, lr: float | None = None) -> dict[str, float]:
        """Update the weights by the accumulated gradient; returns the metrics of the update."""
        self._actor.finalize_grads()
        grad_norm, used_lr = self._optimizer.step(lr)
        self._actor.after_update()
        metrics = {"grad_norm": grad_norm, "lr": used_lr}
        return metrics if self._draft is None else metrics | self._draft.step()

    def _check_parity(self, sums: MetricSums) -> None:
        """Raise ParityError, before the weights change, if engine and trainer log-probs differ too much."""
        if self._actor.numerics.batch_invariant:
            check_exact_parity(sums, self._dp_group, self.version.number)
        limit = self._parity_stop
        if limit is None:
            return
        metrics = parity_metrics(sums, self._dp_group)
        if not metrics.get("parity_mean_abs", 0.0) <= limit:
            raise ParityError(format_parity_error(metrics, self.version.number, limit))


def _check_options(
    algo: AlgoConfig, temperature: float, reference: TrainModel | PolicyReference | None, critic: Critic | None
) -> None:
    """UsageError if the options do not allow training."""
    needs_critic = algo.loss_type not in OFFLINE_LOSSES and algo.advantage_estimator in CRITIC_ESTIMATORS
    assert critic is not None or not needs_critic, "the advantage estimator needs a critic"
    if temperature <= 0:
        raise UsageError(f"--rollout-temperature {temperature} must be above 0 for training.")
    needs_reference = {
        "--use-kl-loss": algo.use_kl_loss,
        "--kl-coef": bool(algo.kl_coef),
        "--loss-type dpo_loss": algo.loss_type == "dpo_loss",
    }
    flag = next((flag for flag, needed in needs_reference.items() if needed), None)
    if flag is not None and reference is None:
        raise UsageError(f"{flag} needs a reference model; give --ref-load or --hf-checkpoint.")


def _collect_token_stats(sums: MetricSums) -> TokenStats:
    """Return the recorded log-probs and entropies on the host, with one transfer each."""
    recorded = sums.token_stats
    if not recorded:
        return TokenStats.merge(())
    return TokenStats(
        sample_indices=np.array([index for rows, _, _ in recorded for index in rows.sample_indices], np.int32),
        counts=torch.cat([rows.trained_B for rows, _, _ in recorded]).cpu().numpy().astype(np.int32),
        logprobs=torch.cat([logp_R for _, logp_R, _ in recorded]).float().cpu().numpy(),
        entropies=torch.cat([entropy_R for _, _, entropy_R in recorded]).float().cpu().numpy(),
    )


def _list_spans(started: float, seconds: Mapping[str, float]) -> tuple[TimeSpan, ...]:
    """Return the parts of a step, which follow each other."""
    ends = accumulate(seconds.values(), initial=started)
    return tuple(
        TimeSpan(name=name, start=start, seconds=length)
        for (name, length), start in zip(seconds.items(), ends, strict=False)
    )


def _mean_over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric's mean over optimizer steps, the last learning rates, and ratios of counts."""
    names = dict.fromkeys(name for step in steps for name in step)
    out = {name: fmean(step[name] for step in steps if name in step) for name in names}
    out |= {name: steps[-1][name] for name in ("lr", "critic_lr") if name in steps[-1]}
    for name in ("routing", "indexer"):
        replayed, mismatches = out.pop(f"{name}_replayed", 0.0), out.pop(f"{name}_mismatches", 0.0)
        if replayed:
            out[f"{name}_mismatch_ratio"] = mismatches / replayed
    return out


def _count_saved_tokens(plan: Sequence[Sequence[MicroBatch]], dp_group: DataParallelGroup) -> float:
    """Return the number of input tokens saved by prefix sharing, on all ranks."""
    local = sum(rows.saved_tokens for part in plan for rows in part if not rows.idle)
    return float(dp_group.sum(torch.tensor(float(local), dtype=torch.float64)))


def _batch_metrics(flats: Sequence[FlatBatch]) -> dict[str, float]:
    advantage_R = np.concatenate([f.advantages_N[f.mask_N] for f in flats]).astype(np.float64)
    return {
        "tokens": float(sum(len(f.tokens_N) for f in flats)),
        "train_tokens": float(sum(int(f.length_S.sum()) for f in flats)),
        "trained_tokens": float(len(advantage_R)),
        "samples": float(sum(len(f.samples) for f in flats)),
        "advantage_mean": float(advantage_R.mean()) if len(advantage_R) else 0.0,
        "advantage_std": float(advantage_R.std()) if len(advantage_R) else 0.0,
    }
