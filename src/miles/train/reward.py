"""The trainer of a reward model: pairs of replies in, a model out that scores the chosen ones higher.

    batch -> global batches (one optimizer step each) -> micro-batches of whole pairs -> gradient -> update

``_T`` packed input tokens, ``_B`` samples (a chosen and a rejected one in turn) of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from miles.algo.preference import BradleyTerry
from miles.cluster.local import Run
from miles.core.types import Batch, Sample, StepReport, Version
from miles.train import checkpoint
from miles.train.config import TrainConfig
from miles.train.hooks import NO_HOOKS, Hooks
from miles.train.optim import optimizer_of
from miles.train.pack import by_count, by_tokens
from miles.train.rates import schedule_of
from miles.train.roles import ScoreModel
from miles.train.rows import trajectories_of
from miles.train.steps import Tally


class RewardTrainer:
    """Trains ``model``; implements the Trainer door. There is no engine to make room for.

    ``steps`` optimizer steps are made of each batch, ``updates`` in the whole run (schedules decay over them).
    """

    def __init__(
        self,
        model: ScoreModel,
        *,
        train: TrainConfig,
        steps: int,
        updates: int,
        run: Run,
        hooks: Hooks = NO_HOOKS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.version = Version()
        self._model, self._train, self._steps, self._run, self._clock = model, train, steps, run, clock
        self._saving = checkpoint.saving_of(train)
        self._loss = BradleyTerry()
        trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
        self._optimizer = optimizer_of(trained, train, schedule_of(train, updates=updates), model=model)
        self._hooks = hooks
        if hooks.init is not None:
            hooks.init(model)

    async def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``; the report's version is the new one."""
        return await self._run(lambda: self._step(batch))

    async def save(self, folder: Path) -> None:
        await self._run(
            lambda: checkpoint.save(folder, self._model, self._optimizer, self.version, saving=self._saving)
        )

    async def load(self, folder: Path) -> None:
        self.version = await self._run(lambda: checkpoint.load(folder, self._model, self._optimizer))

    async def sleep(self) -> None:
        """Nothing waits for the accelerator."""

    async def wake(self) -> None:
        """Nothing was given away."""

    def weights(self) -> Mapping[str, Tensor]:
        """The live weights by our names: the next step changes them in place."""
        return {name: p.detach() for name, p in self._model.parameters().items()}

    def _step(self, batch: Batch) -> StepReport:
        began = self._clock()
        pairs = trajectories_of(batch.samples)
        size, rest = divmod(len(pairs), self._steps)
        assert not rest and size, f"{len(pairs)} pairs cannot make {self._steps} equal global batches"
        cuts = [list(self._micro_batches(pairs[at : at + size])) for at in range(0, len(pairs), size)]
        floats = [self._update(batch.step, number, parts, size) for number, parts in enumerate(cuts)]
        metrics = {name: fmean(step[name] for step in floats) for name in floats[0]} | {"lr": floats[-1]["lr"]}
        metrics |= {"samples": float(len(batch.samples)), "micro_batches": float(sum(map(len, cuts)))}
        metrics |= {"tokens": float(batch.tokens), "train_tokens": float(batch.tokens)}
        self.version = self.version.next()
        return StepReport(version=self.version, metrics=metrics, seconds={"optimize": self._clock() - began})

    def _update(self, step: int, number: int, parts: Sequence[list[Sample]], pairs: int) -> dict[str, float]:
        if self._hooks.before_train_step is not None:
            self._hooks.before_train_step(step, number, self._model, self._optimizer)
        tally = Tally()
        for samples in parts:
            terms = self._loss(self._scores(samples), pairs)
            terms.loss.backward()
            for name, part in terms.metrics.items():
                tally.add(name, part)
        self._model.settle()
        grad_norm, lr = self._optimizer.step()
        self._model.updated()
        return tally.floats() | {"grad_norm": grad_norm, "lr": lr}

    def _micro_batches(self, pairs: Sequence[Sequence[Sample]]) -> Iterator[list[Sample]]:
        count = self._train.micro_batch_size
        if count is not None and not self._train.use_dynamic_batch_size:
            bins = by_count(len(pairs), max(1, count // 2))
        else:
            bins = by_tokens([sum(map(len, pair)) for pair in pairs], self._train.max_tokens_per_gpu, "pair")
        for chosen in bins:
            yield [sample for at in chosen for sample in pairs[at]]

    def _scores(self, samples: Sequence[Sample]) -> Tensor:
        device, lengths = self._model.device, tuple(len(s) for s in samples)
        tokens_T = torch.from_numpy(np.concatenate([s.tokens for s in samples])).to(device, torch.int64)
        positions_T = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths])).to(device, torch.int64)
        return self._model.scores(tokens_T, positions_T, lengths)
