"""The trainer: a batch in, a new version of the weights out.

    batch -> global batches (one optimizer step each) -> micro-batches -> gradient -> update

Where advantages need the whole batch, every token's log-probs and value are read, and judged, before the first update.

Blocking work goes through ``run``; nothing else here waits.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from miles.algo.config import GIVEN, PAIRED, WITH_CRITIC, AlgoConfig
from miles.algo.corrections import finished
from miles.algo.ladder import Rung, ladder_of
from miles.algo.table import NO_PLUGS, Plugs, mean_of, objective_of, reducer_of
from miles.cluster.local import Run
from miles.core.errors import ParityError, UsageError
from miles.core.types import Batch, Sample, StepReport, Version
from miles.kernels.arithmetic import exact
from miles.models.lora import Adapters
from miles.train import checkpoint
from miles.train.balance import Price
from miles.train.config import TrainConfig
from miles.train.corrector import Corrector, drifted, rung_metric
from miles.train.critic import Critic
from miles.train.exactness import refuse_to_differ
from miles.train.experts import Used
from miles.train.hooks import NO_HOOKS, Hooks
from miles.train.optim import optimizer_of
from miles.train.peers import ALONE, Peers
from miles.train.rates import schedule_of
from miles.train.returns import Judged, Known, returns_of
from miles.train.roles import Adapted, TrainModel, weights_of
from miles.train.rows import Flat, Rows, flatten, trajectories_of
from miles.train.steps import Gradient, Reader, Tally, micro_batches, parity, parity_metrics
from miles.train.teacher import teachers_of


class Worker:
    """Trains ``actor``; implements the Trainer door.

    ``steps`` optimizer steps are made of each batch, ``updates`` in the whole run (schedules decay over
    them). The policy loss divides logits by ``temperature``, the one the engine samples at. ``reference`` is
    what the KL is measured against. A ``critic`` learns from every batch too, at first perhaps alone. ``teachers``
    score what the policy wrote where it is distilled, each sample by the one whose number it bears; without any, the
    samples bring what teachers elsewhere said. An engine may read the very weights of a policy that ``lends`` them.
    Of every batch a rank trains on its part among ``peers``; parts are alike in tokens, or in what ``price`` says
    these cost.
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
        run: Run,
        reference: TrainModel | None = None,
        critic: Critic | None = None,
        teachers: Sequence[TrainModel] = (),
        plugs: Plugs = NO_PLUGS,
        hooks: Hooks = NO_HOOKS,
        version: Version | None = None,
        parity_tolerance: float = 0.01,
        parity_stop: float | None = None,
        parity_no_replay_interval: int = 0,
        offload: bool = True,
        lends: bool = True,
        peers: Peers = ALONE,
        price: Price | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _refuse(algo, temperature, reference)
        self.version = version or Version()
        self._actor, self._algo, self._train, self._run, self._clock = actor, algo, train, run, clock
        self._steps, self._peers, self._price = steps, peers, price
        self._saving = checkpoint.saving_of(train)
        self._parity_stop, self._no_replay_interval = parity_stop, parity_no_replay_interval
        ladder = ladder_of(tolerance=parity_tolerance, stop=parity_stop)
        self._corrector = Corrector(algo=algo, ladder=ladder, own=plugs.correction, peers=peers)
        self._offload, self._home = offload and actor.device.type != "cpu", actor.device
        others = [*teachers] if reference is None else [reference, *teachers]
        self._leaving = others if lends else [actor, *others]
        self._reducer, self._mean = reducer_of(algo, plugs), mean_of(algo)
        self._policy_loss = algo.loss_type not in GIVEN
        self._reader = Reader(temperature=temperature if self._policy_loss else 1.0, chunk=train.log_probs_chunk_size)
        self._returns = returns_of(algo, peers, actor.device) if self._policy_loss else None
        self._critic = critic
        assert self._returns is None or critic or algo.advantage_estimator not in WITH_CRITIC, "no critic to ask"
        self._alone = train.num_critic_only_steps * steps if critic is not None else 0
        self._charged = reference if algo.kl_coef else None
        in_loss = reference if algo.use_kl_loss or not algo.kl_coef else None
        self._gradient = Gradient(
            actor=actor,
            reference=in_loss,
            objective=objective_of(algo, plugs),
            reader=self._reader,
            teachers=teachers_of(
                algo, teachers, temperature=temperature, chunk=train.log_probs_chunk_size, peers=peers
            ),
        )
        trained = {name: p for name, p in actor.parameters().items() if p.requires_grad}
        schedule = schedule_of(train, updates=max(1, updates - self._alone))
        self._optimizer = optimizer_of(trained, train, schedule, model=actor)
        self._hooks = hooks
        if hooks.init is not None:
            hooks.init(actor)

    async def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``; the report's version is the new one."""
        return await self._run(lambda: self._step(batch))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: self._save(folder))

    async def load(self, folder: Path) -> None:
        self.version = await self._run(lambda: self._load(folder))

    async def sleep(self) -> None:
        """Leave the accelerator to the engine: everything goes to the host but what the engine reads itself.

        Those are the policy's weights where it ``lends`` them. A critic with a device of its own stays there.
        """
        if self._offload:
            await self._run(lambda: self._move(torch.device("cpu")))

    async def wake(self) -> None:
        if self._offload:
            await self._run(lambda: self._move(self._home))

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights by our names: the next step changes them in place."""
        return weights_of(self._actor)

    def adapters(self) -> Adapters | None:
        """The factors that are trained in place of the weights, if they are."""
        return self._actor.adapters() if isinstance(self._actor, Adapted) else None

    def _save(self, folder: Path) -> None:
        checkpoint.save(folder, self._actor, self._optimizer, self.version, self._peers, self._saving)
        if self._critic is not None:
            self._critic.save(folder, self.version)

    def _load(self, folder: Path) -> Version:
        if self._critic is not None:
            self._critic.load(folder)
        return checkpoint.load(folder, self._actor, self._optimizer, self._peers)

    def _move(self, device: torch.device) -> None:
        self._optimizer.move(device)
        for model in self._leaving:
            model.move(device)
        if self._critic is not None and not self._critic.apart:
            self._critic.move(device)

    def _step(self, batch: Batch) -> StepReport:
        began = self._clock()
        flats = self._global_batches(batch.samples)
        replay = self._algo.use_rollout_routing_replay
        how = {"replay": replay, "paired": self._algo.loss_type in PAIRED, "peers": self._peers}
        plan = [micro_batches(flat, self._train, device=self._actor.device, price=self._price, **how) for flat in flats]
        if self._algo.use_routing_replay:
            plan = [[replace(rows, used=Used()) for rows in part] for part in plan]
        packed = self._clock()
        alone = self._critic is not None and self._critic.updates < self._alone
        if self._hooks.before_log_probs is not None:
            self._hooks.before_log_probs(batch.step, self._actor)
        olds = self._old_logprobs(flats, plan, alone=alone)
        looked = self._clock()
        seconds = {"pack": packed - began, "old_logprobs": looked - packed}
        judged, measured = self._judge(plan, olds)
        if self._returns is not None:
            seconds["returns"], looked = (now := self._clock()) - looked, now
        tally, floats = Tally(), []
        if batch.probe and self._policy_loss and not self._wrote(flats[0]):
            self._look_at(batch.probe, tally)
        measured |= self._without_replay(plan[0])
        rung = None if alone else self._choose(plan[0], olds[0], tally, stale=self._stale(flats))
        for number, (part, old) in enumerate(zip(judged, olds, strict=True)):
            if self._hooks.before_train_step is not None:
                self._hooks.before_train_step(batch.step, number, self._actor, self._optimizer)
            learn = self._compare if alone else partial(self._update, rung=rung)
            made = learn([j.rows for j in part], old, tally, first=number == 0)
            floats.append(made if self._critic is None else made | self._critic.update(part))
        metrics = _means(floats) | parity_metrics(tally, self._peers) | rung_metric(rung) | _of_batch(flats) | measured
        metrics["micro_batches"] = float(sum(len(rows) for rows in plan) * self._peers.parts)
        if self._train.share_prefix:
            metrics["tokens_shared"] = _shared(plan, self._peers)
        self.version = self.version.next()
        return StepReport(version=self.version, metrics=metrics, seconds=seconds | {"optimize": self._clock() - looked})

    def _judge(
        self, plan: list[list[Rows]], olds: list[list[Tensor | None]]
    ) -> tuple[list[list[Judged]], dict[str, float]]:
        """The same rows with the advantages of the whole batch where they need it, and metrics of these."""
        if self._returns is None:
            return [[Judged(rows=rows) for rows in part] for part in plan], {}
        known = [k for part, old in zip(plan, olds, strict=True) for k in self._known(part, old)]
        judged, measured = self._returns(known)
        found = iter(judged)
        return [[next(found) for _ in part] for part in plan], measured

    def _known(self, plan: list[Rows], olds: list[Tensor | None]) -> list[Known]:
        none: list[Tensor | None] = [None] * len(plan)
        refs = none if self._charged is None else self._reader.frozen(self._charged, [rows.unrouted() for rows in plan])
        values = none if self._critic is None else [self._critic.values(rows) for rows in plan]
        found = zip(plan, olds, refs, values, strict=True)
        return [Known(rows=rows, old_logp_R=o, ref_logp_R=r, value_R=v) for rows, o, r, v in found]

    def _global_batches(self, samples: Sequence[Sample]) -> list[Flat]:
        """What each optimizer step is made of; trajectories in order and whole."""
        trajectories = trajectories_of(samples)
        size, rest = divmod(len(trajectories), self._steps)
        assert not rest and size, f"{len(trajectories)} trajectories cannot make {self._steps} equal global batches"
        starts = range(0, len(trajectories), size)
        return [flatten(trajectories[start : start + size], self._reducer, self._mean) for start in starts]

    def _old_logprobs(self, flats: Sequence[Flat], plan: list[list[Rows]], *, alone: bool) -> list[list[Tensor | None]]:
        """What the ratio, or a KL in the reward, compares with, by micro-batch; None is the step's own forward.

        The trainer's own forward is the truer past of its own tokens. It cannot give the past of tokens
        that older weights wrote, so a batch with such tokens takes the engine's word; unless what is corrected
        is the very difference to the engine.
        """
        if not self._policy_loss:
            return [[None] * len(rows) for rows in plan]
        theirs = self._algo.use_rollout_logprobs
        if theirs is None:
            theirs = not self._corrector.active and self._stale(flats)
        if theirs:
            if self._algo.use_routing_replay and len(plan) > 1 and not alone:
                for rows in plan:
                    self._reader.frozen(self._actor, rows)  # for the experts it uses
            return [[r.engine_logp_R for r in rows] for rows in plan]
        unread = len(plan) == 1 and not self._corrector.looks_ahead
        if self._charged is None and (unread or alone):
            return [[None] * len(rows) for rows in plan]
        return [list(self._reader.frozen(self._actor, rows)) for rows in plan]

    def _stale(self, flats: Sequence[Flat]) -> bool:
        """Did other weights than the present ones write any of the trained tokens?"""
        return any(bool((f.versions_N[f.mask_N] != self.version.number).any()) for f in flats)

    def _wrote(self, flat: Flat) -> bool:
        """Did the present weights alone write any of its samples?"""
        return bool((flat.oldest_S == self.version.number).any())

    def _look_at(self, samples: Sequence[Sample], tally: Tally) -> None:
        """Compare with the engine on rows that are not trained on: all of a batch's own may be older."""
        flat = flatten([[s] for s in samples], self._reducer, self._mean)
        replay = self._algo.use_rollout_routing_replay
        plan = micro_batches(flat, self._train, device=self._actor.device, replay=replay, peers=self._peers)
        for logp_R, rows in zip(self._reader.frozen(self._actor, plan), plan, strict=True):
            parity(logp_R, rows, self.version.number, tally)

    def _without_replay(self, plan: Sequence[Rows]) -> dict[str, float]:
        """What a micro-batch's parity would be if the trainer's routers chose for themselves, now and then."""
        every = self._no_replay_interval
        if not (self._algo.use_rollout_routing_replay and every and self.version.number % every == 0 and plan):
            return {}
        if not self._peers.names(["replayed"] if plan[0].replay_TLk is not None else []):
            return {}
        rows, tally = plan[0].unrouted(), Tally()
        parity(self._reader.frozen(self._actor, [rows])[0], rows, self.version.number, tally)
        seen = parity_metrics(tally, self._peers)
        return {"parity_mean_abs_no_replay": seen["parity_mean_abs"]} if seen else {}

    def _compare(self, plan: list[Rows], olds: list[Tensor | None], tally: Tally, *, first: bool) -> dict[str, float]:
        """What is left of ``_update`` while the policy stays as it is: a look at engine and trainer."""
        if first:
            for logp_R, rows in zip(self._reader.frozen(self._actor, plan), plan, strict=True):
                parity(logp_R, rows, self.version.number, tally)
            self._refuse_to_drift(tally)
        return {}

    def _choose(self, plan: list[Rows], olds: list[Tensor | None], tally: Tally, *, stale: bool) -> Rung | None:
        """What the first global batch's parity calls for, where that decides how the loss is corrected."""
        if not self._corrector.auto:
            return None
        for rows, old_logp_R in zip(plan, olds, strict=True):
            assert old_logp_R is not None, "the parity of a batch was asked for before its log-probs were read"
            parity(old_logp_R, rows, self.version.number, tally)
        return self._corrector.choose(parity_metrics(tally, self._peers), self.version.number, stale=stale)

    def _update(
        self, plan: list[Rows], olds: list[Tensor | None], tally: Tally, *, first: bool, rung: Rung | None
    ) -> dict[str, float]:
        step = Tally()
        objective = self._corrector.judge(self._gradient.objective, rung, plan, olds)
        gradient = replace(self._gradient, objective=objective)
        for logp_R, rows in zip(gradient.accumulate(plan, olds, step), plan, strict=True):
            if first and rung is None:
                parity(logp_R, rows, self.version.number, tally)
        if first:
            self._refuse_to_drift(tally)
        self._actor.settle()
        grad_norm, lr = self._optimizer.step()
        self._actor.updated()
        told = finished(step.floats(self._peers)) | step.imbalance(self._peers)
        return told | {"grad_norm": grad_norm, "lr": lr}

    def _refuse_to_drift(self, tally: Tally) -> None:
        """Stop before the weights change when engine and trainer disagree on what was sampled."""
        if exact():
            refuse_to_differ(tally, self._peers, self.version.number)
        limit = self._parity_stop
        if limit is None:
            return
        seen = parity_metrics(tally, self._peers)
        gap = seen.get("parity_mean_abs", 0.0)
        if not gap <= limit:
            raise ParityError(drifted(seen, self.version.number, limit))


