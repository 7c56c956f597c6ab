"""Eager (materialized) attention in torch with softcap, sinks, windows and sparse selection, which no fused kernel
supports.

Shapes: B sequences of S tokens and M keys, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value. Without a past M = S. A slice is b of the sequences and Q of their queries, with the K keys these may see; N = b
* G, R = r * Q. t tokens are selected for each query, by scores of h indexer heads; or t blocks for each query and each
of X key-value heads, X = G (X = 1 for tokens).

Scores are computed slice by slice and recomputed in backward, so that memory grows with S and not with S * S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.kernels.attention.block_selection import unselected_tokens
from miles.kernels.attention.params import AttentionParams
from miles.kernels.attention.topk_positions import select_topk

# The most scores held at once: a core's share of the CPU cache, or enough to fill a large GPU.
_MAX_SCORES, _MAX_SCORES_CUDA = 1 << 23, 1 << 26
# The fewest queries a slice has before it takes a second sequence.
_MIN_QUERIES = 128


def eager_attention(
    q_BSHd: Tensor,
    k_BMGd: Tensor,
    v_BMGe: Tensor,
    params: AttentionParams,
    *,
    sinks_H: Tensor | None = None,
    selected_BSt: Tensor | None = None,
    selected_BGSt: Tensor | None = None,
    block: int = 1,
) -> Tensor:
    """Causal attention of sequences of equal length, [B, S, H, e]; scores and softmax in float32 or wider.

    If there are more keys than queries, the first keys are a past that all queries see. ``sinks_H`` are attention-sink
    logits. With ``selected_BSt`` (positions among the keys) a query attends only to the earlier tokens among them. With
    ``selected_BGSt`` (numbers of blocks of ``block`` tokens) a key-value head attends only to the earlier tokens of
    these blocks. Chunks must be split into sequences by the caller.
    """
    assert params.chunk is None, "chunks must be split into sequences by the caller"
    selected_BXSt = selected_BGSt if selected_BSt is None else selected_BSt.unsqueeze(1)
    return _EagerAttention.apply(q_BSHd, k_BMGd, v_BMGe, sinks_H, selected_BXSt, params, block)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def select_topk_tokens(q_Shd: Tensor, k_Md: Tensor, weights_Sh: Tensor, topk: int) -> Tensor:
    """Positions of the ``topk`` tokens each token attends to, [S, topk], by the sum over heads of weight * relu(q . k).

    Of equal scores the lowest position is selected; positions are ascending. If there are more keys than queries, the
    queries are those of the last tokens. A token with fewer predecessors gets later positions too, which attention has
    to mask.
    """
    length, heads, _ = q_Shd.shape
    keys = len(k_Md)
    past = keys - length
    assert topk < keys, "topk must be less than the number of keys"
    wide = torch.promote_types(q_Shd.dtype, torch.float32)
    k_dM = as_operand(k_Md, wide).T
    selected_St = torch.empty(length, topk, device=q_Shd.device, dtype=_position_dtype(keys))
    step = max(1, max_scores_at_once(q_Shd) // (heads * keys))
    for lo in range(0, length, step):
        hi = min(lo + step, length)
        last = past + hi
        q_Rd = as_operand(q_Shd[lo:hi], wide).flatten(0, 1)
        head_scores_QhK = matmul_wide(q_Rd[None], k_dM[None, :, :last], wide)[0].view(hi - lo, heads, last).relu_()
        scores_QM = torch.full((hi - lo, keys), -math.inf, device=q_Shd.device, dtype=wide)
        scores_QM[:, :last] = torch.bmm(weights_Sh[lo:hi, None].to(wide), head_scores_QhK)[:, 0]
        later_QK = torch.ones(hi - lo, last, device=q_Shd.device, dtype=torch.bool).triu_(past + lo + 1)
        scores_QM[:, :last].masked_fill_(later_QK, -math.inf)
        selected_St[lo:hi] = select_topk(scores_QM, topk)
    return selected_St


def max_scores_at_once(x: Tensor) -> int:
    """The most scores held at once on the device of ``x``."""
    return _MAX_SCORES_CUDA if x.is_cuda else _MAX_SCORES


def _position_dtype(length: int) -> torch.dtype:
    """The narrowest integer dtype for positions: the selections of all layers are saved for backward."""
    return torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32


# -- matmuls -------------------------------------------------------------------------------


def as_operand(x: Tensor, wide: torch.dtype) -> Tensor:
    """The matmul operand: unchanged where the GPU accumulates half precision in float32, else widened first."""
    return x if x.is_cuda else x.to(wide)


def matmul_wide(a_NRx: Tensor, b_Nxy: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in the ``wide`` dtype."""
    return torch.bmm(a_NRx, b_Nxy) if a_NRx.dtype == wide else torch.bmm(a_NRx, b_Nxy, out_dtype=wide)


