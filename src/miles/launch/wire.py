"""The composition root: config in, a loop out. The one place that names implementations.

Two ways to stand in one process, and the staleness budget picks one:

    budget 0   planes take turns (Colocated), everything on one thread (Inline), weights shared: zero bytes move,
               and the run repeats to the bit
    budget k   planes overlap (Disjoint), a thread each (Threaded), weights copied at publication

Where several ranks train, this process is the first of them, and weights are put together for each publication.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from miles.algo.config import GIVEN
from miles.backends.native.engine import NativeEngine
from miles.cluster.local import Inline, Run, Threaded
from miles.core.errors import UsageError
from miles.core.protocols import Filter, Journal, Rollout
from miles.launch.answering import Answering, answering_of
from miles.launch.config import Config
from miles.launch.engines import engine_of
from miles.launch.layout_rules import is_team
from miles.launch.mathematics import credit_for, plugs_of
from miles.launch.plan import Plan
from miles.launch.policy import Policy, load_model, read_policy
from miles.launch.prompts import held_out_set, journal_for, notes_of, replies_of, source_for, training_parts
from miles.launch.rank_trainer import TeamTrainer
from miles.launch.teachers import Applied, teachers_for
from miles.launch.trainer import Trains, trainer_of
from miles.observe.metric import group_metrics
from miles.plug import points
from miles.rollout.evaluate import Evaluator
from miles.rollout.filters import keep_all
from miles.rollout.mixture import Part
from miles.rollout.produce import Producer
from miles.rollout.sampling import context_limit, evaluation_sampling, prompt_limit, training_sampling
from miles.rollout.seeds import training_seeds
from miles.rollout.source import fit
from miles.schedule.cadence import Cadence
from miles.schedule.lease import Colocated, Disjoint
from miles.schedule.loop import Loop, Planes, Tempo
from miles.schedule.recover import Checkpoints, Cursor
from miles.sync.publish import Publication


def evaluator_of(
    config: Config, answering: Answering, engine: NativeEngine
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
        generate=answering.generate,
        sampling=evaluation_sampling(r),
        attempts=r.n_samples_per_eval_prompt,
        seed=r.rollout_seed,
        reward=answering.reward,
        group_reward=answering.group_reward,
        reward_key=answering.reward_key,
        reward_seconds=r.reward_timeout,
        most_unscored=r.max_unscored_attempts,
        log_passrate=r.log_passrate,
    )
    return evaluator, tuple(dataset.note for dataset in sets.values() if dataset.note)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wired:
    """A run ready to go. ``notes`` are things a user should know before it does."""

    loop: Loop
    trainer: Trains
    engine: NativeEngine | None
    evaluator: Evaluator | None
    policy: Policy
    notes: tuple[str, ...]
    runs: tuple[Run, ...]
    answering: Answering

    async def run(self) -> None:
        """The loop, to its end; a rank of the trainer that ends before it ends it too."""
        if not isinstance(self.trainer, TeamTrainer):
            await self.loop.run()
            return
        going, lost = asyncio.create_task(self.loop.run()), asyncio.create_task(self.trainer.lost())
        try:
            await asyncio.wait((going, lost), return_when=asyncio.FIRST_COMPLETED)
            await (going if going.done() else lost)
        finally:
            for task in (going, lost):
                task.cancel()
            await asyncio.gather(going, lost, return_exceptions=True)  # both have said what there is to say

    async def close(self) -> None:
        await self.answering.close()
        if self.engine is not None:
            await self.engine.close()
        if isinstance(self.trainer, TeamTrainer):
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
) -> Wired:
    """Build both planes and the loop between them, standing where ``start`` left off."""
    policy = read_policy(config)
    answering = answering_of(config, policy)
    credit, plugs = credit_for(config), plugs_of(config)
    parts = _parts_of(config, policy, answering)
    held = {"tokenizer": policy.tokenizer, "spec": policy.spec, "render": answering.render}
    taught = await teachers_for(config, plan, parts, **held)
    source = source_for(config, parts)
    overlap = config.schedule.max_weight_staleness > 0
    engine_run: Run = Threaded("engine") if overlap else Inline()
    trainer_run: Run = Threaded("trainer") if overlap else Inline()
    # Ranks that share a model read each its own part of it.
    model = None if is_team(config) else load_model(policy)
    engine = engine_of(config, policy, engine_run, model) if plan.samples else None
    rollout = _rollout_of(config, policy, answering, engine, taught)
    steps = _steps(config, len(source))
    trainer = trainer_of(config, plan, policy, trainer_run, model, steps=steps, plugs=plugs)
    if start is not None:
        await trainer.load(start[0])
        source.load(start[1].source)
    evaluator, notes = evaluator_of(config, answering, engine) if engine else (None, ())
    planes = Planes(
        source=source,
        rollout=rollout,
        keep=_filter_of(config),
        credit=credit,
        trainer=trainer,
        sync=Publication(
            weights=trainer.weights,
            engines=[engine] if engine else [],
            transport="copy" if plan.transport == "copy" else "shared",
            run=engine_run,
        ),
        lease=Colocated(engine=engine, trainer=trainer) if engine and not overlap else Disjoint(),
        evaluate=evaluator,
        checkpoints=checkpoints,
        journal=journal_for(source, journal),
        measure=group_metrics,
    )
    return Wired(
        loop=Loop(planes, tempo_of(config, steps), start[1] if start else None),
        trainer=trainer,
        engine=engine,
        evaluator=evaluator,
        policy=policy,
        notes=notes_of(parts) + notes,
        runs=(engine_run, trainer_run),
        answering=answering,
    )


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
    config: Config, policy: Policy, answering: Answering, engine: NativeEngine | None, taught: Applied
) -> Rollout:
    r = config.rollout
    if config.algo.loss_type in GIVEN:
        return replies_of(config, policy.tokenizer, policy.spec.eos_token_ids)
    assert engine is not None
    door, generate = taught(engine, answering.generate)
    return Producer(
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
    )


def _filter_of(config: Config) -> Filter:
    path = config.rollout.dynamic_sampling_filter_path
    return points.FILTER.load(path) if path else keep_all
