"""Draw one token a sequence: its seed and position give one uniform number, the inverse CDF gives the token.

Shapes: B sequences that draw, V vocabulary, F those of them with a filter. All arithmetic is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.native.request import Seats, Sequence
from miles.core.errors import EngineError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How each row is drawn; ``index_B`` is the place of the new token in its response."""

    temperature_B: NDArray[np.float32]
    top_k_B: NDArray[np.int64]
    top_p_B: NDArray[np.float32]
    min_p_B: NDArray[np.float32]
    filters_B: NDArray[np.bool_]
    seed_B: NDArray[np.uint64]
    index_B: NDArray[np.uint64]


def manner_of(sequences: list[Sequence], seats: Seats) -> Manner:
    seats_B = np.array([sequence.seat for sequence in sequences], np.int64)
    return Manner(
        temperature_B=seats.temperature_S[seats_B],
        top_k_B=seats.top_k_S[seats_B],
        top_p_B=seats.top_p_S[seats_B],
        min_p_B=seats.min_p_S[seats_B],
        filters_B=seats.filters_S[seats_B],
        seed_B=seats.seed_S[seats_B],
        index_B=np.array([len(sequence.logprobs) for sequence in sequences], np.uint64),
    )


def uniforms(seed_B: NDArray[np.uint64], index_B: NDArray[np.uint64]) -> NDArray[np.float32]:
    """One number in [0, 1) for each (seed, index): two rounds of a 64-bit mixer, the top 24 bits."""
    with np.errstate(over="ignore"):
        return (_mix(_mix(seed_B + _GOLDEN) + index_B * _GOLDEN) >> np.uint64(40)).astype(np.float32) * np.float32(
            2**-24
        )


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@torch.inference_mode()
def draw(logits_BV: Tensor, manner: Manner) -> tuple[list[int], list[float]]:
    """Tokens and their log-probs under the temperature (1 where it is 0: greedy) before any filter."""
    if len(logits_BV) == 0:
        return [], []
    device = logits_BV.device
    logits_BV = logits_BV.float()
    greedy_B = manner.temperature_B == 0
    heat_B = np.where(greedy_B, np.float32(1), manner.temperature_B)
    if (heat_B != 1).any():
        logits_BV = logits_BV / torch.from_numpy(heat_B).to(device)[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, -1)
    if greedy_B.all():
        tokens_B = logits_BV.argmax(-1)
    else:
        probs_BV = logprobs_BV.exp()
        if manner.filters_B.any():
            _filter(probs_BV, manner)
        tokens_B = invert(probs_BV, torch.from_numpy(uniforms(manner.seed_B, manner.index_B)).to(device))
        if greedy_B.any():
            tokens_B = torch.where(torch.from_numpy(greedy_B).to(device), logits_BV.argmax(-1), tokens_B)
    picked_B = logprobs_BV.gather(1, tokens_B[:, None]).squeeze(1)
    tokens, logprobs = tokens_B.tolist(), picked_B.tolist()
    if not np.isfinite(logprobs).all():
        raise EngineError("the model's logits are not finite: its weights are broken, or too large for their dtype")
    return tokens, logprobs


def invert(probs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulated probability exceeds the uniform number; never one of probability zero."""
    cdf_BV = probs_BV.cumsum(-1)
    target_B1 = uniform_B[:, None] * cdf_BV[:, -1:]
    tokens_B1 = torch.searchsorted(cdf_BV, target_B1, right=True).clamp_(max=probs_BV.shape[1] - 1)
    impossible_B1 = probs_BV.gather(1, tokens_B1) <= 0
    if impossible_B1.any():  # the product, or a parallel sum, was rounded up to the total
        tokens_B1 = torch.where(impossible_B1, probs_BV.argmax(-1, keepdim=True), tokens_B1)
    return tokens_B1.squeeze(1)


def _filter(probs_BV: Tensor, manner: Manner) -> None:
    """Zero what top-k, then top-p, then min-p cut away, in the rows that ask for it."""
    rows = np.flatnonzero(manner.filters_B)
    device = probs_BV.device
    rows_F = torch.from_numpy(rows).to(device)
    probs_BV[rows_F] = filtered(
        probs_BV[rows_F],
        torch.from_numpy(manner.top_k_B[rows]).to(device),
        torch.from_numpy(manner.top_p_B[rows]).to(device),
        torch.from_numpy(manner.min_p_B[rows]).to(device),
    )


def filtered(probs_FV: Tensor, top_k_F: Tensor, top_p_F: Tensor, min_p_F: Tensor) -> Tensor:
    """The k likeliest tokens; of these the fewest that hold the fraction p; of these, none below min-p of the best."""
    sorted_FV, order_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(probs_FV.shape[1], device=probs_FV.device)
    keep_FV = (rank_V < top_k_F[:, None]) | (top_k_F[:, None] <= 0)
    sorted_FV = sorted_FV * keep_FV
    sum_FV = sorted_FV.cumsum(-1)
    keep_FV &= (sum_FV - sorted_FV < top_p_F[:, None] * sum_FV[:, -1:]) | (top_p_F[:, None] >= 1)
    keep_FV &= sorted_FV >= min_p_F[:, None] * sorted_FV[:, :1]
    keep_FV[:, 0] = True
    return torch.zeros_like(probs_FV).scatter_(1, order_FV, sorted_FV * keep_FV)
