"""Attention in torch whose bits depend on a query and its keys alone: every product has one shape, whatever is asked.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value, D and E the same padded, I tiles, b tiles at once, m queries of a tile, n keys of a block, R queries that are not
filling; A spans that are alike, Q some queries of each and N their keys.

Positions are taken in chunks from the first of the sequence on, a chunk in blocks, block after block under a running
maximum. Every chunk starts afresh; chunks are joined in ascending order. Keys that are not seen weigh exactly nothing,
and a block in which a query sees none changes nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
# Tiles that are gathered and weighed together; their products and powers are taken _TILES at a time all the same.
_AT_ONCE = 64
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
    for first in range(0, len(tiles.end_I), _AT_ONCE):
        some = _some(tiles, first)
        state, token_bm, head_bm = _swept(q_THd, k_SGd, v_SGe, row_K, some, terms, wide)
        top_bm1, sum_bm1, out_bmE = state
        if sinks_H is not None:
            sum_bm1 = sum_bm1 + _powers(sinks_H.to(wide)[head_bm].unsqueeze(-1) - top_bm1)
        # Adding zero makes all zeros one zero.
        out_bmE = (out_bmE / sum_bm1 + 0.0).to(q_THd.dtype)
        real_R = _sent(np.flatnonzero(some.real_Im), q_THd)
        at_R = (token_bm * heads + head_bm).flatten()[real_R]
        out_THe.view(-1, values).index_copy_(0, at_R, out_bmE.flatten(0, 1)[real_R, :values])
        log_bm1 = torch.cat([part.log() for part in sum_bm1.split(_TILES)])
        lse_TH.view(-1).index_copy_(0, at_R, (top_bm1 + log_bm1).flatten()[real_R])
    return out_THe, lse_TH


def _some(tiles: Tiles, first: int) -> Tiles:
    """The tiles of some whole products; where there are fewer, the last again, and none of it real."""
    count = min(_AT_ONCE, len(tiles.end_I) - first)
    rows = first + np.minimum(np.arange(-(-count // _TILES) * _TILES), count - 1)
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
    low_bm1, high_bm1 = low_bm[..., None] if some.low_Im.any() else None, high_bm[..., None]
    keys, values = (_Rows(x, len(group_b1), wide) for x in (k_SGd, v_SGe))
    state = None
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        part = None
        for at in range(max(chunk, begin // BLOCK * BLOCK), min(chunk + CHUNK, end), BLOCK):
            key_n = at + place_n
            row_bn = start_b1 + torch.minimum(key_n, last_b1)
            row_bn = row_bn if row_K is None else row_K[row_bn]
            hidden_bmn = key_n > high_bm1
            if low_bm1 is not None:
                hidden_bmn |= key_n < low_bm1
            # Laid out as the product reads it: some libraries are many times slower where they turn a matrix round.
            product_bmn = _products(q_bmD, keys.at(row_bn, group_b1).mT.contiguous())
            part = _met(part, _scores(product_bmn, terms), hidden_bmn, values.at(row_bn, group_b1), v_SGe.dtype)
        assert part is not None
        state = part if state is None else _joined(state, part)
    assert state is not None
    return state, token_bm, head_bm


class _Rows:
    """Rows of keys or values, gathered block by block, their channels filled up with zeros."""

    def __init__(self, x_SGd: Tensor, tiles: int, wide: torch.dtype) -> None:
        self._flat, (_, self._groups, self._width) = x_SGd.reshape(-1, x_SGd.shape[2]), x_SGd.shape
        width = -(-self._width // _CHANNELS) * _CHANNELS
        self._filled_bnD = x_SGd.new_zeros(tiles, BLOCK, width, dtype=wide)

    def at(self, row_bn: Tensor, group_b1: Tensor) -> Tensor:
        """These rows of these heads; what was given before is overwritten."""
        taken = self._flat.index_select(0, (row_bn * self._groups + group_b1).flatten())
        self._filled_bnD[..., : self._width] = taken.view(*row_bn.shape, -1)
        return self._filled_bnD


def _sent(values: NDArray[Any], beside: Tensor) -> Tensor:
    return torch.from_numpy(values).to(beside.device)


def _padded(x: Tensor, wide: torch.dtype) -> Tensor:
    width = -(-x.shape[-1] // _CHANNELS) * _CHANNELS
    x = x.to(wide)
    return x if width == x.shape[-1] else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _scores(product: Tensor, terms: Terms) -> Tensor:
    scores = product * terms.scale
    if terms.softcap is not None:
        scores = torch.cat([part.tanh() for part in (scores / terms.softcap).split(_TILES)]) * terms.softcap
    return scores


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Tile by tile, always as many at a time."""
    out = a.new_empty(*a.shape[:2], b.shape[2])
    for parts in zip(a.split(_TILES), b.split(_TILES), out.split(_TILES), strict=True):
        torch.bmm(parts[0], parts[1], out=parts[2])
    return out