# -- attention ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slice:
    """Sequences ``rows``, their queries ``lo`` to ``hi``, and keys ``first`` to ``last``."""

    rows: slice
    lo: int
    hi: int
    first: int
    last: int

    def select_queries(self, x_BGrSx: Tensor) -> Tensor:
        """[N, R, x]"""
        return x_BGrSx[self.rows, :, :, self.lo : self.hi].flatten(2, 3).flatten(0, 1)

    def select_keys(self, x_BGMx: Tensor) -> Tensor:
        """[N, K, x]"""
        return x_BGMx[self.rows, :, self.first : self.last].flatten(0, 1)

    def build_mask(
        self, window: int | None, selected_BXSt: Tensor | None, block: int, keys: int, device: torch.device
    ) -> Tensor:
        """Which keys each query must not see: [Q, K], or [b, X, 1, Q, K] with a selection."""
        num_q, num_k = self.hi - self.lo, self.last - self.first
        all_QK = torch.ones(num_q, num_k, device=device, dtype=torch.bool)
        diagonal = num_k - num_q  # query 0 sees the keys up to this one
        masked_QK = all_QK.triu(diagonal + 1)
        if window is not None and num_k > window:
            masked_QK |= all_QK.tril_(diagonal - window)
        if selected_BXSt is None:
            return masked_QK
        selected_bXQt = selected_BXSt[self.rows, :, self.lo : self.hi]
        unselected_bXQM = unselected_tokens(selected_bXQt, block, keys)
        return (unselected_bXQM[..., self.first : self.last] | masked_QK).unsqueeze(2)


