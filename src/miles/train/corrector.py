"""Which correction the loss of a batch gets: the configured one, the user's own, or what its parity calls for.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miles.algo.config import AlgoConfig
from miles.algo.corrections import Importance, correction_of
from miles.algo.ladder import RUNGS, Ladder, Parity, Rung, corrects
from miles.algo.objective import Correction, Objective, PolicyLoss
from miles.core.errors import ParityError
from miles.train.peers import ALONE, Peers
from miles.train.rows import Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Corrector:
    """Asked twice: ``choose`` before the updates of a batch, ``judge`` before the first loss of a global batch."""

    algo: AlgoConfig
    ladder: Ladder
    own: Correction | None = None
    peers: Peers = ALONE

    @property
    def active(self) -> bool:
        """Is anything corrected? Then the old log-probs are the trainer's own, also of what older weights wrote."""
        return self.algo.loss_type == "policy_loss" and (self.own is not None or corrects(self.algo))

    @property
    def auto(self) -> bool:
        """Does the parity decide? Then it is measured before the first loss."""
        return self.active and self.own is None and self.algo.use_tis and self.algo.tis_mode == "auto"

    @property
    def looks_ahead(self) -> bool:
        """Must the old log-probs of a whole global batch be known before its first loss?"""
        return self.auto or (self.active and self.own is None and self.algo.tis_batch_normalize)

    def choose(self, seen: Mapping[str, float], version: int, *, stale: bool) -> Rung | None:
        """The rung the parity metrics of a batch call for; None where nothing is to be decided.

        ``stale``: are there tokens of older weights in it? Raises ParityError where the last rung is reached, before
        the weights change.
        """
        if not self.auto:
            return None
        parity = None
        if "parity_mean_abs" in seen:
            parity = Parity(mean_abs=seen["parity_mean_abs"], max_abs=seen["parity_max_abs"])
        rung = self.ladder.choose(parity, stale=stale)
        if rung == "stop":
            raise ParityError(drifted(seen, version, self.ladder.stop))
        return rung

    def judge(
        self, objective: Objective, rung: Rung | None, rows: Sequence[Rows], olds: Sequence[Tensor | None]
    ) -> Objective:
        """The objective for one global batch, given as its micro-batches, with its correction in place."""
        if not self.active or not isinstance(objective, PolicyLoss):
            return objective
        correction = self.own or correction_of(self.algo, rung if rung == "truncate" or rung == "icepop" else None)
        if isinstance(correction, Importance) and correction.normalize:
            parts = [_part(correction, r, old) for r, old in zip(rows, olds, strict=True)]
            correction = correction.over(self.peers.sum(torch.stack(parts).sum(0))) if parts else correction
        return replace(objective, correction=correction)


def drifted(seen: Mapping[str, float], version: int, limit: float) -> str:
    """Why a run stops when engine and trainer disagree on what was sampled."""
    return (
        f"after version {version} engine and trainer log-probs differ by {seen['parity_mean_abs']:.2e} on average "
        f"(largest {seen['parity_max_abs']:.2e}), above --parity-stop {limit:g}; the weights were not changed; "
        "run it in --dtype float32 to see whether it is rounding, or raise --parity-stop"
    )


def rung_metric(rung: Rung | None) -> dict[str, float]:
    """How high on the ladder a batch stood, if it stood on one."""
    return {} if rung is None else {"tis_rung": float(RUNGS.index(rung))}


def _part(correction: Importance, rows: Rows, old_logp_R: Tensor | None) -> Tensor:
    assert old_logp_R is not None, "the old log-probs of a batch whose weights are normalised are read ahead"
    return correction.parts(rows.engine_logp_R, old_logp_R, rows.layout())