def _powers(x: Tensor) -> Tensor:
    """The exponential of every element, in place, as many at a time as a product has tiles."""
    for part in x.split(_TILES):
        part.exp_()
    return x


def _met(state: State | None, score_bmn: Tensor, hidden_bmn: Tensor, v_bnE: Tensor, dtype: torch.dtype) -> State:
    """Queries meet the keys of a block. Powers are rounded to the values' dtype before anything is summed."""
    score_bmn = score_bmn.masked_fill_(hidden_bmn, -math.inf)
    top_bm1 = score_bmn.amax(-1, keepdim=True)
    if state is not None:
        top_bm1 = torch.maximum(state.top_bm1, top_bm1)
    under_bm1 = top_bm1.masked_fill(top_bm1 == -math.inf, 0.0)
    power_bmn = _powers(score_bmn.sub_(under_bm1)).to(dtype).to(v_bnE.dtype)
    sum_bm1, out_bmE = _folded(power_bmn), _products(power_bmn, v_bnE)
    if state is not None:
        shrink_bm1 = _powers(state.top_bm1 - under_bm1)
        sum_bm1, out_bmE = state.sum_bm1 * shrink_bm1 + sum_bm1, state.out_bmE * shrink_bm1 + out_bmE
    return State(top_bm1, sum_bm1, out_bmE)


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
    old_bm1, new_bm1 = _powers(state.top_bm1 - under_bm1), _powers(part.top_bm1 - under_bm1)
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
    heads = q_THd.shape[1]
    for count, keys, chosen in _alike(spans, heads):
        step = max(1, _SCORES // (heads * keys))
        for lo in range(0, count, step):
            hi, past = min(count, lo + step), keys - count
            position_Q = np.arange(past + lo, past + hi)
            low_Q = lowest(position_Q, terms)
            begin, end = int(low_Q.min()), past + hi
            seen = _sent(np.stack((low_Q - begin, position_Q - begin)), q_THd)
            rows = _sent(spans.first_N[chosen][:, None] + np.arange(lo, hi), q_THd)
            at = _sent(spans.start_N[chosen][:, None] + np.arange(begin, end), q_THd)
            asked = tuple(x[rows].to(wide) for x in (grad_THe, q_THd, lse_TH, delta_TH))
            dq[rows], dk_AN, dv_AN = _slice_backward(asked, k_SGd[at].to(wide), v_SGe[at].to(wide), seen, terms)
            dk[at] += dk_AN
            dv[at] += dv_AN
    return dq.to(q_THd.dtype), dk.to(k_SGd.dtype), dv.to(v_SGe.dtype), delta_TH


def _alike(spans: Spans, heads: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Spans of as many queries and keys, as many at once as their scores permit; they have no key in common."""
    sizes_N2, place_N = np.unique(np.stack((spans.count_N, spans.keys_N), 1), axis=0, return_inverse=True)
    for number, (count, keys) in enumerate(sizes_N2.tolist()):
        same = np.flatnonzero(place_N.reshape(-1) == number)
        most = max(1, _SCORES // (heads * count * keys))
        for first in range(0, len(same), most):
            yield count, keys, same[first : first + most]


def _slice_backward(
    asked: tuple[Tensor, ...], k_ANGd: Tensor, v_ANGe: Tensor, seen: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Some queries of spans that are alike, and all keys they see; ``seen`` are the first and the last of each."""
    groups, places = k_ANGd.shape[2], seen.shape[1]
    grad, q, lse, delta = (x.unflatten(2, (groups, -1)).movedim(1, 3).flatten(2, 3) for x in asked)
    k_AGNd, v_AGNe = k_ANGd.transpose(1, 2).contiguous(), v_ANGe.transpose(1, 2).contiguous()
    share = q.shape[2] // places
    low_R1, high_R1 = (each.repeat(share)[:, None] for each in seen)
    place_N = torch.arange(k_ANGd.shape[1], device=k_ANGd.device)
    score_AGRN = _scores(q @ k_AGNd.mT, terms)
    hidden_RN = (place_N < low_R1) | (place_N > high_R1)
    power_AGRN = (score_AGRN - lse[..., None]).exp_().masked_fill_(hidden_RN, 0.0)
    slope_AGRN = power_AGRN * (grad @ v_AGNe.mT - delta[..., None])
    if terms.softcap is not None:
        slope_AGRN = slope_AGRN * (1 - (score_AGRN / terms.softcap) ** 2)
    slope_AGRN = slope_AGRN * terms.scale
    dq_AQHd = (slope_AGRN @ k_AGNd).unflatten(2, (share, places)).movedim(3, 1).flatten(2, 3)
    return dq_AQHd, (slope_AGRN.mT @ q).transpose(1, 2), (power_AGRN.mT @ grad).transpose(1, 2)


def sink_gradient(sinks_H: Tensor, lse_TH: Tensor, delta_TH: Tensor) -> Tensor:
    """Of sinks: their weight at every query, times how much all that is seen there would rather have it."""
    weight_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()
    return -(weight_TH * delta_TH).sum(0).to(sinks_H.dtype)
