"""The trainer: a batch in, a new version of the weights out.

    batch -> global batches (one optimizer step each) -> micro-batches -> gradient -> update

Blocking work goes through ``run``; nothing else here waits.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.table import objective_of, reducer_of
from miles.cluster.local import Run
from miles.core.errors import ParityError, UsageError
from miles.core.types import Batch, Sample, StepReport, Version
from miles.train import checkpoint
from miles.train.config import TrainConfig
from miles.train.optim import Optimizer
from miles.train.rates import schedule_of
from miles.train.roles import TrainModel
from miles.train.rows import Flat, Rows, flatten, trajectories_of
from miles.train.steps import Gradient, Reader, Tally, micro_batches, parity


class Worker:
    """Trains ``actor``; implements the Trainer door.

    ``steps`` optimizer steps are made of each batch, ``updates`` in the whole run (schedules decay over
    them). The policy loss divides logits by ``temperature``, the one the engine samples at. ``reference`` is
    what the KL is measured against.
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
        version: Version | None = None,
        parity_stop: float | None = None,
        offload: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if temperature <= 0:
            raise UsageError(f"--rollout-temperature {temperature} cannot be trained on: it must be above 0.")
        if algo.use_kl_loss and reference is None:
            raise UsageError("--use-kl-loss needs a reference model; give --ref-load or --hf-checkpoint.")
        self.version = version or Version()
        self._actor, self._algo, self._train, self._run, self._clock = actor, algo, train, run, clock
        self._steps = steps
        self._parity_stop = parity_stop
        self._offload = offload and actor.device.type != "cpu"
        self._reducer = reducer_of(algo)
        self._policy_loss = algo.loss_type == "policy_loss"
        self._reader = Reader(temperature=temperature if self._policy_loss else 1.0, chunk=train.log_probs_chunk_size)
        self._gradient = Gradient(actor=actor, reference=reference, objective=objective_of(algo), reader=self._reader)
        trained = {name: p for name, p in actor.parameters().items() if p.requires_grad}
        self._optimizer = Optimizer(trained, train, schedule_of(train, updates=updates))

    async def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``; the report's version is the new one."""
        return await self._run(lambda: self._step(batch))

    async def save(self, folder: Path) -> None:
        await self._run(lambda: checkpoint.save(folder, self._actor, self._optimizer, self.version))

    async def load(self, folder: Path) -> None:
        self.version = await self._run(lambda: checkpoint.load(folder, self._actor, self._optimizer))

    async def sleep(self) -> None:
        """Leave the accelerator to the engine: optimizer state to the host. Weights stay, as they may be shared."""
        if self._offload:
            await self._run(lambda: self._optimizer.move(torch.device("cpu")))

    async def wake(self) -> None:
        if self._offload:
            await self._run(lambda: self._optimizer.move(self._actor.device))

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights by our names: the next step changes them in place."""
        return {name: p.detach() for name, p in self._actor.parameters().items()}

    def _step(self, batch: Batch) -> StepReport:
        began = self._clock()
        flats = self._global_batches(batch.samples)
        replay = self._algo.use_rollout_routing_replay
        plan = [micro_batches(flat, self._train, device=self._actor.device, replay=replay) for flat in flats]
        packed = self._clock()
        olds = self._old_logprobs(flats, plan)
        looked = self._clock()
        tally, floats = Tally(), []
        if batch.probe and self._policy_loss and not self._wrote(flats[0]):
            self._look_at(batch.probe, tally)
        for number, (rows, old) in enumerate(zip(plan, olds, strict=True)):
            floats.append(self._update(rows, old, tally, first=number == 0))
        metrics = _means(floats) | _summed(tally.floats()) | _of_batch(flats)
        metrics["micro_batches"] = float(sum(len(rows) for rows in plan))
        self.version = self.version.next()
        seconds = {"pack": packed - began, "old_logprobs": looked - packed, "optimize": self._clock() - looked}
        return StepReport(version=self.version, metrics=metrics, seconds=seconds)

    def _global_batches(self, samples: Sequence[Sample]) -> list[Flat]:
        """What each optimizer step is made of; trajectories in order and whole."""
        trajectories = trajectories_of(samples)
        size, rest = divmod(len(trajectories), self._steps)
        assert not rest and size, f"{len(trajectories)} trajectories cannot make {self._steps} equal global batches"
        starts = range(0, len(trajectories), size)
        return [flatten(trajectories[start : start + size], self._reducer) for start in starts]

    def _old_logprobs(self, flats: Sequence[Flat], plan: list[list[Rows]]) -> list[list[Tensor | None]]:
        """What the ratio compares with, micro-batch by micro-batch; None is the step's own forward.

        The trainer's own forward is the truer past of its own tokens. It cannot give the past of tokens
        that older weights wrote, so a batch with such tokens takes the engine's word.
        """
        if not self._policy_loss:
            return [[None] * len(rows) for rows in plan]
        theirs = self._algo.use_rollout_logprobs
        if theirs is None:
            theirs = any(bool((f.versions_N[f.mask_N] != self.version.number).any()) for f in flats)
        if theirs:
            return [[r.engine_logp_R for r in rows] for rows in plan]
        if len(plan) == 1:
            return [[None] * len(plan[0])]
        return [[self._reader.frozen(self._actor, r) for r in rows] for rows in plan]

    def _wrote(self, flat: Flat) -> bool:
        """Did the present weights alone write any of its samples?"""
        return bool((flat.oldest_S == self.version.number).any())

    def _look_at(self, samples: Sequence[Sample], tally: Tally) -> None:
        """Compare with the engine on rows that are not trained on: all of a batch's own may be older."""
        flat = flatten([[s] for s in samples], self._reducer)
        replay = self._algo.use_rollout_routing_replay
        for rows in micro_batches(flat, self._train, device=self._actor.device, replay=replay):
            parity(self._reader.frozen(self._actor, rows), rows, self.version.number, tally)

    def _update(self, plan: list[Rows], olds: list[Tensor | None], tally: Tally, *, first: bool) -> dict[str, float]:
        step = Tally()
        for rows, old_logp_R in zip(plan, olds, strict=True):
            logp_R = self._gradient.accumulate(rows, old_logp_R, step)
            if first:
                parity(logp_R, rows, self.version.number, tally)
        if first and self._parity_stop is not None:
            self._refuse_to_drift(_summed(tally.floats()), self._parity_stop)
        grad_norm, lr = self._optimizer.step()
        return step.floats() | {"grad_norm": grad_norm, "lr": lr}

    def _refuse_to_drift(self, seen: Mapping[str, float], limit: float) -> None:
        """Stop before the weights change when engine and trainer disagree on what was sampled."""
        gap = seen.get("parity_mean_abs", 0.0)
        if not gap <= limit:
            raise ParityError(
                f"after version {self.version.number} engine and trainer log-probs differ by {gap:.2e} on average "
                f"(largest {seen['parity_max_abs']:.2e}), above --parity-stop {limit:g}; the weights were not changed; "
                "compare the two planes in float32, or raise --parity-stop"
            )


def _means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over optimizer steps; the learning rate's last value; shares out of counts."""
    names = dict.fromkeys(name for step in steps for name in step)
    out = {name: fmean(step[name] for step in steps if name in step) for name in names}
    out["lr"] = steps[-1]["lr"]
    replayed = out.pop("routing_replayed", 0.0)
    flips = out.pop("routing_flips", 0.0)
    return out | ({"routing_flip_share": flips / replayed} if replayed else {})


def _summed(sums: Mapping[str, float]) -> dict[str, float]:
    tokens = sums.get("parity_tokens", 0.0)
    if not tokens:
        return {}
    return {
        "parity_mean_abs": sums["parity_abs"] / tokens,
        "parity_max_abs": sums["parity_max_abs"],
        "parity_k1": sums["parity_sum"] / tokens,
        "parity_tokens": tokens,
    }


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
