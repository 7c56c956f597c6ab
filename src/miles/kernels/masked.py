"""Attention written out in plain torch, for what no fused kernel does: windows, bounded scores, sinks, chosen tokens.

Shapes: B sequences of S tokens and M keys, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value. Without a past M = S. A slice is b of the sequences and Q of their queries, with the K keys these may see;
N = b * G, R = r * Q. t tokens are chosen for each query, out of scores of h heads.

Scores are made slice by slice and made again in backward, so that memory grows with S and not with S * S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles.kernels.terms import Terms

# The most scores that exist at once: about what a core's share of the cache holds, or what fills a large device.
_SCORES, _SCORES_CUDA = 1 << 23, 1 << 26
# The fewest queries a slice has before it takes a second sequence.
_QUERIES = 128


def masked_attention(
    q_BSHd: Tensor,
    k_BMGd: Tensor,
    v_BMGe: Tensor,
    terms: Terms,
    *,
    sinks_H: Tensor | None = None,
    chosen_BSt: Tensor | None = None,
) -> Tensor:
    """Causal attention of sequences of one length, [B, S, H, e]; scores and their softmax in float32 or wider.

    Where there are more keys than queries the first ones are a past that all queries see, as far as ``terms`` go.
    ``sinks_H`` are scores that join each softmax and have no value. A query sees only those of its earlier tokens
    that are among ``chosen_BSt``, which are places in the sequence. Chunks are to be cut into sequences before.
    """
    assert terms.chunk is None, "chunks are sequences of their own here"
    assert k_BMGd.shape[1] == q_BSHd.shape[1] or chosen_BSt is None, "tokens are chosen of whole sequences alone"
    return _Masked.apply(q_BSHd, k_BMGd, v_BMGe, sinks_H, chosen_BSt, terms)  # pyright: ignore[reportReturnType]


@torch.no_grad()
def choose(q_Shd: Tensor, k_Sd: Tensor, weights_Sh: Tensor, top: int) -> Tensor:
    """The places of the ``top`` tokens each token may see, [S, top], by the sum over heads of weight * relu(q . k).

    A token with fewer before it is given later ones too: whoever attends must not look at these.
    """
    length, heads, _ = q_Shd.shape
    assert top < length, "every token sees all before it: there is nothing to choose"
    wide = torch.promote_types(q_Shd.dtype, torch.float32)
    k_dS = _operand(k_Sd, wide).T
    chosen_St = torch.empty(length, top, device=q_Shd.device, dtype=_places(length))
    step = max(1, _most(q_Shd) // (heads * length))
    for lo in range(0, length, step):
        hi = min(lo + step, length)
        q_Rd = _operand(q_Shd[lo:hi], wide).flatten(0, 1)
        each_QhK = _product(q_Rd[None], k_dS[None, :, :hi], wide)[0].view(hi - lo, heads, hi).relu_()
        # Rows are as long as the sequence: which of several equal scores are taken depends on it.
        scores_QS = torch.full((hi - lo, length), -math.inf, device=q_Shd.device, dtype=wide)
        scores_QS[:, :hi] = torch.bmm(weights_Sh[lo:hi, None].to(wide), each_QhK)[:, 0]
        later_QK = torch.ones(hi - lo, hi, device=q_Shd.device, dtype=torch.bool).triu_(lo + 1)
        scores_QS[:, :hi].masked_fill_(later_QK, -math.inf)
        chosen_St[lo:hi] = scores_QS.topk(top, dim=-1).indices
    return chosen_St


def _most(x: Tensor) -> int:
    return _SCORES_CUDA if x.is_cuda else _SCORES


def _places(length: int) -> torch.dtype:
    """Choices of all layers are kept for backward: the narrowest integers that can name a place."""
    return torch.int16 if length <= torch.iinfo(torch.int16).max else torch.int32


# -- products -------------------------------------------------------------------------------


def _operand(x: Tensor, wide: torch.dtype) -> Tensor:
    """What is multiplied: as it is where the device adds up half precision in float32, else widened first."""
    return x if x.is_cuda else x.to(wide)


def _product(a_NRx: Tensor, b_Nxy: Tensor, wide: torch.dtype) -> Tensor:
    """a @ b, summed up and given in the ``wide`` dtype."""
    return torch.bmm(a_NRx, b_Nxy) if a_NRx.dtype == wide else torch.bmm(a_NRx, b_Nxy, out_dtype=wide)


# -- attention ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slice:
    """Sequences ``rows``, their queries ``lo`` to ``hi``, and the keys from ``first`` to ``last``."""

    rows: slice
    lo: int
    hi: int
    first: int
    last: int

    def of_queries(self, x_BGrSx: Tensor) -> Tensor:
        """[N, R, x]"""
        return x_BGrSx[self.rows, :, :, self.lo : self.hi].flatten(2, 3).flatten(0, 1)

    def of_keys(self, x_BGMx: Tensor) -> Tensor:
        """[N, K, x]"""
        return x_BGMx[self.rows, :, self.first : self.last].flatten(0, 1)

    def hidden(self, window: int | None, chosen_BSt: Tensor | None, device: torch.device) -> Tensor:
        """Which keys each query does not see: [Q, K], or [b, 1, 1, Q, K] where tokens are chosen."""
        num_q, num_k = self.hi - self.lo, self.last - self.first
        all_QK = torch.ones(num_q, num_k, device=device, dtype=torch.bool)
        ahead = num_k - num_q  # query 0 sees keys 0 to here
        hidden_QK = all_QK.triu(ahead + 1)
        if window is not None and num_k > window:
            hidden_QK |= all_QK.tril_(ahead - window)
        if chosen_BSt is None:
            return hidden_QK
        chosen_bQt = chosen_BSt[self.rows, self.lo : self.hi].long()
        unseen_bQS = torch.ones(*chosen_bQt.shape[:2], chosen_BSt.shape[1], device=device, dtype=torch.bool)
        unseen_bQS.scatter_(2, chosen_bQt, False)
        return (unseen_bQS[:, :, self.first : self.last] | hidden_QK)[:, None, None]


def _slices(q_BGrSd: Tensor, keys: int, window: int | None) -> Iterator[_Slice]:
    batch, groups, share, length, _ = q_BGrSd.shape
    heads, past = groups * share, keys - length
    width = length if window is None else min(length, max(window, _QUERIES))
    seen = keys if window is None else min(keys, width + window)
    most = _most(q_BGrSd)
    rows = min(batch, max(1, most // (heads * seen * min(width, _QUERIES))))
    width = max(1, min(width, most // (rows * heads * seen)))
    for row in range(0, batch, rows):
        for lo in range(0, length, width):
            first = 0 if window is None else max(0, past + lo - window + 1)
            hi = min(lo + width, length)
            yield _Slice(slice(row, min(row + rows, batch)), lo, hi, first, past + hi)


def _scores(at: _Slice, q_NRd: Tensor, k_NKd: Tensor, ctx: Any, chosen_BSt: Tensor | None) -> tuple[Tensor, Tensor]:
    """Scores with minus infinity for what is hidden, and what softcap made of them (else the same tensor)."""
    terms: Terms = ctx.terms
    raw_NRK = _product(q_NRd, k_NKd.transpose(1, 2), ctx.wide)
    hidden = at.hidden(terms.window, chosen_BSt, q_NRd.device)
    rows = at.rows.stop - at.rows.start
    if terms.softcap is None:
        raw_NRK.mul_(terms.scale)
        bounded_NRK = raw_NRK
    else:
        raw_NRK.mul_(terms.scale / terms.softcap).tanh_()
        bounded_NRK = raw_NRK * terms.softcap
    bounded_NRK.view(rows, ctx.groups, -1, at.hi - at.lo, at.last - at.first).masked_fill_(hidden, -math.inf)
    return bounded_NRK, raw_NRK


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHd: Tensor,
        k_BMGd: Tensor,
        v_BMGe: Tensor,
        sinks_H: Tensor | None,
        chosen_BSt: Tensor | None,
        terms: Terms,
    ) -> Tensor:
        ctx.terms, ctx.groups = terms, k_BMGd.shape[2]
        ctx.wide = torch.promote_types(q_BSHd.dtype, torch.float32)
        q_BGrSd, k_BGMd, v_BGMe = _split(ctx, q_BSHd, k_BMGd, v_BMGe)
        out_BSHe = q_BSHd.new_empty(*q_BSHd.shape[:3], v_BMGe.shape[3])
        out_BGrSe = _by_group(out_BSHe, ctx.groups)
        total_BGrS = out_BSHe.new_empty(q_BGrSd.shape[:4], dtype=ctx.wide)
        for at in _slices(q_BGrSd, k_BGMd.shape[2], terms.window):
            scores_NRK, _ = _scores(at, at.of_queries(q_BGrSd), at.of_keys(k_BGMd), ctx, chosen_BSt)
            into_bGrQ = total_BGrS[at.rows, :, :, at.lo : at.hi]
            into_bGrQ.copy_(scores_NRK.logsumexp(-1).view(into_bGrQ.shape))
            if sinks_H is not None:
                into_bGrQ.copy_(torch.logaddexp(into_bGrQ, _sinks(ctx, sinks_H)))
            shares_NRK = scores_NRK.sub_(into_bGrQ.reshape(*scores_NRK.shape[:2], 1)).exp_()
            values_NKe = at.of_keys(v_BGMe)
            found_NRe = _product(shares_NRK.to(values_NKe.dtype), values_NKe, ctx.wide)
            into_bGrQe = out_BGrSe[at.rows, :, :, at.lo : at.hi]
            into_bGrQe.copy_(found_NRe.view(into_bGrQe.shape))
        ctx.save_for_backward(q_BSHd, k_BMGd, v_BMGe, sinks_H, chosen_BSt, out_BSHe, total_BGrS)
        return out_BSHe

    @staticmethod
    def backward(ctx: Any, grad_BSHe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_BSHd, k_BMGd, v_BMGe, sinks_H, chosen_BSt, out_BSHe, total_BGrS = ctx.saved_tensors
        q_BGrSd, k_BGMd, v_BGMe = _split(ctx, q_BSHd, k_BMGd, v_BMGe)
        grad_BGrSe = _by_group(_operand(grad_BSHe, ctx.wide), ctx.groups)
        # What a query's scores have in common: its gradient times its result.
        common_BGrS = _by_group((grad_BSHe.to(ctx.wide) * out_BSHe).sum(-1, keepdim=True), ctx.groups)[..., 0]
        dq_BSHd = torch.empty_like(q_BSHd, memory_format=torch.contiguous_format)
        dq_BGrSd = _by_group(dq_BSHd, ctx.groups)
        dk_BGMd, dv_BGMe = (torch.zeros_like(x, dtype=ctx.wide) for x in (k_BGMd, v_BGMe))
        for at in _slices(q_BGrSd, k_BGMd.shape[2], ctx.terms.window):
            q_NRd, k_NKd, grad_NRe = at.of_queries(q_BGrSd), at.of_keys(k_BGMd), at.of_queries(grad_BGrSe)
            scores_NRK, raw_NRK = _scores(at, q_NRd, k_NKd, ctx, chosen_BSt)
            queries = (at.rows, slice(None), slice(None), slice(at.lo, at.hi))
            column = (*scores_NRK.shape[:2], 1)
            shares_NRK = scores_NRK.sub_(total_BGrS[queries].reshape(column)).exp_()
            keys = (at.rows, slice(None), slice(at.first, at.last))
            dv_bGKe = dv_BGMe[keys]
            dv_bGKe += _product(shares_NRK.to(grad_NRe.dtype).transpose(1, 2), grad_NRe, ctx.wide).view(dv_bGKe.shape)
            d_NRK = _product(grad_NRe, at.of_keys(v_BGMe).transpose(1, 2), ctx.wide)
            d_NRK.sub_(common_BGrS[queries].reshape(column)).mul_(shares_NRK).mul_(ctx.terms.scale)
            if ctx.terms.softcap is not None:
                d_NRK.mul_(raw_NRK.square_().neg_().add_(1))
            d_NRK = d_NRK.to(q_NRd.dtype)
            dq_bGrQd = dq_BGrSd[queries]
            dq_bGrQd.copy_(_product(d_NRK, k_NKd, ctx.wide).view(dq_bGrQd.shape))
            dk_bGKd = dk_BGMd[keys]
            dk_bGKd += _product(d_NRK.transpose(1, 2), q_NRd, ctx.wide).view(dk_bGKd.shape)
        dsinks_H = None
        if sinks_H is not None:
            dsinks_BGrS = torch.exp(_sinks(ctx, sinks_H) - total_BGrS).mul_(common_BGrS)
            dsinks_H = dsinks_BGrS.sum((0, 3)).flatten().neg_().to(sinks_H.dtype)
        dk_BMGd, dv_BMGe = dk_BGMd.transpose(1, 2).to(k_BMGd.dtype), dv_BGMe.transpose(1, 2).to(v_BMGe.dtype)
        return dq_BSHd, dk_BMGd, dv_BMGe, dsinks_H, None, None


def _by_group(x_BSHx: Tensor, groups: int) -> Tensor:
    """[B, G, r, S, x], a view."""
    return x_BSHx.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _split(ctx: Any, q_BSHd: Tensor, k_BMGd: Tensor, v_BMGe: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What products take: queries by group, keys and values contiguous by group."""
    q_BGrSd = _by_group(_operand(q_BSHd, ctx.wide), ctx.groups)
    k_BGMd, v_BGMe = (_operand(x, ctx.wide).transpose(1, 2).contiguous() for x in (k_BMGd, v_BMGe))
    return q_BGrSd, k_BGMd, v_BGMe


def _sinks(ctx: Any, sinks_H: Tensor) -> Tensor:
    return sinks_H.to(ctx.wide).view(ctx.groups, -1, 1)