def _iter_slices(q_BGrSd: Tensor, keys: int, window: int | None) -> Iterator[_Slice]:
    batch, groups, queries_per_kv, length, _ = q_BGrSd.shape
    heads, past = groups * queries_per_kv, keys - length
    width = length if window is None else min(length, max(window, _MIN_QUERIES))
    visible_keys = keys if window is None else min(keys, width + window)
    max_scores = max_scores_at_once(q_BGrSd)
    rows = min(batch, max(1, max_scores // (heads * visible_keys * min(width, _MIN_QUERIES))))
    width = max(1, min(width, max_scores // (rows * heads * visible_keys)))
    for row in range(0, batch, rows):
        for lo in range(0, length, width):
            first = 0 if window is None else max(0, past + lo - window + 1)
            hi = min(lo + width, length)
            yield _Slice(slice(row, min(row + rows, batch)), lo, hi, first, past + hi)


def _scores(
    part: _Slice, q_NRd: Tensor, k_NKd: Tensor, ctx: Any, selected_BXSt: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores with minus infinity where masked, and tanh(scores) if there is a softcap (else the same tensor)."""
    params: AttentionParams = ctx.params
    raw_NRK = matmul_wide(q_NRd, k_NKd.transpose(1, 2), ctx.wide)
    build_mask = part.build_mask(params.window, selected_BXSt, ctx.block, ctx.keys, q_NRd.device)
    rows = part.rows.stop - part.rows.start
    if params.softcap is None:
        raw_NRK.mul_(params.scale)
        capped_NRK = raw_NRK
    else:
        raw_NRK.mul_(params.scale / params.softcap).tanh_()
        capped_NRK = raw_NRK * params.softcap
    capped_NRK.view(rows, ctx.groups, -1, part.hi - part.lo, part.last - part.first).masked_fill_(build_mask, -math.inf)
    return capped_NRK, raw_NRK


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHd: Tensor,
        k_BMGd: Tensor,
        v_BMGe: Tensor,
        sinks_H: Tensor | None,
        selected_BXSt: Tensor | None,
        params: AttentionParams,
        block: int,
    ) -> Tensor:
        ctx.params, ctx.keys, ctx.groups = params, *k_BMGd.shape[1:3]
        ctx.block = block
        ctx.wide = torch.promote_types(q_BSHd.dtype, torch.float32)
        q_BGrSd, k_BGMd, v_BGMe = _group_heads(ctx, q_BSHd, k_BMGd, v_BMGe)
        out_BSHe = q_BSHd.new_empty(*q_BSHd.shape[:3], v_BMGe.shape[3])
        out_BGrSe = _by_group(out_BSHe, ctx.groups)
        lse_BGrS = out_BSHe.new_empty(q_BGrSd.shape[:4], dtype=ctx.wide)
        for part in _iter_slices(q_BGrSd, k_BGMd.shape[2], params.window):
            scores_NRK, _ = _scores(part, part.select_queries(q_BGrSd), part.select_keys(k_BGMd), ctx, selected_BXSt)
            lse_bGrQ = lse_BGrS[part.rows, :, :, part.lo : part.hi]
            lse_bGrQ.copy_(scores_NRK.logsumexp(-1).view(lse_bGrQ.shape))
            if sinks_H is not None:
                lse_bGrQ.copy_(torch.logaddexp(lse_bGrQ, _view_sinks(ctx, sinks_H)))
            probs_NRK = scores_NRK.sub_(lse_bGrQ.reshape(*scores_NRK.shape[:2], 1)).exp_()
            values_NKe = part.select_keys(v_BGMe)
            out_NRe = matmul_wide(probs_NRK.to(values_NKe.dtype), values_NKe, ctx.wide)
            out_bGrQe = out_BGrSe[part.rows, :, :, part.lo : part.hi]
            out_bGrQe.copy_(out_NRe.view(out_bGrQe.shape))
        ctx.save_for_backward(q_BSHd, k_BMGd, v_BMGe, sinks_H, selected_BXSt, out_BSHe, lse_BGrS)
        return out_BSHe

    @staticmethod
    def backward(ctx: Any, grad_BSHe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BSHd, k_BMGd, v_BMGe, sinks_H, selected_BXSt, out_BSHe, lse_BGrS = ctx.saved_tensors
        q_BGrSd, k_BGMd, v_BGMe = _group_heads(ctx, q_BSHd, k_BMGd, v_BMGe)
        grad_BGrSe = _by_group(as_operand(grad_BSHe, ctx.wide), ctx.groups)
        # The sum of gradient times output of each query (delta).
        delta_BGrS = _by_group((grad_BSHe.to(ctx.wide) * out_BSHe).sum(-1, keepdim=True), ctx.groups)[..., 0]
        dq_BSHd = torch.empty_like(q_BSHd, memory_format=torch.contiguous_format)
        dq_BGrSd = _by_group(dq_BSHd, ctx.groups)
        dk_BGMd, dv_BGMe = (torch.zeros_like(x, dtype=ctx.wide) for x in (k_BGMd, v_BGMe))
        for part in _iter_slices(q_BGrSd, k_BGMd.shape[2], ctx.params.window):
            q_NRd = part.select_queries(q_BGrSd)
            k_NKd = part.select_keys(k_BGMd)
            grad_NRe = part.select_queries(grad_BGrSe)
            scores_NRK, raw_NRK = _scores(part, q_NRd, k_NKd, ctx, selected_BXSt)
            queries = (part.rows, slice(None), slice(None), slice(part.lo, part.hi))
            column = (*scores_NRK.shape[:2], 1)
            probs_NRK = scores_NRK.sub_(lse_BGrS[queries].reshape(column)).exp_()
            keys = (part.rows, slice(None), slice(part.first, part.last))
            dv_bGKe = dv_BGMe[keys]
            dv_bGKe += matmul_wide(probs_NRK.to(grad_NRe.dtype).transpose(1, 2), grad_NRe, ctx.wide).view(dv_bGKe.shape)
            d_NRK = matmul_wide(grad_NRe, part.select_keys(v_BGMe).transpose(1, 2), ctx.wide)
            d_NRK.sub_(delta_BGrS[queries].reshape(column)).mul_(probs_NRK).mul_(ctx.params.scale)
            if ctx.params.softcap is not None:
                d_NRK.mul_(raw_NRK.square_().neg_().add_(1))
            d_NRK = d_NRK.to(q_NRd.dtype)
            dq_bGrQd = dq_BGrSd[queries]
            dq_bGrQd.copy_(matmul_wide(d_NRK, k_NKd, ctx.wide).view(dq_bGrQd.shape))
            dk_bGKd = dk_BGMd[keys]
            dk_bGKd += matmul_wide(d_NRK.transpose(1, 2), q_NRd, ctx.wide).view(dk_bGKd.shape)
        dsinks_H = None
        if sinks_H is not None:
            dsinks_BGrS = torch.exp(_view_sinks(ctx, sinks_H) - lse_BGrS).mul_(delta_BGrS)
            dsinks_H = dsinks_BGrS.sum((0, 3)).flatten().neg_().to(sinks_H.dtype)
        dk_BMGd, dv_BMGe = dk_BGMd.transpose(1, 2).to(k_BMGd.dtype), dv_BGMe.transpose(1, 2).to(v_BMGe.dtype)
        return dq_BSHd, dk_BMGd, dv_BMGe, dsinks_H, None, None, None


def _by_group(x_BSHx: Tensor, groups: int) -> Tensor:
    """[B, G, r, S, x], a view."""
    return x_BSHx.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _group_heads(ctx: Any, q_BSHd: Tensor, k_BMGd: Tensor, v_BMGe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Matmul operands: queries by group, keys and values contiguous by group."""
    q_BGrSd = _by_group(as_operand(q_BSHd, ctx.wide), ctx.groups)
    k_BGMd, v_BGMe = (as_operand(x, ctx.wide).transpose(1, 2).contiguous() for x in (k_BMGd, v_BMGe))
    return q_BGrSd, k_BGMd, v_BGMe


def _view_sinks(ctx: Any, sinks_H: Tensor) -> Tensor:
    return sinks_H.to(ctx.wide).view(ctx.groups, -1, 1)