def _refuse(algo: AlgoConfig, temperature: float, reference: TrainModel | None) -> None:
    """Complain about what cannot be trained on."""
    if temperature <= 0:
        raise UsageError(f"--rollout-temperature {temperature} cannot be trained on: it must be above 0.")
    asking = {"--use-kl-loss": algo.use_kl_loss, "--kl-coef": bool(algo.kl_coef)}
    asking["--loss-type dpo_loss"] = algo.loss_type == "dpo_loss"
    flag = next((flag for flag, asked in asking.items() if asked), None)
    if flag is not None and reference is None:
        raise UsageError(f"{flag} needs a reference model; give --ref-load or --hf-checkpoint.")


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over optimizer steps; a learning rate's last value; shares out of counts."""
    names = dict.fromkeys(name for step in steps for name in step)
    out = {name: fmean(step[name] for step in steps if name in step) for name in names}
    out |= {name: steps[-1][name] for name in ("lr", "critic_lr") if name in steps[-1]}
    replayed = out.pop("routing_replayed", 0.0)
    flips = out.pop("routing_flips", 0.0)
    return out | ({"routing_flip_share": flips / replayed} if replayed else {})


def _shared(plan: Sequence[Sequence[Rows]], peers: Peers) -> float:
    """Tokens that were not read again for every sample that begins with them."""
    own = sum(rows.shared for part in plan for rows in part if not rows.idle)
    return float(peers.sum(torch.tensor(float(own), dtype=torch.float64)))


def _of_batch(flats: Sequence[Flat]) -> dict[str, float]:
    worth_R = np.concatenate([f.advantages_N[f.mask_N] for f in flats]).astype(np.float64)
    return {
        "tokens": float(sum(len(f.tokens_N) for f in flats)),
        "train_tokens": float(sum(int(f.length_S.sum()) for f in flats)),
        "trained_tokens": float(len(worth_R)),
        "samples": float(sum(len(f.samples) for f in flats)),
        "advantage_mean": float(worth_R.mean()) if len(worth_R) else 0.0,
        "advantage_std": float(worth_R.std()) if len(worth_R) else 0.0,
    }
