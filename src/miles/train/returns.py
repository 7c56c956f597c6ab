"""Advantages that need a whole batch, made before its first update from what is known of every token by then.

    reward and KL at tokens, values -> advantages and returns, sample by sample -> whitened over the whole batch

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

from miles.algo.config import TOKEN_RETURNS, AlgoConfig
from miles.algo.objective import Divergence
from miles.algo.returns import Estimator, Moments, explained_variance, rewards, whiten
from miles.algo.table import divergence_of, estimator_of
from miles.core.errors import MilesError
from miles.train.peers import ALONE, Peers
from miles.train.rows import Rows

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a micro-batch before the first update; ``rows`` come with what each sample earned.

    The log-probs are there where the reward has a KL term, the values where there is a critic.
    """

    rows: Rows
    old_logp_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    value_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A micro-batch with its advantages; what the critic had expected at each token, and what came from there on."""

    rows: Rows
    value_R: Tensor | None = None
    return_R: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """How a whole batch on ``device`` is judged, of which this rank has a part among ``peers``.

    Without an ``estimator`` tokens keep what their credit gave them.
    """

    estimator: Estimator | None
    divergence: Divergence
    kl_coef: float
    normalize: bool
    peers: Peers = ALONE
    device: torch.device = _CPU

    def __call__(self, known: Sequence[Known]) -> tuple[list[Judged], dict[str, float]]:
        """The micro-batches of one batch, in order, and metrics over all their tokens."""
        if not known:
            return [], {}
        measured: dict[str, Tensor] = {}
        judged = [Judged(rows=k.rows) for k in known]
        if self.estimator is not None:
            judged = self._estimated(known, self.estimator, measured)
        if self.normalize:
            whole = self._moments(_advantages(judged))
            judged = [replace(j, rows=_given(j.rows, whiten(j.rows.advantage_R, whole))) for j in judged]
        _note(measured, "advantage", self._moments(_advantages(judged)))
        found = dict(zip(measured, torch.stack(list(measured.values())).tolist(), strict=True))
        if not all(map(math.isfinite, found.values())):
            raise MilesError(
                "the returns or advantages of this batch are not all finite; nothing was trained. Look at its rewards "
                "and log-probs in the rollout file, and lower --critic-lr if value_loss had been growing."
            )
        return judged, found

    def _estimated(self, known: Sequence[Known], estimator: Estimator, measured: dict[str, Tensor]) -> list[Judged]:
        kls = [self._kl(k) for k in known]
        judged: list[Judged] = []
        for k, kl_R in zip(known, kls, strict=True):
            earned_R = rewards(k.rows.advantage_R, k.rows.sample_R, kl_R=kl_R, kl_coef=self.kl_coef)
            found = estimator(earned_R, k.value_R, k.rows.sample_R)
            rows = _given(k.rows, found.advantage_R)
            judged.append(Judged(rows=rows, value_R=k.value_R, return_R=found.return_R))
        if self.kl_coef:
            present = [kl_R for k, kl_R in zip(known, kls, strict=True) if kl_R is not None and not k.rows.idle]
            measured["reward_kl"] = self._moments(present).mean
        real = [j for j in judged if not j.rows.idle]
        came = self._moments([j.return_R for j in real if j.return_R is not None])
        _note(measured, "return", came)
        if known[0].value_R is not None:
            told = [(j.value_R, j.return_R) for j in real if j.value_R is not None and j.return_R is not None]
            measured["value_mean"] = self._moments([value_R for value_R, _ in told]).mean
            error = self._moments([return_R - value_R for value_R, return_R in told])
            measured["explained_variance"] = explained_variance(error, came)
        return judged

    def _moments(self, parts: Sequence[Tensor]) -> Moments:
        """Over all tokens of the batch, whoever has them."""
        nothing = Moments.of(torch.zeros(0, device=self.device))
        return Moments.unstack(self.peers.sum(reduce(add, map(Moments.of, parts), nothing).stack()))

    def _kl(self, known: Known) -> Tensor | None:
        if not self.kl_coef:
            return None
        assert known.old_logp_R is not None and known.ref_logp_R is not None
        return self.divergence(known.old_logp_R, known.ref_logp_R)


def returns_of(config: AlgoConfig, peers: Peers = ALONE, device: torch.device = _CPU) -> Returns | None:
    """How a batch is judged as a whole; None where every sample's credit is all there is to it."""
    by_token = config.advantage_estimator in TOKEN_RETURNS
    if not by_token and not config.normalize_advantages:
        return None
    return Returns(
        estimator=estimator_of(config) if by_token else None,
        divergence=divergence_of(config),
        kl_coef=config.kl_coef,
        normalize=config.normalize_advantages,
        peers=peers,
        device=device,
    )


def _advantages(judged: Sequence[Judged]) -> list[Tensor]:
    return [j.rows.advantage_R for j in judged if not j.rows.idle]


def _given(rows: Rows, advantage_R: Tensor) -> Rows:
    return replace(rows, advantage_R=advantage_R)


def _note(measured: dict[str, Tensor], name: str, moments: Moments) -> None:
    measured[f"{name}_mean"] = moments.mean
    measured[f"{name}_std"] = moments.deviation
