"""Attention in torch whose bits depend on a query and its keys alone: every product has one shape, whatever is asked.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value, D and E the same padded, I tiles, b tiles at once, m queries of a tile, n keys of a block; Q some queries of a
span and N their keys.

Positions are taken in chunks from the first of the sequence on, a chunk in blocks, block after block under a running
maximum. Every chunk starts afresh; chunks are joined in ascending order. Keys that are not seen weigh exactly nothing,
and a block in which a query sees none changes nothing of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.exact.attention_spans import Spans, Tiles, lowest, tiles_of
from miles.kernels.terms import Terms

# Positions that are weighed together, and of these the ones that are met at once.
CHUNK, BLOCK = 512, 64
# Tiles of one product, and queries of a tile: a library chooses its way by the shape, so there is but one.
_TILES, _QUERIES = 16, 16
# Channels are filled up to whole vectors of any machine.
_CHANNELS = 16
# The most scores that a backward writes out at once.
_SCORES = 1 << 24


class State(NamedTuple):
    """The highest score so far, the sum of powers under it, and the sum of values so weighted."""

    top_bm1: Tensor
    sum_bm1: Tensor
    out_bmE: Tensor


def plain_attention(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, spans: Spans, terms: Terms, sinks_H: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What every query sees, [T, H, e], and the logarithm of its sum of exponentials, [T, H]."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    heads, groups, values = q_THd.shape[1], k_SGd.shape[1], v_SGe.shape[2]
    out_THe = q_THd.new_empty(len(q_THd), heads, values)
    lse_TH = q_THd.new_empty(len(q_THd), heads, dtype=wide)
    tiles = tiles_of(spans, groups, heads // groups, terms, _QUERIES)
    row_K = None if spans.row_K is None else _sent(spans.row_K, q_THd)
    for first in range(0, len(tiles.end_I), _TILES):
        some = _some(tiles, first)
        state, token_bm, head_bm = _swept(q_THd, k_SGd, v_SGe, row_K, some, terms, wide)
        top_bm1, sum_bm1, out_bmE = state
        if sinks_H is not None:
            sum_bm1 = sum_bm1 + (sinks_H.to(wide)[head_bm].unsqueeze(-1) - top_bm1).exp()
        # Adding zero makes all zeros one zero.
        out_bmE = (out_bmE / sum_bm1 + 0.0).to(q_THd.dtype)
        real_bm = _sent(some.real_Im, q_THd)
        at = token_bm[real_bm], head_bm[real_bm]
        out_THe[at] = out_bmE[..., :values][real_bm]
        lse_TH[at] = (top_bm1 + sum_bm1.log()).squeeze(-1)[real_bm]
    return out_THe, lse_TH


def _some(tiles: Tiles, first: int) -> Tiles:
    """As many tiles as a product has; where there are fewer, the last again, and none of it real."""
    count = min(_TILES, len(tiles.end_I) - first)
    rows = first + np.minimum(np.arange(_TILES), count - 1)
    some = tiles.at(rows)
    some.real_Im[count:] = False
    return some


def _swept(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, row_K: Tensor | None, some: Tiles, terms: Terms, wide: torch.dtype
) -> tuple[State, Tensor, Tensor]:
    """The state of these tiles after all their keys; the queries' tokens and heads."""
    token_bm, head_bm, low_bm, high_bm = (
        _sent(each, q_THd) for each in (some.token_Im, some.head_Im, some.low_Im, some.high_Im)
    )
    group_b1, start_b1, last_b1 = (_sent(x, q_THd)[:, None] for x in (some.group_I, some.start_I, some.end_I - 1))
    q_bmD = _padded(q_THd[token_bm, head_bm], wide)
    place_n = torch.arange(BLOCK, device=q_THd.device)
    begin, end = int(some.begin_I.min()), int(some.end_I.max())
    state = _nothing(q_bmD, v_SGe)
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        part = _nothing(q_bmD, v_SGe)
        for at in range(max(chunk, begin // BLOCK * BLOCK), min(chunk + CHUNK, end), BLOCK):
            key_n = at + place_n
            row_bn = start_b1 + torch.minimum(key_n, last_b1)
            row_bn = row_bn if row_K is None else row_K[row_bn]
            seen_bmn = (key_n >= low_bm[..., None]) & (key_n <= high_bm[..., None])
            k_bnD, v_bnE = _padded(k_SGd[row_bn, group_b1], wide), _padded(v_SGe[row_bn, group_b1], wide)
            part = _met(part, _scores(torch.bmm(q_bmD, k_bnD.mT), terms), seen_bmn, v_bnE, v_SGe.dtype)
        state = _joined(state, part)
    return state, token_bm, head_bm


def _sent(values: NDArray[Any], beside: Tensor) -> Tensor:
    return torch.from_numpy(values).to(beside.device)


def _padded(x: Tensor, wide: torch.dtype) -> Tensor:
    width = -(-x.shape[-1] // _CHANNELS) * _CHANNELS
    x = x.to(wide)
    return x if width == x.shape[-1] else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _scores(product: Tensor, terms: Terms) -> Tensor:
    scores = product * terms.scale
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    return scores


def _nothing(q_bmD: Tensor, v_SGe: Tensor) -> State:
    """The state of queries that have met no key."""
    width = -(-v_SGe.shape[2] // _CHANNELS) * _CHANNELS
    top_bm1 = q_bmD.new_full((*q_bmD.shape[:2], 1), -math.inf)
    return State(top_bm1, torch.zeros_like(top_bm1), q_bmD.new_zeros(*q_bmD.shape[:2], width))


def _met(state: State, score_bmn: Tensor, seen_bmn: Tensor, v_bnE: Tensor, dtype: torch.dtype) -> State:
    """Queries meet the keys of a block. Powers are rounded to the values' dtype before anything is summed."""
    score_bmn = score_bmn.masked_fill(~seen_bmn, -math.inf)
    top_bm1 = torch.maximum(state.top_bm1, score_bmn.amax(-1, keepdim=True))
    under_bm1 = top_bm1.masked_fill(top_bm1 == -math.inf, 0.0)
    power_bmn = (score_bmn - under_bm1).exp_().to(dtype).to(v_bnE.dtype)
    shrink_bm1 = (state.top_bm1 - under_bm1).exp_()
    return State(
        top_bm1,
        state.sum_bm1 * shrink_bm1 + _folded(power_bmn),
        state.out_bmE * shrink_bm1 + torch.bmm(power_bmn, v_bnE),
    )


def _folded(power_bmn: Tensor) -> Tensor:
    """The sum over the keys of a block, halves added to halves."""
    while power_bmn.shape[-1] > 1:
        low, high = power_bmn.chunk(2, -1)
        power_bmn = low + high
    return power_bmn


def _joined(state: State, part: State) -> State:
    """Both as one; who has met nothing leaves the other as it is."""
    top_bm1 = torch.maximum(state.top_bm1, part.top_bm1)
    under_bm1 = top_bm1.masked_fill(top_bm1 == -math.inf, 0.0)
    old_bm1, new_bm1 = (state.top_bm1 - under_bm1).exp_(), (part.top_bm1 - under_bm1).exp_()
    return State(
        top_bm1,
        state.sum_bm1 * old_bm1 + part.sum_bm1 * new_bm1,
        state.out_bmE * old_bm1 + part.out_bmE * new_bm1,
    )


# -- backward -------------------------------------------------------------------------------


def plain_backward(
    grad_THe: Tensor, saved: tuple[Tensor, ...], spans: Spans, terms: Terms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, and each query's share of the gradient of its head's sink, [T, H].

    ``saved`` are queries, keys, values, results and logarithms of sums. Every span has keys of its own. Sums are in
    the order of the queries.
    """
    q_THd, k_SGd, v_SGe, out_THe, lse_TH = saved
    wide = lse_TH.dtype
    delta_TH = (grad_THe.to(wide) * out_THe.to(wide)).sum(-1)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q_THd, k_SGd, v_SGe))
    columns = (spans.first_N, spans.count_N, spans.start_N, spans.keys_N)
    for first, count, start, keys in zip(*(each.tolist() for each in columns), strict=True):
        step = max(1, _SCORES // (q_THd.shape[1] * keys))
        for lo in range(0, count, step):
            hi = min(count, lo + step)
            rows, past = slice(first + lo, first + hi), keys - count
            position_Q = np.arange(past + lo, past + hi)
            low_Q = lowest(position_Q, terms)
            begin, end = int(low_Q.min()), past + hi
            seen = _sent(np.stack((low_Q - begin, position_Q - begin)), q_THd)
            at = slice(start + begin, start + end)
            asked = tuple(x[rows].to(wide) for x in (grad_THe, q_THd, lse_TH, delta_TH))
            dq[rows], dk_N, dv_N = _slice_backward(asked, k_SGd[at].to(wide), v_SGe[at].to(wide), seen, terms)
            dk[at] += dk_N
            dv[at] += dv_N
    return dq.to(q_THd.dtype), dk.to(k_SGd.dtype), dv.to(v_SGe.dtype), delta_TH


def _slice_backward(
    asked: tuple[Tensor, ...], k_NGd: Tensor, v_NGe: Tensor, seen: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Some queries of a span and all keys they see; ``seen`` are the first and the last of each."""
    groups = k_NGd.shape[1]
    grad, q, lse, delta = (x.unflatten(1, (groups, -1)).movedim(0, 2).flatten(1, 2) for x in asked)
    k_GNd, v_GNe = k_NGd.transpose(0, 1), v_NGe.transpose(0, 1)
    share = q.shape[1] // seen.shape[1]
    low_R1, high_R1 = (each.repeat(share)[:, None] for each in seen)
    place_N = torch.arange(len(k_NGd), device=k_NGd.device)
    score_GRN = _scores(q @ k_GNd.mT, terms)
    hidden_RN = (place_N < low_R1) | (place_N > high_R1)
    power_GRN = (score_GRN - lse[..., None]).exp_().masked_fill_(hidden_RN, 0.0)
    slope_GRN = power_GRN * (grad @ v_GNe.mT - delta[..., None])
    if terms.softcap is not None:
        slope_GRN = slope_GRN * (1 - (score_GRN / terms.softcap) ** 2)
    slope_GRN = slope_GRN * terms.scale
    dq_QHd = (slope_GRN @ k_GNd).unflatten(1, (share, -1)).movedim(2, 0).flatten(1, 2)
    return dq_QHd, (slope_GRN.mT @ q).transpose(0, 1), (power_GRN.mT @ grad).transpose(0, 1)


def sink_gradient(sinks_H: Tensor, lse_TH: Tensor, delta_TH: Tensor) -> Tensor:
    """Of sinks: their weight at every query, times how much all that is seen there would rather have it."""
    weight_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()
    return -(weight_TH * delta_TH).sum(0).to(sinks_H.dtype)
