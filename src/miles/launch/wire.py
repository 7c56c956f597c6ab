"""The composition root: config in, a loop out. The one place that names implementations.

Two ways to stand in one process, and the staleness budget picks one:

    budget 0   planes take turns (Colocated), everything on one thread (Inline), weights shared: zero bytes move,
               and the run repeats to the bit
    budget k   planes overlap (Disjoint), a thread each (Threaded), weights copied at publication

What is each policy's own, and how several stand behind the loop's doors, is ``company``; how they meet, ``casting``.
Where several ranks train, this process is the first of them, and weights are put together for each publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from miles.algo.config import GIVEN
from miles.backends.native.engine import NativeEngine
from miles.cluster.local import Run
from miles.core.errors import UsageError
from miles.core.protocols import Filter, Journal, Rollout
from miles.launch.answering import Answering, answering_of
from miles.launch.casting import Casting, casting_of
from miles.launch.company import Enrolled, credit_of_all, enrol, stage_of
from miles.launch.config import Config
from miles.launch.dumped import Probed, recorded_of
from miles.launch.engines import RolloutEngine
from miles.launch.hooks import own
from miles.launch.mending import Memory, MendedTrainer
from miles.launch.plan import Plan
from miles.launch.plugged import own_of, own_rollout
from miles.launch.policy import Policy
from miles.launch.prompts import held_out_set, journal_for, notes_of, replies_of, source_for, training_parts
from miles.launch.teachers import Applied, teachers_for
from miles.launch.tempo import credited, manner_of, notes_of_tempo, spare_groups, sync_of_tempo
from miles.launch.trainer import Trains
from miles.launch.upstream import upstream_of
from miles.observe.metric import group_metrics
from miles.plug import points
from miles.plug.upstream.groups import evaluating
from miles.rollout.evaluate import Evaluator
from miles.rollout.filters import keep_all
from miles.rollout.mixture import Part
from miles.rollout.produce import Producer
from miles.rollout.recorded import Recording
from miles.rollout.sampling import context_limit, evaluation_sampling, prompt_limit, training_sampling
from miles.rollout.seeds import training_seeds
from miles.rollout.source import fit
from miles.schedule.cadence import Cadence
from miles.schedule.loop import Loop, Planes, Tempo
from miles.schedule.recover import Checkpoints, Cursor

if TYPE_CHECKING:
    from miles.launch.attending import Attending


def evaluator_of(
    config: Config, answering: Answering, engine: RolloutEngine
) -> tuple[Evaluator | None, tuple[str, ...]]:
    """The held-out sets of ``--eval-prompt-data``, if any, and what a user should know of how they were read."""
    r = config.rollout
    if not r.eval_prompt_data:
        return None, ()
    pairs = zip(r.eval_prompt_data[::2], r.eval_prompt_data[1::2], strict=True)
    sets = {name: fit(held_out_set(path, config), answering.render, prompt_limit(r)) for name, path in pairs}
    evaluator = Evaluator(
        {name: dataset.prompts for name, dataset in sets.items()},
        engine=engine,
        generate=evaluating(answering.generate),
        sampling=evaluation_sampling(r),
        attempts=r.n_samples_per_eval_prompt,
        seed=r.rollout_seed,
        reward=answering.reward,
        group_reward=answering.group_reward,
        reward_key=answering.reward_key,
        reward_seconds=r.reward_timeout,
        most_unscored=r.max_unscored_attempts,
        log_passrate=r.log_passrate,
        own=own(config, points.EVALUATE),
    )
    return evaluator, tuple(dataset.note for dataset in sets.values() if dataset.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A run ready to go. ``notes`` are things a user should know before it does.

    ``engine`` and ``policy`` are the main policy's; ``engines`` are all there are.
    """

    loop: Loop
    trainer: Trains
    engine: RolloutEngine | None
    evaluator: Evaluator | None
    policy: Policy
    notes: tuple[str, ...]
    runs: tuple[Run, ...]
    answering: Answering
    engines: tuple[RolloutEngine, ...] = ()
    casting: Casting | None = None
    attending: Attending | None = None

    async def run(self) -> None:
        """The loop, to its end; a rank of the trainer that ends before it is replaced, or ends it too."""
        beside = [self.trainer.lost()] if isinstance(self.trainer, MendedTrainer) else []
        beside += [] if self.attending is None else [self.attending.attend()]
        if not beside:
            await self.loop.run()
            return
        tasks = [asyncio.create_task(each) for each in (self.loop.run(), *beside)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            await next(task for task in tasks if task in done)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # all have said what there is to say

    async def close(self) -> None:
        if self.attending is not None:
            await self.attending.close()
        if self.casting is not None:
            await self.casting.close()
        await self.answering.close()
        for engine in self.engines:
            await engine.close()
        if isinstance(self.trainer, MendedTrainer):
            self.trainer.close()
        for run in self.runs:
            run.close()


async def wire(
    config: Config,
    plan: Plan,
    *,
    checkpoints: Checkpoints,
    journal: Journal,
    start: tuple[Path, Cursor] | None,
    around: Callable[[Planes], Planes] = lambda planes: planes,
) -> Wired:
    """Build both planes and the loop between them, standing where ``start`` left off; ``around`` has a last word."""
    brought = own_of(config)
    company = enrol(config, plan)
    main, policy = company.main, company.main.policy
    answering, casting = answering_of(main.config, policy, logs=plan.run_dir / "logs"), casting_of(config, company)
    credit = credit_of_all(config, company)
    recorded = recorded_of(config, first=start[1].step + 1 if start else 1, steps=plan.steps)
    parts = () if recorded else _parts_of(main.config, policy, answering)
    held = {"tokenizer": policy.tokenizer, "spec": policy.spec, "render": answering.render}
    taught = await teachers_for(main.config, plan, parts, **held)
    source = recorded or source_for(main.config, parts)
    steps = _steps(config, len(source))
    stage = stage_of(company, overlap=config.schedule.max_weight_staleness > 0, steps=steps)
    trainer, engine = stage.trainer, stage.engines.get(main.member.name)
    training, held_out = _answering_twice(answering, casting, stage.engines)
    rollout = recorded or _rollout_of(main.config, policy, training, engine, taught)
    if start is not None:
        await trainer.load(start[0])
        source.load(start[1].source)
    evaluator, notes = evaluator_of(main.config, held_out, engine) if engine else (None, ())
    planes = Planes(
        source=source,
        rollout=rollout,
        keep=keep_all if recorded else _filter_of(config),
        credit=credited(config, credit),
        trainer=Probed(trainer, recorded, credit) if recorded else trainer,
        sync=sync_of_tempo(config, stage.sync, [e for e in stage.engines.values() if isinstance(e, NativeEngine)]),
        lease=stage.lease,
        evaluate=evaluator,
        checkpoints=checkpoints,
        journal=journal_for(source, journal),
        measure=group_metrics,
        cuttable=rollout if isinstance(rollout, Producer) and spare_groups(config) else None,
    )
    plugged = brought.around(planes, weights=trainer.weights, run=stage.runs[0], recorded=recorded is not None)
    _remember(trainer, Recording(str(plan.run_dir)) if config.observe.save_rollouts else None, plugged)
    attending, plugged = _attended(company.main, engine, trainer, plugged)
    return Wired(
        loop=Loop(around(plugged), tempo_of(config, steps), start[1] if start else None, policy=main.member.name),
        trainer=trainer,
        engine=engine,
        evaluator=evaluator,
        policy=policy,
        notes=company.notes() + notes_of(parts) + notes_of_tempo(config) + notes,
        runs=stage.runs,
        answering=answering,
        engines=tuple(stage.engines.values()),
        casting=casting,
        attending=attending,
    )


def _remember(trainer: Trains, rollouts: Recording | None, planes: Planes) -> None:
    """Give a trainer that can be mended what that takes."""
    if isinstance(trainer, MendedTrainer):
        trainer.memory = Memory(checkpoints=planes.checkpoints, rollouts=rollouts, credit=planes.credit)


def _attended(
    main: Enrolled, engine: RolloutEngine | None, trainer: Trains, planes: Planes
) -> tuple[Attending | None, Planes]:
    """What is done between steps, where the main policy's engines are servers."""
    if engine is None or isinstance(engine, NativeEngine):
        return None, planes
    from miles.launch.attending import attended

    return attended(main, engine, trainer, planes)


def _answering_twice(
    answering: Answering, casting: Casting | None, engines: Mapping[str, RolloutEngine]
) -> tuple[Answering, Answering]:
    """How prompts are answered in training, and how when they are held out."""
    if casting is None:
        return answering, answering
    return casting.answering(answering, engines), casting.answering(answering, engines, evaluates=True)


def tempo_of(config: Config, steps: int) -> Tempo:
    """The numbers the loop goes by."""
    s = config.schedule
    evaluates = s.eval_interval is not None
    return Tempo(
        steps=steps,
        groups_per_step=config.rollout.rollout_batch_size,
        max_staleness=s.max_weight_staleness,
        window=s.shelf_window,
        stall_timeout=s.stall_timeout,
        max_dropped=s.max_dropped_groups,
        spare=spare_groups(config),
        partial=config.tempo.partial_rollout,
        save=Cadence(every=s.save_interval, at_end=True),
        evaluate=Cadence(
            every=s.eval_interval, at_start=evaluates and not config.rollout.skip_eval_before_train, at_end=evaluates
        ),
    )


def _steps(config: Config, prompts: int) -> int:
    """Training steps: as many as asked for, or as the prompts that are left after dropping long ones make."""
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


def _parts_of(config: Config, policy: Policy, answering: Answering) -> tuple[Part, ...]:
    """The training prompts that fit, measured as they will be rendered."""
    r = config.rollout
    if config.algo.loss_type in GIVEN:
        given = replies_of(config, policy.tokenizer, policy.spec.eos_token_ids)
        return training_parts(config, given.tokens, context_limit(r, policy.spec.max_positions))
    return training_parts(config, answering.render, prompt_limit(r))


def _rollout_of(
    config: Config, policy: Policy, answering: Answering, engine: RolloutEngine | None, taught: Applied
) -> Rollout:
    r = config.rollout
    if config.algo.loss_type in GIVEN:
        return replies_of(config, policy.tokenizer, policy.spec.eos_token_ids)
    assert engine is not None
    door, generate = taught(engine, answering.generate)
    usual = Producer(
        engine=door,
        generate=generate,
        sampling=training_sampling(r),
        attempts=r.n_samples_per_prompt,
        seed_of=training_seeds(r.rollout_seed),
        reward=answering.reward,
        group_reward=answering.group_reward,
        reward_key=answering.reward_key,
        reward_seconds=r.reward_timeout,
        most_unscored=r.max_unscored_attempts,
        **manner_of(config, engine),
    )
    return own_rollout(config, usual, door)


def _filter_of(config: Config) -> Filter:
    path = config.rollout.dynamic_sampling_filter_path
    return points.FILTER.load(path, upstream_of(config)) if path else keep_all
