"""Batch-invariant attention in torch: every matmul has one shape, so the bits depend on a query and its keys alone.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value, D and E the same padded, I tiles, b tiles at once, m queries of a tile, n keys of a block, R queries that are not
padding; A spans of equal size, Q some queries of each and N their keys.

Positions are processed in chunks from the start of the sequence, a chunk in blocks, with an online softmax. Every chunk
starts afresh; chunks are merged in ascending order. Masked keys have exactly zero weight, and a block in which a query
sees nothing leaves its state unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.params import AttentionParams
from miles.kernels.batch_invariant.attention_metadata import (
    AttentionSpans,
    QueryTiles,
    Selection,
    build_query_tiles,
    first_visible,
)

# Positions of a chunk, and of a block.
CHUNK, BLOCK = 512, 64
# Tiles of one matmul, and queries of a tile: a library selects its kernel by the shape, so there is only one.
_TILES, _QUERIES = 16, 16
# Tiles that are gathered together; their matmuls and exponentials are still computed _TILES at a time.
_TILES_AT_ONCE = 64
# Channels are padded to whole SIMD vectors of any machine.
_CHANNEL_MULTIPLE = 16
# The most scores that a backward materializes at once.
_MAX_SCORES = 1 << 24


class TileBias(Protocol):
    """What is added to scores, by how far a key is behind its query."""

    def __call__(self, token_bm: Tensor, head_bm: Tensor, /) -> Callable[[Tensor], Tensor]:
        """Return what maps the distances of keys, [b, m, n], to what is added for these queries."""
        ...


class SliceBias(Protocol):
    """What is added to scores in backward, and its gradient; ``extent`` is the number of distances."""

    @property
    def extent(self) -> int: ...

    def compute(self, rows_AQ: Tensor, distance_QN: Tensor, groups: int, /) -> Tensor:
        """Return what was added to the scores of these queries, [A, G, R, N]."""
        ...

    def accumulate(self, rows_AQ: Tensor, distance_QN: Tensor, grad_AGRN: Tensor, /) -> None:
        """Add the gradient of these scores."""
        ...


class SoftmaxState(NamedTuple):
    """The largest score so far, the sum of exponentials relative to it, and the sum of values so weighted."""

    max_bm1: Tensor
    sum_bm1: Tensor
    out_bmE: Tensor


def reference_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    spans: AttentionSpans,
    params: AttentionParams,
    sinks_H: Tensor | None = None,
    selection: Selection | None = None,
    bias: TileBias | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query, [T, H, e], and its log-sum-exp, [T, H].

    With a ``selection`` a query attends only to these positions of its span. ``bias`` is added to scaled scores; each
    query then attends up to its own position.
    """
    assert bias is None or spans.ends_T is None, "attention with a position bias is causal"
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    heads, groups, values = q_THd.shape[1], k_SGd.shape[1], v_SGe.shape[2]
    out_THe = q_THd.new_empty(len(q_THd), heads, values)
    lse_TH = q_THd.new_empty(len(q_THd), heads, dtype=wide)
    tiles = build_query_tiles(spans, groups, heads // groups, params, _QUERIES)
    row_K = None if spans.row_K is None else _to_device(spans.row_K, q_THd)
    for first in range(0, len(tiles.end_I), _TILES_AT_ONCE):
        tiles_b = _select_tiles(tiles, first)
        restrictions = (params, wide, selection, bias)
        state, token_bm, head_bm = _attend_tiles(q_THd, k_SGd, v_SGe, row_K, tiles_b, *restrictions)
        max_bm1, sum_bm1, out_bmE = state
        if sinks_H is not None:
            sum_bm1 = sum_bm1 + _exp_tiles(sinks_H.to(wide)[head_bm].unsqueeze(-1) - max_bm1)
        # Adding zero turns negative zeros into positive ones.
        out_bmE = (out_bmE / sum_bm1 + 0.0).to(q_THd.dtype)
        real_R = _to_device(np.flatnonzero(tiles_b.real_Im), q_THd)
        at_R = (token_bm * heads + head_bm).flatten()[real_R]
        out_THe.view(-1, values).index_copy_(0, at_R, out_bmE.flatten(0, 1)[real_R, :values])
        log_bm1 = torch.cat([chunk_state.log() for chunk_state in sum_bm1.split(_TILES)])
        lse_TH.view(-1).index_copy_(0, at_R, (max_bm1 + log_bm1).flatten()[real_R])
    return out_THe, lse_TH


def _select_tiles(tiles: QueryTiles, first: int) -> QueryTiles:
    """Tiles for whole matmuls; missing ones repeat the last tile and are not real."""
    count = min(_TILES_AT_ONCE, len(tiles.end_I) - first)
    rows = first + np.minimum(np.arange(-(-count // _TILES) * _TILES), count - 1)
    tiles_b = tiles.select(rows)
    tiles_b.real_Im[count:] = False
    return tiles_b


def _attend_tiles(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    row_K: Tensor | None,
    tiles_b: QueryTiles,
    params: AttentionParams,
    wide: torch.dtype,
    selection: Selection | None,
    bias: TileBias | None,
) -> tuple[SoftmaxState, Tensor, Tensor]:
    """The state of these tiles after all their keys; the queries' tokens and heads."""
    token_bm, head_bm, low_bm, high_bm = (
        _to_device(each, q_THd) for each in (tiles_b.token_Im, tiles_b.head_Im, tiles_b.low_Im, tiles_b.high_Im)
    )
    group_b1, start_b1, last_b1 = (
        _to_device(x, q_THd)[:, None] for x in (tiles_b.group_I, tiles_b.start_I, tiles_b.end_I - 1)
    )
    q_bmD = pad_channels(q_THd[token_bm, head_bm], wide)
    offset_n = torch.arange(BLOCK, device=q_THd.device)
    begin, end = int(tiles_b.begin_I.min()), int(tiles_b.end_I.max())
    low_bm1, high_bm1 = low_bm[..., None] if tiles_b.low_Im.any() else None, high_bm[..., None]
    keys, values = (_RowGatherer(x, len(group_b1), wide) for x in (k_SGd, v_SGe))
    read_bias = None if bias is None else bias(token_bm, head_bm)
    state = None
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        chunk_state = None
        for keys_AN in range(max(chunk, begin // BLOCK * BLOCK), min(chunk + CHUNK, end), BLOCK):
            key_n = keys_AN + offset_n
            row_bn = start_b1 + torch.minimum(key_n, last_b1)
            row_bn = row_bn if row_K is None else row_K[row_bn]
            hidden_bmn = key_n > high_bm1
            if low_bm1 is not None:
                hidden_bmn |= key_n < low_bm1
            if selection is not None:
                hidden_bmn |= ~_read_selection(selection, key_n, token_bm, group_b1)
            # Contiguous: some libraries are many times slower with a transposed operand.
            score_bmn = _scores(matmul_tiles(q_bmD, keys.gather(row_bn, group_b1).mT.contiguous()), params)
            if read_bias is not None:
                score_bmn += read_bias(high_bm1 - key_n)
            chunk_state = _attend_block(
                chunk_state, score_bmn, hidden_bmn, values.gather(row_bn, group_b1), v_SGe.dtype
            )
        assert chunk_state is not None
        state = chunk_state if state is None else _merge_states(state, chunk_state)
    assert state is not None
    return state, token_bm, head_bm


def _read_selection(selection: Selection, key_n: Tensor, token_bm: Tensor, group_b1: Tensor) -> Tensor:
    """Whether the queries of these tiles select each of these positions, [b, m, n]."""
    units_TXU, size = selection
    unit_n = torch.div(key_n, size, rounding_mode="floor").clamp_(max=units_TXU.shape[2] - 1)
    group_b1 = group_b1 if units_TXU.shape[1] > 1 else torch.zeros_like(group_b1)
    return units_TXU.index_select(2, unit_n)[token_bm, group_b1]


class _RowGatherer:
    """Rows of keys or values, gathered block by block, with zero-padded channels."""

    def __init__(self, x_SGd: Tensor, tiles: int, wide: torch.dtype) -> None:
        self._flat, (_, self._groups, self._width) = x_SGd.reshape(-1, x_SGd.shape[2]), x_SGd.shape
        width = -(-self._width // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE
        self._filled_bnD = x_SGd.new_zeros(tiles, BLOCK, width, dtype=wide)

    def gather(self, row_bn: Tensor, group_b1: Tensor) -> Tensor:
        """These rows of these heads; overwrites the tensor returned before."""
        rows = self._flat.index_select(0, (row_bn * self._groups + group_b1).flatten())
        self._filled_bnD[..., : self._width] = rows.view(*row_bn.shape, -1)
        return self._filled_bnD


def _to_device(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)


def pad_channels(x: Tensor, wide: torch.dtype) -> Tensor:
    """The channels in the ``wide`` dtype, zero-padded to whole SIMD vectors."""
    width = -(-x.shape[-1] // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE
    x = x.to(wide)
    return x if width == x.shape[-1] else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _scores(dot: Tensor, params: AttentionParams) -> Tensor:
    scores = dot * params.scale
    if params.softcap is not None:
        scores = (
            torch.cat([chunk_state.tanh() for chunk_state in (scores / params.softcap).split(_TILES)]) * params.softcap
        )
    return scores


def matmul_tiles(a: Tensor, b: Tensor) -> Tensor:
    """bmm, always _TILES at a time."""
    out = a.new_empty(*a.shape[:2], b.shape[2])
    for parts in zip(a.split(_TILES), b.split(_TILES), out.split(_TILES), strict=True):
        torch.bmm(parts[0], parts[1], out=parts[2])
    return out


def tile_rows(x_RD: Tensor) -> Tensor:
    """Rows as tiles for ``matmul_tiles``, [b, m, D]; missing ones are zero."""
    rows = _TILES * _QUERIES
    padded_RD = torch.nn.functional.pad(x_RD, (0, 0, 0, -len(x_RD) % rows))
    return padded_RD.unflatten(0, (-1, _QUERIES))


def _exp_tiles(x: Tensor) -> Tensor:
    """exp of every element, in place, _TILES at a time."""
    for chunk_state in x.split(_TILES):
        chunk_state.exp_()
    return x


def _attend_block(
    state: SoftmaxState | None, score_bmn: Tensor, hidden_bmn: Tensor, v_bnE: Tensor, dtype: torch.dtype
) -> SoftmaxState:
    """Attend to a block. Exponentials are rounded to the values' dtype before anything is summed."""
    score_bmn = score_bmn.masked_fill_(hidden_bmn, -math.inf)
    max_bm1 = score_bmn.amax(-1, keepdim=True)
    if state is not None:
        max_bm1 = torch.maximum(state.max_bm1, max_bm1)
    finite_max_bm1 = max_bm1.masked_fill(max_bm1 == -math.inf, 0.0)
    p_bmn = _exp_tiles(score_bmn.sub_(finite_max_bm1)).to(dtype).to(v_bnE.dtype)
    sum_bm1, out_bmE = _halving_sum(p_bmn), matmul_tiles(p_bmn, v_bnE)
    if state is not None:
        rescale_bm1 = _exp_tiles(state.max_bm1 - finite_max_bm1)
        sum_bm1, out_bmE = state.sum_bm1 * rescale_bm1 + sum_bm1, state.out_bmE * rescale_bm1 + out_bmE
    return SoftmaxState(max_bm1, sum_bm1, out_bmE)


def _halving_sum(p_bmn: Tensor) -> Tensor:
    """The sum over the keys of a block, halves added to halves."""
    while p_bmn.shape[-1] > 1:
        low, high = p_bmn.chunk(2, -1)
        p_bmn = low + high
    return p_bmn


def _merge_states(state: SoftmaxState, chunk_state: SoftmaxState) -> SoftmaxState:
    """Merge two states; an empty one leaves the other unchanged."""
    max_bm1 = torch.maximum(state.max_bm1, chunk_state.max_bm1)
    finite_max_bm1 = max_bm1.masked_fill(max_bm1 == -math.inf, 0.0)
    old_weight_bm1, new_weight_bm1 = (
        _exp_tiles(state.max_bm1 - finite_max_bm1),
        _exp_tiles(chunk_state.max_bm1 - finite_max_bm1),
    )
    return SoftmaxState(
        max_bm1,
        state.sum_bm1 * old_weight_bm1 + chunk_state.sum_bm1 * new_weight_bm1,
        state.out_bmE * old_weight_bm1 + chunk_state.out_bmE * new_weight_bm1,
    )


# -- backward -------------------------------------------------------------------------------


def reference_attention_backward(
    grad_THe: Tensor,
    saved: tuple[Tensor, ...],
    spans: AttentionSpans,
    params: AttentionParams,
    selection: Selection | None = None,
    bias: SliceBias | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, and the dot products of gradient and output, [T, H].

    ``saved`` are queries, keys, values, outputs and log-sum-exps. Every span has keys of its own. Sums are in the order
    of the queries.
    """
    q_THd, k_SGd, v_SGe, out_THe, lse_TH = saved
    wide = lse_TH.dtype
    delta_TH = (grad_THe.to(wide) * out_THe.to(wide)).sum(-1)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=wide) for x in (q_THd, k_SGd, v_SGe))
    heads, groups = q_THd.shape[1], k_SGd.shape[1]
    least = 1 if bias is None else bias.extent
    for count, keys, span_A in _group_equal_spans(spans, heads, least):
        step = max(1, _MAX_SCORES // (heads * max(keys, least)))
        for lo in range(0, count, step):
            hi, past = min(count, lo + step), keys - count
            position_Q = np.arange(past + lo, past + hi)
            low_Q, high_Q = first_visible(position_Q, params), position_Q
            if spans.ends_T is not None:
                high_Q = spans.ends_T[spans.first_N[span_A[0]] + np.arange(lo, hi)] - 1
            begin, end = int(low_Q.min()), int(high_Q.max()) + 1
            visible = _to_device(np.stack((low_Q - begin, high_Q - begin)), q_THd)
            rows = _to_device(spans.first_N[span_A][:, None] + np.arange(lo, hi), q_THd)
            keys_AN = _to_device(spans.start_N[span_A][:, None] + np.arange(begin, end), q_THd)
            query_tensors = tuple(x[rows].to(wide) for x in (grad_THe, q_THd, lse_TH, delta_TH))
            selected_AQXN = None
            if selection is not None:
                unit_N = torch.arange(begin, end, device=q_THd.device).div_(selection.size, rounding_mode="floor")
                selected_AQXN = selection.units_TXU[rows].index_select(3, unit_N)
            distance_QN = bias_AGRN = None
            if bias is not None:
                distance_QN = visible[1][:, None] - torch.arange(end - begin, device=q_THd.device)
                bias_AGRN = bias.compute(rows, distance_QN, groups)
            kv = k_SGd[keys_AN].to(wide), v_SGe[keys_AN].to(wide)
            dq[rows], dk_AN, dv_AN, ds_AGRN = _slice_backward(
                query_tensors, *kv, visible, params, selected_AQXN, bias_AGRN
            )
            if bias is not None and distance_QN is not None:
                bias.accumulate(rows, distance_QN, ds_AGRN)
            dk[keys_AN] += dk_AN
            dv[keys_AN] += dv_AN
    return dq.to(q_THd.dtype), dk.to(k_SGd.dtype), dv.to(v_SGe.dtype), delta_TH


def _group_equal_spans(spans: AttentionSpans, heads: int, least: int) -> Iterator[tuple[int, int, NDArray[np.int64]]]:
    """Spans with equal numbers of queries and keys, as many at once as their scores permit; they share no key.

    A query has ``least`` scores at least.

    If queries attend beyond their own position, which differs from span to span, each span is alone.
    """
    sizes_N2, offset_N = np.unique(np.stack((spans.count_N, spans.keys_N), 1), axis=0, return_inverse=True)
    for number, (count, keys) in enumerate(sizes_N2.tolist()):
        equal = np.flatnonzero(offset_N.reshape(-1) == number)
        max_spans = max(1, _MAX_SCORES // (heads * count * max(keys, least))) if spans.ends_T is None else 1
        for first in range(0, len(equal), max_spans):
            yield count, keys, equal[first : first + max_spans]


def _slice_backward(
    query_tensors: tuple[Tensor, ...],
    k_ANGd: Tensor,
    v_ANGe: Tensor,
    visible: Tensor,
    params: AttentionParams,
    selected_AQXN: Tensor | None,
    bias_AGRN: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some queries of spans of equal size, and all keys they see, from the first to the last of ``visible``.

    Returns the gradients of queries, keys and values, and of the scores that ``bias_AGRN`` was added to.
    """
    groups, queries = k_ANGd.shape[2], visible.shape[1]
    grad, q, lse, delta = (x.unflatten(2, (groups, -1)).movedim(1, 3).flatten(2, 3) for x in query_tensors)
    k_AGNd, v_AGNe = k_ANGd.transpose(1, 2).contiguous(), v_ANGe.transpose(1, 2).contiguous()
    queries_per_kv = q.shape[2] // queries
    low_R1, high_R1 = (each.repeat(queries_per_kv)[:, None] for each in visible)
    offset_N = torch.arange(k_ANGd.shape[1], device=k_ANGd.device)
    score_AGRN = _scores(q @ k_AGNd.mT, params)
    if bias_AGRN is not None:
        score_AGRN = score_AGRN + bias_AGRN
    hidden = (offset_N < low_R1) | (offset_N > high_R1)
    if selected_AQXN is not None:
        hidden = hidden | ~selected_AQXN.transpose(1, 2).repeat(1, 1, queries_per_kv, 1)
    p_AGRN = (score_AGRN - lse[..., None]).exp_().masked_fill_(hidden, 0.0)
    ds_AGRN = p_AGRN * (grad @ v_AGNe.mT - delta[..., None])
    if params.softcap is not None:
        ds_AGRN = ds_AGRN * (1 - (score_AGRN / params.softcap) ** 2)
    dot_AGRN = ds_AGRN * params.scale
    dq_AQHd = (dot_AGRN @ k_AGNd).unflatten(2, (queries_per_kv, queries)).movedim(3, 1).flatten(2, 3)
    return dq_AQHd, (dot_AGRN.mT @ q).transpose(1, 2), (p_AGRN.mT @ grad).transpose(1, 2), ds_AGRN


def compute_sink_grad(sinks_H: Tensor, lse_TH: Tensor, delta_TH: Tensor) -> Tensor:
    """Gradient of the sinks: their softmax weight at every query, times minus delta."""
    sink_weight_TH = (sinks_H.to(lse_TH.dtype) - lse_TH).exp()
    return -(sink_weight_TH * delta_TH).sum(0).to(sinks_H.dtype)
