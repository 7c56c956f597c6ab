"""Parity checks: engine against trainer log-probs, and the bitwise check of ``--parity exact``.

``_R`` trained tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles.algo.logprob_mismatch import mismatch_metrics, sum_mismatch
from miles.core.errors import ParityError
from miles.kernels.numerics import Numerics
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK, DataParallelGroup
from miles.train.grad_accumulation import MetricSums


def accumulate_parity(logp_R: Tensor, rows: MicroBatch, version: int, sums: MetricSums, *, numerics: Numerics) -> None:
    """Compare engine and trainer over the samples that were sampled by the trainer's current weights alone.

    A token after one of older weights was sampled from a KV cache of those weights: no single version gives its
    log-prob. With batch-invariant ``numerics`` what was compared is kept, for ``check_exact_parity``.
    """
    mismatch = sum_mismatch(rows.engine_logp_R, logp_R, rows.oldest_R == version, rows.aggregator())
    for name, value in mismatch.sums.items():
        sums.add(f"parity_{name}", value)
    for name, value in mismatch.maxima.items():
        sums.update_max(f"parity_{name}", value)
    if numerics.batch_invariant:
        sums.compared.append((rows, logp_R))


def parity_metrics(sums: MetricSums, dp_group: DataParallelGroup = SINGLE_RANK) -> dict[str, float]:
    """Return the metrics of all comparisons so far; empty if nothing was compared."""
    totals = {name.removeprefix("parity_"): value for name, value in sums.to_floats(dp_group).items()}
    return {f"parity_{name}": value for name, value in mismatch_metrics(totals).items()}


def format_parity_error(metrics: Mapping[str, float], version: int, limit: float) -> str:
    """Return the error message of a run that stops because engine and trainer log-probs differ too much."""
    return (
        f"after version {version} engine and trainer log-probs differ by {metrics['parity_mean_abs']:.2e} on average "
        f"(maximum {metrics['parity_max_abs']:.2e}), above --parity-stop {limit:g}; the weights were not changed; "
        "run with --dtype float32 to see whether it is rounding, or raise --parity-stop"
    )


def check_exact_parity(sums: MetricSums, dp_group: DataParallelGroup, version: int) -> None:
    """Raise ParityError, naming the token, if any compared log-prob differs; all ranks call at once."""
    if parity_metrics(sums, dp_group).get("parity_max_abs", 0.0) == 0.0:
        return
    prompt, trajectory, position, engine, trainer = _find_largest_gap(sums, dp_group, version)
    raise ParityError(
        f"--parity exact requires equal log-probs, but after version {version} they differ at token {position:.0f} of "
        f"trajectory {trajectory:.0f} of prompt {prompt:.0f}: engine {engine:.9g}, trainer {trainer:.9g}; the weights "
        "were not changed"
    )


def _find_largest_gap(sums: MetricSums, dp_group: DataParallelGroup, version: int) -> list[float]:
    """Return prompt, trajectory, position and both log-probs of the token with the largest gap on any rank."""
    gaps = [_find_local_gap(rows, logp_R, version) for rows, logp_R in sums.compared]
    device = sums.compared[0][1].device if sums.compared else torch.device("cpu")
    largest = max(gaps, key=lambda each: each[0], default=[-1.0] * 6)
    local = torch.tensor(largest, dtype=torch.float64, device=device)
    highest = dp_group.max(local[0].clone())
    rank = torch.where(local[0] == highest, -float(dp_group.dp_rank), -math.inf).to(torch.float64)
    first = -dp_group.max(rank)
    chosen = local[1:] if float(first) == dp_group.dp_rank else torch.zeros_like(local[1:])
    return dp_group.sum(chosen).tolist()


def _find_local_gap(rows: MicroBatch, logp_R: Tensor, version: int) -> list[float]:
    gap_R = (rows.engine_logp_R - logp_R).abs().nan_to_num(math.inf, math.inf)
    gap_R = torch.where(rows.oldest_R == version, gap_R, -1.0)
    index = int(gap_R.argmax())
    position = int(rows.positions_T[rows.before_R[index]]) + 1
    values = (float(rows.engine_logp_R[index]), float(logp_R[index]))
    return [float(gap_R[index]), *rows.sample_ids[int(rows.sample_R[index])], position, *values]
