"""Reward model trainer: Bradley-Terry loss over pairs of chosen and rejected responses.

    batch -> global batches (one optimizer step each) -> micro-batches of whole pairs -> gradient -> update

``_T`` packed input tokens, ``_B`` samples (chosen and rejected alternating) of a micro-batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from torch import Tensor

from miles.algo.dpo import BradleyTerryLoss
from miles.cluster.executor import Executor
from miles.core.types import Batch, Sample, StepReport, Version
from miles.train.balance import partition_micro_batches
from miles.train.batch_tensors import group_by_trajectory, pack_sequences
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.grad_accumulation import MetricSums
from miles.train.hooks import NO_TRAIN_HOOKS, TrainHooks
from miles.train.model_protocols import KeptTensors, ScoreModel
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import build_optimizer


@dataclass(frozen=True, slots=True)
class _Pairs:
    """The samples of a micro-batch; an ``idle`` one only keeps a rank in step with the others."""

    samples: Sequence[Sample]
    idle: bool = False


class RewardModelTrainer:
    """Trains ``model``; implements the Trainer protocol. There is no engine to make room for.

    ``steps`` is the number of optimizer steps per batch, ``updates`` that of the whole run (for the LR schedule). Each
    rank of ``dp_group`` trains its part of the batch.
    """

    def __init__(
        self,
        model: ScoreModel,
        *,
        train: TrainConfig,
        steps: int,
        updates: int,
        run: Executor,
        hooks: TrainHooks = NO_TRAIN_HOOKS,
        dp_group: DataParallelGroup = SINGLE_RANK,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.version = Version()
        self._model = model
        self._dp_group = dp_group
        self._train = train
        self._steps = steps
        self._run = run
        self._clock = clock
        self._saver = checkpoint.build_saver(train, torch_dist=train.ckpt_format == "torch_dist")
        self._loss = BradleyTerryLoss()
        trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
        self._optimizer = build_optimizer(trained, train, build_lr_schedule(train, updates=updates), model=model)
        self._hooks = hooks
        if hooks.init is not None:
            hooks.init(model)

    async def step(self, batch: Batch) -> StepReport:
        """Train on ``batch``; the report's version is the new one."""
        return await self._run(lambda: self._step(batch))

    async def save(self, folder: Path) -> None:
        await self._run(
            lambda: checkpoint.save(
                folder, self._model, self._optimizer, self.version, self._dp_group, saver=self._saver
            )
        )

    async def load(self, folder: Path) -> None:
        self.version = await self._run(lambda: checkpoint.load(folder, self._model, self._optimizer, self._dp_group))

    async def sleep(self) -> None:
        """No engine needs the accelerator."""

    async def wake(self) -> None:
        """Nothing was released."""

    def weights(self) -> Mapping[str, Tensor]:
        """Return the live weights by name; the next step changes them in place."""
        return {name: p.detach() for name, p in self._model.parameters().items()}

    def adapters(self) -> None:
        """Return no adapters: an engine has none of a reward model."""

    def draft_weights(self) -> None:
        """Return no draft model: a reward model generates nothing."""

    def _step(self, batch: Batch) -> StepReport:
        started = self._clock()
        pairs = group_by_trajectory(batch.samples)
        size, rest = divmod(len(pairs), self._steps)
        assert not rest and size, f"{len(pairs)} pairs cannot make {self._steps} equal global batches"
        global_batches = [self._split(pairs[start : start + size]) for start in range(0, len(pairs), size)]
        steps = [self._update(batch.step, n, micro_batches, size) for n, micro_batches in enumerate(global_batches)]
        metrics = {name: fmean(step[name] for step in steps) for name in steps[0]} | {"lr": steps[-1]["lr"]}
        metrics |= {"samples": float(len(batch.samples)), "micro_batches": float(sum(map(len, global_batches)))}
        metrics |= {"tokens": float(batch.tokens), "train_tokens": float(batch.tokens)}
        self.version = self.version.next()
        return StepReport(version=self.version, metrics=metrics, seconds={"optimize": self._clock() - started})

    def _update(self, step: int, number: int, micro_batches: Sequence[_Pairs], pairs: int) -> dict[str, float]:
        if self._hooks.before_train_step is not None:
            self._hooks.before_train_step(step, number, self._model, self._optimizer)

        def compute_loss(index: int, score_B: Tensor) -> tuple[Tensor, KeptTensors]:
            output = self._loss(score_B, pairs)
            scale = 0.0 if micro_batches[index].idle else 1.0
            return scale * output.loss, {name: scale * part.detach() for name, part in output.metrics.items()}

        packed = [pack_sequences(each.samples, self._model.device, idle=each.idle) for each in micro_batches]
        sums = MetricSums()
        for kept in self._model.forward_backward_scores(packed, compute_loss):
            for name, part in kept.items():
                sums.add(name, part)
        self._model.finalize_grads()
        grad_norm, lr = self._optimizer.step()
        self._model.after_update()
        return sums.to_floats(self._dp_group) | {"grad_norm": grad_norm, "lr": lr}

    def _split(self, pairs: Sequence[Sequence[Sample]]) -> list[_Pairs]:
        """Return this rank's micro-batches of a global batch; all ranks have the same number."""
        count = self._train.micro_batch_size
        if self._train.use_dynamic_batch_size:
            count = None
        lengths = [sum(map(len, pair)) for pair in pairs]
        bins = partition_micro_batches(
            lengths,
            dp_size=self._dp_group.dp_size,
            budget=self._train.max_tokens_per_gpu,
            cp_size=self._dp_group.cp_size,
            count=None if count is None else max(1, count // 2),
            balanced=self._train.balance_data,
            unit_name="pair",
        )[self._dp_group.dp_rank]
        shortest = pairs[min(range(len(pairs)), key=lengths.__getitem__)]
        return [
            _Pairs([sample for index in indices for sample in pairs[index]]) if indices else _Pairs(shortest, idle=True)
            for indices in bins
        ]
