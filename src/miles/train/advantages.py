"""Batch-level advantages: token returns, GAE and whitening, computed before the first update of a batch.

    token rewards, KL and values -> advantages and returns per sample -> whitened over the whole batch

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from miles.algo.config import TOKEN_LEVEL_ESTIMATORS, AlgoConfig
from miles.algo.policy_loss import KLEstimator
from miles.algo.registry import build_return_estimator, select_kl_estimator
from miles.algo.returns import BatchMoments, ReturnEstimator, compute_token_rewards, explained_variance, whiten
from miles.core.errors import MilesError
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogprobs:
    """A micro-batch (its advantages are the samples' rewards), with log-probs and values before the first update.

    The log-probs are set if the reward has a KL term, the values if there is a critic.
    """

    micro_batch: MicroBatch
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    value_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchWithAdvantages:
    """A micro-batch with its advantages, and the critic's values and returns of its tokens."""

    micro_batch: MicroBatch
    value_R: Tensor | None = None
    return_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageComputer:
    """Computes the advantages of a whole batch on ``device``, of which this rank has a part.

    Without an ``estimator`` tokens keep their advantages.
    """

    estimator: ReturnEstimator | None
    kl_estimator: KLEstimator
    kl_coef: float
    normalize: bool
    dp_group: DataParallelGroup = SINGLE_RANK
    device: torch.device = _CPU

    def __call__(self, inputs: Sequence[BatchLogprobs]) -> tuple[list[BatchWithAdvantages], dict[str, float]]:
        """Return the micro-batches of one batch with advantages, in order, and metrics over all their tokens."""
        if not inputs:
            return [], {}
        metrics: dict[str, Tensor] = {}
        batches = [BatchWithAdvantages(micro_batch=each.micro_batch) for each in inputs]
        if self.estimator is not None:
            batches = self._estimate(inputs, self.estimator, metrics)
        if self.normalize:
            moments = self._reduce_moments(_collect_advantages(batches))
            batches = [_with_advantages(b, whiten(b.micro_batch.advantage_R, moments)) for b in batches]
        _add_moments(metrics, "advantage", self._reduce_moments(_collect_advantages(batches)))
        values = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
        if not all(map(math.isfinite, values.values())):
            raise MilesError(
                "returns or advantages of this batch are not finite, so nothing was trained; check its rewards "
                "and log-probs in the rollout file, and lower --critic-lr if value_loss had been growing."
            )
        return batches, values

    def _estimate(
        self, inputs: Sequence[BatchLogprobs], estimator: ReturnEstimator, metrics: dict[str, Tensor]
    ) -> list[BatchWithAdvantages]:
        kls = [self._compute_kl(each) for each in inputs]
        batches: list[BatchWithAdvantages] = []
        for each, kl_R in zip(inputs, kls, strict=True):
            rows = each.micro_batch
            reward_R = compute_token_rewards(rows.advantage_R, rows.sample_R, kl_R=kl_R, kl_coef=self.kl_coef)
            estimate = estimator(reward_R, each.value_R, rows.sample_R)
            batch = BatchWithAdvantages(micro_batch=rows, value_R=each.value_R, return_R=estimate.return_R)
            batches.append(_with_advantages(batch, estimate.advantage_R))
        if self.kl_coef:
            pairs = zip(inputs, kls, strict=True)
            metrics["reward_kl"] = self._reduce_moments(
                [kl_R for each, kl_R in pairs if kl_R is not None and not each.micro_batch.idle]
            ).mean
        active = [b for b in batches if not b.micro_batch.idle]
        returns = self._reduce_moments([b.return_R for b in active if b.return_R is not None])
        _add_moments(metrics, "return", returns)
        if inputs[0].value_R is not None:
            pairs = [(b.value_R, b.return_R) for b in active if b.value_R is not None and b.return_R is not None]
            metrics["value_mean"] = self._reduce_moments([value_R for value_R, _ in pairs]).mean
            error = self._reduce_moments([return_R - value_R for value_R, return_R in pairs])
            metrics["explained_variance"] = explained_variance(error, returns)
        return batches

    def _reduce_moments(self, parts: Sequence[Tensor]) -> BatchMoments:
        """Return the moments over all tokens of the batch, on all ranks."""
        empty = BatchMoments.from_values(torch.zeros(0, device=self.device))
        local = reduce(add, map(BatchMoments.from_values, parts), empty)
        return BatchMoments.unstack(self.dp_group.sum(local.stack()))

    def _compute_kl(self, inputs: BatchLogprobs) -> Tensor | None:
        if not self.kl_coef:
            return None
        assert inputs.old_logp_R is not None and inputs.ref_logp_R is not None
        return self.kl_estimator(inputs.old_logp_R, inputs.ref_logp_R)


def build_advantage_computer(
    config: AlgoConfig, dp_group: DataParallelGroup = SINGLE_RANK, device: torch.device = _CPU
) -> AdvantageComputer | None:
    """Build the batch-level advantage computation; None if the samples' own advantages are used."""
    token_level = config.advantage_estimator in TOKEN_LEVEL_ESTIMATORS
    if not token_level and not config.normalize_advantages:
        return None
    return AdvantageComputer(
        estimator=build_return_estimator(config) if token_level else None,
        kl_estimator=select_kl_estimator(config),
        kl_coef=config.kl_coef,
        normalize=config.normalize_advantages,
        dp_group=dp_group,
        device=device,
    )


def _collect_advantages(batches: Sequence[BatchWithAdvantages]) -> list[Tensor]:
    return [b.micro_batch.advantage_R for b in batches if not b.micro_batch.idle]


def _with_advantages(batch: BatchWithAdvantages, advantage_R: Tensor) -> BatchWithAdvantages:
    return replace(batch, micro_batch=replace(batch.micro_batch, advantage_R=advantage_R))


def _add_moments(metrics: dict[str, Tensor], name: str, moments: BatchMoments) -> None:
    metrics[f"{name}_mean"] = moments.mean
    metrics[f"{name}_std"] = moments.std
