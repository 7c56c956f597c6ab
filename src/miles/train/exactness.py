"""What exact arithmetic promises, held to: both planes say the same of a token to the last bit, or the run stops.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from miles.core.errors import ParityError
from miles.train.peers import Peers
from miles.train.rows import Rows
from miles.train.steps import Tally, parity_metrics


def refuse_to_differ(tally: Tally, peers: Peers, version: int) -> None:
    """Raise ParityError, naming the token, where any that was compared differs; all ranks ask at once."""
    if parity_metrics(tally, peers).get("parity_max_abs", 0.0) == 0.0:
        return
    prompt, attempt, position, engine, trainer = _worst(tally, peers, version)
    raise ParityError(
        f"--parity exact promises equal log-probs, and after version {version} they differ on token {position:.0f} of "
        f"attempt {attempt:.0f} at prompt {prompt:.0f}: engine {engine:.9g}, trainer {trainer:.9g}; the weights were "
        "not changed"
    )


def _worst(tally: Tally, peers: Peers, version: int) -> list[float]:
    """The token that differs most on any rank: its prompt, attempt and position, and what both planes say of it."""
    found = [_worst_of(rows, logp_R, version) for rows, logp_R in tally.compared]
    device = tally.compared[0][1].device if tally.compared else torch.device("cpu")
    best = max(found, key=lambda each: each[0], default=[-1.0] * 6)
    local = torch.tensor(best, dtype=torch.float64, device=device)
    highest = peers.most(local[0].clone())
    first = -peers.most(torch.where(local[0] == highest, -float(peers.part), -math.inf).to(torch.float64))
    told = peers.sum(local[1:] if float(first) == peers.part else torch.zeros_like(local[1:]))
    return told.tolist()


def _worst_of(rows: Rows, logp_R: Tensor, version: int) -> list[float]:
    gap_R = (rows.engine_logp_R - logp_R).abs().nan_to_num(math.inf, math.inf)
    gap_R = torch.where(rows.oldest_R == version, gap_R, -1.0)
    at = int(gap_R.argmax())
    position = int(rows.positions_T[rows.before_R[at]]) + 1
    values = (float(rows.engine_logp_R[at]), float(logp_R[at]))
    return [float(gap_R[at]), *rows.names[int(rows.sample_R[at])], position, *values]
