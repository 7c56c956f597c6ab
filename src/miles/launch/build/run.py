"""Composition root: config in, training loop out.

How trainer and engine share this process depends on --max-weight-staleness:

    0   they take turns on one thread (ColocatedLease, InlineExecutor) and share weights: nothing is copied, and a run
        is reproducible bit for bit
    k   they overlap with a thread each (DisjointLease, ThreadExecutor), and weights are copied at publication

With several trainer ranks this process is rank 0, and weights are gathered for each publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from miles.algo.advantages import limit_staleness, train_newest_version_only
from miles.algo.config import OFFLINE_LOSSES
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import Executor
from miles.core.errors import UsageError
from miles.core.protocols import AdvantageEstimator, Filter, Journal, Rollout, Source, Trainer, WeightSync
from miles.core.types import Group, Sample, Version
from miles.hooks import registry
from miles.hooks.compat.adapters import mark_evaluation
from miles.hooks.compat.types import UpstreamServices
from miles.hooks.offload import HookCaller
from miles.hooks.worker import HookWorker
from miles.launch.build.debug import ProbingTrainer, get_image_loader, open_recorded_rollouts
from miles.launch.build.engines import RolloutEngine
from miles.launch.build.generation import Generation, MultiAgentGeneration, build_generation, build_multi_agent
from miles.launch.build.hooks import load_hook, names_user_function
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.policies import (
    Policies,
    PolicySpec,
    PolicyStack,
    Report,
    build_advantages,
    build_stack,
    read_policies,
)
from miles.launch.build.prompts import (
    build_offline_rollout,
    build_prompt_check,
    build_prompt_source,
    get_set_config,
    list_data_notes,
    read_held_out_set,
    read_training_parts,
    wrap_journal,
)
from miles.launch.build.rewards import build_offloaded_rewards, name_reward
from miles.launch.build.step_rates import StepRates, build_step_rates
from miles.launch.build.teachers import WithTeachers, build_teachers, check_tokenizers
from miles.launch.build.user_hooks import UserHooks, load_eval_function, load_user_hooks, wrap_rollout
from miles.launch.config import Config
from miles.launch.distributed.resilient_trainer import RecoveryState, ResilientTrainer
from miles.launch.plan.drafts import choose_speculation
from miles.launch.plan.plan import Plan
from miles.observe.metric import correct_metrics, group_metrics
from miles.observe.start_timer import StartTimer
from miles.rollout.bad_rows import BadRowRollout, drop_empty_groups
from miles.rollout.concurrency import ConcurrencyLimiter
from miles.rollout.config import resolve_context_limit
from miles.rollout.data.dataset import PromptCheck
from miles.rollout.data.mixture import MixturePart
from miles.rollout.evaluate import EvalSettings, Evaluator, limit_context
from miles.rollout.filters import drop_unscored, keep_all
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.offline.replay_source import ReplaySource, RolloutRecording
from miles.rollout.sampling import (
    build_eval_sampling,
    build_training_sampling,
    resolve_prompt_limit,
)
from miles.rollout.seeds import make_training_seed_fn
from miles.schedule.checkpoints import CheckpointDirectory, Cursor
from miles.schedule.loop import Interval, Loop, LoopSettings, Planes

if TYPE_CHECKING:
    from miles.backends.remote.remote_engine import RemoteEngine
    from miles.launch.elastic.between_steps import BetweenSteps


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A run ready to start. ``notes`` are for the user; ``policy`` is the main policy."""

    loop: Loop
    policy: PolicyCheckpoint
    notes: tuple[str, ...]
    generation: Generation
    multi_agent: MultiAgentGeneration | None
    engines: tuple[RolloutEngine, ...]
    servers: RemoteEngine | None
    with_ranks: tuple[ResilientTrainer, ...]
    executors: tuple[Executor, ...]
    between_steps: BetweenSteps | None

    async def run(self) -> None:
        """Run the loop to its end; ranks of the trainer that are lost meanwhile are restarted, or end it too."""
        background = [trainer.watch_ranks() for trainer in self.with_ranks]
        if self.between_steps is not None:
            background.append(self.between_steps.serve())
        if not background:
            await self.loop.run()
            return
        tasks = [asyncio.create_task(work) for work in (self.loop.run(), *background)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(task for task in tasks if task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # the first error has been raised

    async def close(self) -> None:
        if self.between_steps is not None:
            await self.between_steps.close()
        if self.multi_agent is not None:
            await self.multi_agent.close()
        await self.generation.close()
        for engine in self.engines:
            await engine.close()
        for trainer in self.with_ranks:
            trainer.close()
        for executor in self.executors:
            executor.close()


async def build_run(
    config: Config,
    plan: Plan,
    *,
    checkpoints: CheckpointDirectory,
    journal: Journal,
    start: tuple[Path, Cursor] | None,
    report: Report = lambda text: None,
    wrap_planes: Callable[[Planes], Planes] = lambda planes: planes,
    timer: StartTimer,
) -> TrainingRun:
    """Build the loop at the checkpoint ``start``; ``report`` gets notes, ``wrap_planes`` may replace parts."""
    hooks, policies = load_user_hooks(config), read_policies(config, plan)
    timer.lap("tokenizer")
    main, policy = policies.main, policies.main.checkpoint
    generation = build_generation(main.config, policy, logs=plan.run_dir / "logs", report=report)
    multi_agent, advantages = build_multi_agent(config, policies), build_advantages(config, policies)
    estimator = hooks.wrap_estimator(mask_stale_tokens(config, advantages))
    recorded = open_recorded_rollouts(config, plan, policy.tokenizer, first=start[1].step + 1 if start else 1)
    parts = () if recorded else read_training_data(main.config, policy, generation)
    add_teachers = await _build_teachers(policies, plan, parts, generation)
    source = recorded or build_prompt_source(main.config, parts)
    recovery, steps = _build_recovery(main, plan, checkpoints, estimator), _count_steps(config, len(source))
    report(f"{'Recorded groups are' if recorded else f'{len(source):,} prompts are'} read; loading {policy.folder}")
    overlap = config.schedule.max_weight_staleness > 0
    stack = build_stack(policies, overlap=overlap, steps=steps, recovery=recovery, report=report, timer=timer)
    train_generation, eval_generation = _connect_agents(multi_agent, generation, stack)
    services = UpstreamServices(next_prompt=source.next, first_rollout=start[1].step if start else 0)
    rollout = recorded or _build_rollout(main, train_generation, stack, add_teachers, services, report)
    await _load_start(stack, source, start)
    evaluator, eval_notes = build_evaluator(main.config, eval_generation, stack.engines.get(main.policy.name))
    planes = _build_planes(
        config,
        stack,
        hooks,
        source=source,
        rollout=rollout,
        estimator=estimator,
        trainer=ProbingTrainer(stack.trainer, recorded, advantages) if recorded else stack.trainer,
        rates=build_step_rates(config, main, stack.native_engines, timer),
        evaluator=evaluator,
        checkpoints=checkpoints,
        journal=journal,
        worker=generation.hook_worker,
        report=report,
    )
    between_steps, planes = _build_between_steps(main, stack, planes)
    return TrainingRun(
        loop=Loop(wrap_planes(planes), build_loop_settings(config, steps), start and start[1], policy=main.policy.name),
        policy=policy,
        notes=policies.notes() + list_data_notes(parts) + list_engine_notes(config, stack.engines) + eval_notes,
        generation=generation,
        multi_agent=multi_agent,
        engines=tuple(stack.engines.values()),
        servers=stack.servers,
        with_ranks=stack.with_ranks,
        executors=stack.executors,
        between_steps=between_steps,
    )


async def _load_start(stack: PolicyStack, source: Source, start: tuple[Path, Cursor] | None) -> None:
    """Load the checkpoint that the run continues, if it does."""
    if start is not None:
        await stack.trainer.load(start[0])
        source.load(start[1].source)


async def _build_teachers(
    policies: Policies, plan: Plan, parts: Sequence[MixturePart], generation: Generation
) -> WithTeachers:
    for owner in policies.owners.values():
        check_tokenizers(owner.config, owner.plan.teachers, owner.checkpoint.tokenizer)
    main = policies.main
    policy, render = main.checkpoint, generation.render
    return await build_teachers(main.config, plan, parts, tokenizer=policy.tokenizer, spec=policy.spec, render=render)


def _build_recovery(
    main: PolicySpec, plan: Plan, checkpoints: CheckpointDirectory, estimator: AdvantageEstimator
) -> RecoveryState:
    load_image = get_image_loader(main.checkpoint.tokenizer)
    saved = main.config.observe.save_rollouts
    rollouts = RolloutRecording(str(plan.run_dir), load_image=load_image) if saved else None
    bound = get_mask_bound(main.config)
    return RecoveryState(checkpoints=checkpoints, rollouts=rollouts, estimator=estimator, max_staleness=bound)


def _connect_agents(
    multi_agent: MultiAgentGeneration | None, generation: Generation, stack: PolicyStack
) -> tuple[Generation, Generation]:
    """The generation of training and that of evaluation, with the engines of all agents where there are several."""
    if multi_agent is None:
        return generation, generation
    engines = stack.engines
    metered = {name: stack.meter.wrap(engine) for name, engine in engines.items()}
    return multi_agent.with_engines(generation, metered), multi_agent.with_engines(generation, engines, evaluates=True)


def _build_planes(
    config: Config,
    stack: PolicyStack,
    hooks: UserHooks,
    *,
    source: Source,
    rollout: Rollout,
    estimator: AdvantageEstimator,
    trainer: Trainer,
    rates: StepRates,
    evaluator: Evaluator | None,
    checkpoints: CheckpointDirectory,
    journal: Journal,
    worker: HookWorker,
    report: Report,
) -> Planes:
    """The parts of the loop with the user's functions; groups that were recorded have been filtered already."""
    recorded = isinstance(source, ReplaySource)
    is_offloaded = any(map(partial(names_user_function, config), _GROUP_HOOKS))
    planes = Planes(
        source=source,
        rollout=rollout if recorded else BadRowRollout(rollout, skip=config.rollout.skip_bad_rows, report=report),
        group_filter=keep_all if recorded else drop_empty_groups(_build_group_filter(config)),
        estimator=estimator,
        trainer=trainer,
        sync=pause_during_sync(config, stack.sync, stack.native_engines),
        lease=stack.lease,
        evaluate=evaluator,
        checkpoints=checkpoints,
        journal=wrap_journal(source, journal),
        measure=_measure_with_correct if config.observe.log_correct_samples else group_metrics,
        decide=partial(worker.run_sync, name="The filter or advantage function") if is_offloaded else None,
        interruptible=rollout if isinstance(rollout, GroupRollout) and count_extra_groups(config) else None,
        take_engine_metrics=stack.meter.take_metrics,
        measure_rates=rates,
        limit_staleness=_build_staleness_limit(config, stack),
    )
    # Where planes take turns, nothing else goes on meanwhile, and the order of events must not depend on a hook's time.
    free = worker if config.schedule.max_weight_staleness > 0 else None
    if free is not None and not recorded and names_user_function(config, registry.DATA_SOURCE):
        planes = replace(planes, read=partial(free.run_sync, name="The data source"))
    weights, run = stack.trainer.weights, stack.executors[0]
    call = HookCaller(free, config.schedule.stall_timeout)
    return hooks.wrap_planes(planes, evaluator=evaluator, weights=weights, run=run, call=call, recorded=recorded)


def _build_staleness_limit(config: Config, stack: PolicyStack) -> Callable[[Sequence[Sample]], Sequence[Sample]] | None:
    bound = get_mask_bound(config)
    return None if bound is None else lambda samples: limit_staleness(samples, stack.get_version, bound)


def get_mask_bound(config: Config) -> int | None:
    """The staleness beyond which tokens are not trained on: where partial rollout keeps late groups; else None.

    Without staleness, late groups are resumed in the next step, and all of their tokens are trained on.
    """
    bound = config.schedule.max_weight_staleness
    return bound if bound and config.async_rollout.partial_rollout and count_extra_groups(config) else None


def _measure_with_correct(groups: tuple[Group, ...], version: Version) -> Mapping[str, float]:
    return {**group_metrics(groups, version), **correct_metrics(groups)}


def _build_group_filter(config: Config) -> Filter:
    """The filter of finished groups; those without any reward teach nothing, unless failures are trained on."""
    group_filter: Filter = load_hook(config, registry.FILTER) or keep_all
    return drop_unscored(group_filter) if config.algo.failed_trajectories == "mask" else group_filter


# What is called when a group has finished.
_GROUP_HOOKS = (registry.FILTER, registry.REWARD_POST_PROCESS, registry.CONVERT_SAMPLES, registry.SAMPLE_FILTER)


def _build_between_steps(main: PolicySpec, stack: PolicyStack, planes: Planes) -> tuple[BetweenSteps | None, Planes]:
    """What is done between steps, where the main policy's engines are servers."""
    if stack.servers is None:
        return None, planes
    from miles.launch.elastic.between_steps import build_between_steps

    return build_between_steps(main, stack.servers, stack.resilient, planes)


def build_loop_settings(config: Config, steps: int) -> LoopSettings:
    s = config.schedule
    evaluates = s.eval_interval is not None
    return LoopSettings(
        steps=steps,
        groups_per_step=config.rollout.rollout_batch_size,
        max_staleness=s.max_weight_staleness,
        window=s.reorder_window,
        stall_timeout=s.stall_timeout,
        max_dropped=s.max_dropped_groups,
        extra_groups=count_extra_groups(config),
        partial=config.async_rollout.partial_rollout,
        save=Interval(every=s.save_interval, at_end=True),
        evaluate=Interval(
            every=s.eval_interval, at_start=evaluates and not config.rollout.skip_eval_before_train, at_end=evaluates
        ),
    )


def _count_steps(config: Config, prompts: int) -> int:
    """Training steps: --num-rollout, or what the prompts that are not too long make in --num-epoch epochs."""
    s = config.schedule
    if s.num_rollout is not None:
        return s.num_rollout
    steps = (s.num_epoch or 0) * prompts // config.rollout.rollout_batch_size
    if not steps:
        raise UsageError(
            f"{prompts} prompts in {s.num_epoch} epochs do not fill one batch of "
            f"--rollout-batch-size {config.rollout.rollout_batch_size}; lower it, or give --num-rollout"
        )
    return steps


# -- data, rollout and evaluation -----------------------------------------------------------


def read_training_data(config: Config, policy: PolicyCheckpoint, generation: Generation) -> tuple[MixturePart, ...]:
    """The training prompts that fit, measured as they will be rendered."""
    r = config.rollout
    if config.algo.loss_type in OFFLINE_LOSSES:
        replies = build_offline_rollout(config, policy.tokenizer, policy.spec.eos_token_ids)
        check = build_prompt_check(config, context=None, renders=True)
        limit = resolve_context_limit(r, policy.spec.max_positions)
        return read_training_parts(config, policy.tokenizer, replies.tokens, limit, check)
    check = _build_generation_check(config, generation)
    return read_training_parts(config, policy.tokenizer, generation.render, resolve_prompt_limit(r), check)


def _build_generation_check(config: Config, generation: Generation) -> PromptCheck:
    return build_prompt_check(config, context=generation.max_context_len, renders=generation.renders_prompts)


def _build_rollout(
    main: PolicySpec,
    generation: Generation,
    stack: PolicyStack,
    add_teachers: WithTeachers,
    services: UpstreamServices,
    report: Report,
) -> Rollout:
    """The rollout of the main policy; a user's function may use ``services``."""
    config = main.config
    policy = main.checkpoint
    name = main.policy.name
    r, mode = config.rollout, config.async_rollout.pause_generation_mode
    if config.algo.loss_type in OFFLINE_LOSSES:
        return build_offline_rollout(config, policy.tokenizer, policy.spec.eos_token_ids)
    base = stack.engines[name]
    native = stack.native_engines[0] if stack.servers is None else None  # engines are in the policies' order
    sampler, generate = add_teachers(base, native, generation.generate)
    engine = stack.meter.wrap(sampler)
    default = GroupRollout(
        engine=engine,
        generate=generate,
        sampling=build_training_sampling(r),
        group_size=r.n_samples_per_prompt,
        seed_fn=make_training_seed_fn(r.rollout_seed),
        reward=generation.reward,
        group_reward=generation.group_reward,
        reward_key=generation.reward_key,
        reward_name=generation.reward_name,
        reward_seconds=r.reward_timeout,
        max_reward_failures=r.max_reward_failures,
        abort=partial(_abort_all, tuple(stack.engines.values())),
        role_engines=generation.role_engines,
        limiter=_build_concurrency_limiter(config, base),
        retry_aborted=mode == "abort",
        allow_duplicates=r.allow_duplicate_samples,
        report=report,
    )
    return wrap_rollout(config, default, engine, generation.hook_worker, services)


async def _abort_all(engines: Sequence[RolloutEngine]) -> None:
    for engine in engines:
        await engine.abort()


def build_evaluator(
    config: Config, generation: Generation, engine: RolloutEngine | None
) -> tuple[Evaluator | None, tuple[str, ...]]:
    """The evaluator of ``--eval-prompt-data``, where there are data and an engine, and notes about its data."""
    r = config.rollout
    if engine is None or not r.eval_prompt_data:
        return None, ()
    pairs = zip(r.eval_prompt_data[::2], r.eval_prompt_data[1::2], strict=True)
    eval_fn = load_eval_function(config, generation.hook_worker)
    check = _build_generation_check(config, generation)
    render = generation.render
    sets = {name: read_held_out_set(name, path, config, render.tokenizer, render, check) for name, path in pairs}
    default = _build_eval_settings(config, generation)
    evaluator = Evaluator(
        {name: dataset.prompts for name, dataset in sets.items()},
        engine=engine,
        generate=default.generate,
        sampling=default.sampling,
        group_size=default.group_size,
        seed=r.rollout_seed,
        reward=default.reward,
        group_reward=default.group_reward,
        reward_key=default.reward_key,
        reward_name=default.reward_name,
        settings={
            name: _build_eval_settings(get_set_config(config, name), generation, config) for name in r.eval_options
        },
        reward_seconds=r.reward_timeout,
        max_reward_failures=r.max_reward_failures,
        log_passrate=r.log_passrate,
        eval_fn=eval_fn,
    )
    return evaluator, tuple(dataset.note for dataset in sets.values() if dataset.note)


def _build_eval_settings(config: Config, generation: Generation, run: Config | None = None) -> EvalSettings:
    """How a held-out set is sampled and scored; one with a reward other than that of the ``run`` has its own."""
    r = config.rollout
    reward, group_reward = generation.reward, generation.group_reward
    if run is not None and (r.rm_type, r.custom_rm_path) != (run.rollout.rm_type, run.rollout.custom_rm_path):
        scored = replace(config, rollout=replace(r, reward_key=r.eval_reward_key or r.reward_key))
        reward, group_reward = build_offloaded_rewards(scored, generation.hook_worker)
    generate = mark_evaluation(generation.generate)
    if r.eval_max_context_len is not None:
        generate = limit_context(generate, generation.render, r.eval_max_context_len)
    return EvalSettings(
        generate=generate,
        sampling=build_eval_sampling(r),
        group_size=r.n_samples_per_eval_prompt,
        reward=reward,
        group_reward=group_reward,
        reward_key=r.eval_reward_key or generation.reward_key,
        reward_name=name_reward(config),
    )


# -- async rollout --------------------------------------------------------------------------


def count_extra_groups(config: Config) -> int:
    """Groups that enter a step beyond those it needs (--over-sampling-batch-size)."""
    size = config.async_rollout.over_sampling_batch_size
    recorded = config.observe.load_debug_rollout_data is not None  # recorded steps have no interrupted groups
    return 0 if size is None or recorded else size - config.rollout.rollout_batch_size


def _build_concurrency_limiter(config: Config, engine: RolloutEngine) -> ConcurrencyLimiter | None:
    a, r = config.async_rollout, config.rollout
    if a.async_max_concurrent_samples is None and not a.adaptive_concurrency:
        return None
    groups = a.over_sampling_batch_size or r.rollout_batch_size
    most = (config.schedule.max_weight_staleness + 1) * groups * r.n_samples_per_prompt
    return ConcurrencyLimiter(
        a.async_max_concurrent_samples or most,
        granularity=a.rollout_submission_granularity if a.async_max_concurrent_samples is not None else "sample",
        load=engine.health if a.adaptive_concurrency else None,
    )


def mask_stale_tokens(config: Config, estimator: AdvantageEstimator) -> AdvantageEstimator:
    """The estimator, which masks tokens of older weights under --mask-offpolicy-in-partial-rollout."""
    masks = config.async_rollout.mask_offpolicy_in_partial_rollout
    return train_newest_version_only(estimator) if masks else estimator


def list_engine_notes(config: Config, engines: Collection[str]) -> tuple[str, ...]:
    """Notes about the engines of a run: what they do not support, and what they draft with by default."""
    choice = choose_speculation(config)
    drafts = (choice.describe(),) if engines and choice.reason and choice.algorithm != "none" else ()
    return list_async_notes(config) + drafts


def list_async_notes(config: Config) -> tuple[str, ...]:
    """A note where engines do not support the pause mode."""
    mode = config.async_rollout.pause_generation_mode
    sglang = config.sglang.rollout_backend == "sglang"
    if mode == "abort" or not sglang or config.schedule.max_weight_staleness == 0:
        return ()
    return (
        "Stock SGLang reports one weight version per reply, so "
        f"--pause-generation-mode {mode} is treated as abort: in-flight requests are aborted and resumed after the "
        "update.",
    )


class Pausable(Protocol):
    """An engine that can be paused during a weight update."""

    async def pause(self, mode: Any = ...) -> None: ...
    async def resume(self) -> None: ...


class PausingWeightSync:
    """A core.protocols.WeightSync that pauses engines during the update."""

    def __init__(self, sync: WeightSync, engines: Sequence[Pausable], mode: str) -> None:
        self._sync = sync
        self._engines = tuple(engines)
        self._mode = mode

    async def publish(self, version: Version) -> Mapping[str, float]:
        try:
            for engine in self._engines:
                await engine.pause(self._mode)
            return await self._sync.publish(version)
        finally:
            for engine in self._engines:
                await engine.resume()


def pause_during_sync(config: Config, sync: WeightSync, engines: Sequence[NativeEngine]) -> WeightSync:
    """The sync that pauses engines of this process as configured; servers pause by themselves."""
    mode = config.async_rollout.pause_generation_mode
    if mode == "in_place" or config.schedule.max_weight_staleness == 0:
        return sync  # nothing is in flight, or it may go on
    return PausingWeightSync(sync, engines, mode)
