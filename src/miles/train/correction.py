"""Selects the off-policy correction of a batch's loss: configured, custom, or chosen by the measured parity.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.correction_schedule import (
    CORRECTION_CHOICES,
    CorrectionChoice,
    CorrectionSchedule,
    LogprobGap,
    uses_correction,
)
from miles.algo.importance_sampling import ImportanceSampling, build_correction
from miles.algo.policy_loss import Correction, LossFn, PolicyLoss
from miles.core.errors import ParityError
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.parity_check import format_parity_error


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSelector:
    """``choose`` runs before the updates of a batch, ``correct_loss`` before the first loss of a global batch."""

    algo: AlgoConfig
    schedule: CorrectionSchedule
    custom: Correction | None = None
    dp_group: DataParallelGroup = SINGLE_RANK

    @property
    def active(self) -> bool:
        """Whether the loss is corrected; then old log-probs are the trainer's, also for tokens of older versions."""
        return self.algo.loss_type == "policy_loss" and (self.custom is not None or uses_correction(self.algo))

    @property
    def auto(self) -> bool:
        """Whether the parity decides; then it is measured before the first loss."""
        return self.active and self.custom is None and self.algo.use_tis and self.algo.tis_mode == "auto"

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the old log-probs of a whole global batch are needed before its first loss."""
        return self.auto or (self.active and self.custom is None and self.algo.tis_batch_normalize)

    def choose(self, metrics: Mapping[str, float], version: int, *, stale: bool) -> CorrectionChoice | None:
        """Return the correction chosen by the parity metrics of a batch; None if it is not automatic.

        ``stale``: the batch has tokens of older versions. Raises ParityError above the stop threshold, before
        the weights change.
        """
        if not self.auto:
            return None
        gap = None
        if "parity_mean_abs" in metrics:
            gap = LogprobGap(mean_abs=metrics["parity_mean_abs"], max_abs=metrics["parity_max_abs"])
        choice = self.schedule.choose(gap, stale=stale)
        if choice == "stop":
            raise ParityError(format_parity_error(metrics, version, self.schedule.stop))
        return choice

    def correct_loss(
        self,
        loss_fn: LossFn,
        choice: CorrectionChoice | None,
        micro_batches: Sequence[MicroBatch],
        old_logprobs: Sequence[Tensor | None],
    ) -> LossFn:
        """Return the loss with the correction of one global batch, given as its micro-batches."""
        if not self.active or not isinstance(loss_fn, PolicyLoss):
            return loss_fn
        mode = choice if choice == "truncate" or choice == "icepop" else None
        correction = self.custom or build_correction(self.algo, mode)
        if isinstance(correction, ImportanceSampling) and correction.normalize and micro_batches:
            pairs = zip(micro_batches, old_logprobs, strict=True)
            parts = [_partial_sums(correction, rows, old_logp_R) for rows, old_logp_R in pairs]
            correction = correction.with_batch_mean(self.dp_group.sum(torch.stack(parts).sum(0)))
        return replace(loss_fn, correction=correction)


def correction_metrics(choice: CorrectionChoice | None) -> dict[str, float]:
    """Return the automatic choice as a metric, if there was one."""
    return {} if choice is None else {"tis_auto_mode": float(CORRECTION_CHOICES.index(choice))}


def _partial_sums(correction: ImportanceSampling, rows: MicroBatch, old_logp_R: Tensor | None) -> Tensor:
    assert old_logp_R is not None, "normalised weights need the old log-probs of the whole batch"
    return correction.partial_sums(rows.engine_logp_R, old_logp_R, rows.aggregator())
