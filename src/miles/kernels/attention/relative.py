"""Relative position bias of attention: scores plus a mixture of learned profiles over distances, in torch.

Shapes: B sequences of S queries, the last of M keys, H query heads, G key-value heads, h = H / G, r profiles over E
distances, d channels of a key, e of a value. A slice is Q of the queries of some rows N with the K keys these may see.

Scores are computed slice by slice and recomputed in backward, so that memory grows with S and not with S * S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.eager import as_operand, matmul_wide, max_scores_at_once

__all__ = ["gather_bias", "index_distances", "relative_attention"]


def relative_attention(
    q_BSHd: Tensor,
    k_BMGd: Tensor,
    v_BMGe: Tensor,
    weights_BSHr: Tensor,
    profiles_rE: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of sequences of equal length with a position bias, [B, S, H, e]; scores in float32 or wider.

    The last query sees all keys, the one before it all but the last.
    """
    wide = torch.promote_types(q_BSHd.dtype, torch.float32)
    settings = _Settings(scale, window, wide)
    return _RelativeAttention.apply(q_BSHd, k_BMGd, v_BMGe, weights_BSHr, profiles_rE, settings)  # pyright: ignore[reportReturnType]


def gather_bias(profile_xQE: Tensor, distance_xQK: Tensor) -> Tensor:
    """The bias of each query's keys, [..., Q, K], from that of every distance; zero outside 0 to E - 1."""
    index = index_distances(distance_xQK, profile_xQE.shape[-1])
    return F.pad(profile_xQE, (0, 1)).gather(-1, index.expand(*profile_xQE.shape[:-1], -1))


def index_distances(distance: Tensor, extent: int) -> Tensor:
    """Distances, and ``extent`` for those that have no bias."""
    return torch.where((distance >= 0) & (distance < extent), distance, extent)


class _Settings(NamedTuple):
    scale: float
    window: int | None
    wide: torch.dtype


class _Slice(NamedTuple):
    """Queries ``lo`` to ``hi`` of some rows, and keys ``first`` to ``end``."""

    rows: slice
    lo: int
    hi: int
    first: int
    end: int

    def select_queries(self, x_BGhSx: Tensor) -> Tensor:
        """[N, h * Q, x]"""
        return x_BGhSx[self.rows, :, :, self.lo : self.hi].flatten(2, 3).flatten(0, 1)

    def select_keys(self, x_BGMx: Tensor) -> Tensor:
        """[N, K, x]"""
        return x_BGMx[self.rows, :, self.first : self.end].flatten(0, 1)

    def list_distances(self, device: torch.device) -> Tensor:
        """How far each key is behind each query, [Q, K]."""
        starts = self.end - (self.hi - self.lo), self.first
        queries, keys = (torch.arange(start, self.end, device=device) for start in starts)
        return queries[:, None] - keys


def _iter_slices(q_BGhSd: Tensor, keys: int, extent: int, window: int | None) -> Iterator[_Slice]:
    batch, groups, each, length, _ = q_BGhSd.shape
    past = keys - length
    visible = keys if window is None else min(keys, 2 * window)
    width = length if window is None else min(length, window)
    most = max_scores_at_once(q_BGhSd)
    per_query = groups * each * max(visible, extent)
    rows = min(batch, max(1, most // (per_query * width)))
    width = max(1, min(width, most // (rows * per_query)))
    for row in range(0, batch, rows):
        for lo in range(0, length, width):
            hi, first = min(lo + width, length), 0 if window is None else max(0, past + lo - window + 1)
            yield _Slice(slice(row, min(row + rows, batch)), lo, hi, first, past + hi)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHd: Tensor,
        k_BMGd: Tensor,
        v_BMGe: Tensor,
        weights_BSHr: Tensor,
        profiles_rE: Tensor,
        settings: _Settings,
    ) -> Tensor:
        ctx.settings, groups = settings, k_BMGd.shape[2]
        operands = _Operands.build(q_BSHd, k_BMGd, v_BMGe, weights_BSHr, profiles_rE, settings)
        out_BSHe = q_BSHd.new_empty(*q_BSHd.shape[:3], v_BMGe.shape[3])
        out_BGhSe = _by_group(out_BSHe, groups)
        lse_BGhS = out_BSHe.new_empty(operands.q.shape[:4], dtype=settings.wide)
        for part in _iter_slices(operands.q, k_BMGd.shape[1], profiles_rE.shape[1], settings.window):
            queries = (part.rows, slice(None), slice(None), slice(part.lo, part.hi))
            scores_NRK = _scores(part, operands, settings)
            lse_NR = scores_NRK.logsumexp(-1)
            lse_BGhS[queries] = lse_NR.view(lse_BGhS[queries].shape)
            probs_NRK = scores_NRK.sub_(lse_NR.unsqueeze(-1)).exp_()
            values_NKe = part.select_keys(operands.v)
            out_NRe = matmul_wide(probs_NRK.to(values_NKe.dtype), values_NKe, settings.wide)
            out_BGhSe[queries] = out_NRe.view(out_BGhSe[queries].shape).to(out_BSHe.dtype)
        ctx.save_for_backward(q_BSHd, k_BMGd, v_BMGe, weights_BSHr, profiles_rE, out_BSHe, lse_BGhS)
        return out_BSHe

    @staticmethod
    def backward(ctx: Any, grad_BSHe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *inputs, out_BSHe, lse_BGhS = ctx.saved_tensors
        settings: _Settings = ctx.settings
        q_BSHd, k_BMGd, v_BMGe, weights_BSHr, profiles_rE = inputs
        wide, groups = settings.wide, k_BMGd.shape[2]
        operands = _Operands.build(q_BSHd, k_BMGd, v_BMGe, weights_BSHr, profiles_rE, settings)
        grad_BGhSe = _by_group(as_operand(grad_BSHe, wide), groups)
        # The sum of gradient times output of each query (delta).
        delta_BGhS = _by_group((grad_BSHe.to(wide) * out_BSHe).sum(-1, keepdim=True), groups)[..., 0]
        dq_BSHd, dweights_BSHr = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q_BSHd, weights_BSHr))
        dq_BGhSd, dweights_BGhSr = _by_group(dq_BSHd, groups), _by_group(dweights_BSHr, groups)
        dk_BGMd, dv_BGMe = (torch.zeros_like(x, dtype=wide) for x in (operands.k, operands.v))
        dprofiles_rE = torch.zeros_like(profiles_rE, dtype=wide)
        for part in _iter_slices(operands.q, k_BMGd.shape[1], profiles_rE.shape[1], settings.window):
            queries = (part.rows, slice(None), slice(None), slice(part.lo, part.hi))
            keys = (part.rows, slice(None), slice(part.first, part.end))
            grad_NRe = part.select_queries(grad_BGhSe)
            scores_NRK = _scores(part, operands, settings)
            probs_NRK = scores_NRK.sub_(lse_BGhS[queries].reshape(*scores_NRK.shape[:2], 1)).exp_()
            dv_BGMe[keys] += _matmul_back(probs_NRK, grad_NRe, wide).view(dv_BGMe[keys].shape)
            d_NRK = matmul_wide(grad_NRe, part.select_keys(operands.v).transpose(1, 2), wide)
            d_NRK.sub_(delta_BGhS[queries].reshape(*d_NRK.shape[:2], 1)).mul_(probs_NRK)
            weights_NRr = part.select_queries(operands.weights).to(wide)
            dprofile_NRE = _scatter_bias(d_NRK, part, profiles_rE.shape[1])
            dweights_NRr = dprofile_NRE @ profiles_rE.to(wide).T
            dweights_BGhSr[queries] = dweights_NRr.view(dweights_BGhSr[queries].shape).to(dweights_BSHr.dtype)
            dprofiles_rE += weights_NRr.flatten(0, 1).T @ dprofile_NRE.flatten(0, 1)
            d_NRK = d_NRK.mul_(settings.scale).to(operands.q.dtype)
            dq_NRd = matmul_wide(d_NRK, part.select_keys(operands.k), wide)
            dq_BGhSd[queries] = dq_NRd.view(dq_BGhSd[queries].shape).to(dq_BSHd.dtype)
            dk_BGMd[keys] += _matmul_back(d_NRK, part.select_queries(operands.q), wide).view(dk_BGMd[keys].shape)
        dk_BMGd, dv_BMGe = dk_BGMd.transpose(1, 2).to(k_BMGd.dtype), dv_BGMe.transpose(1, 2).to(v_BMGe.dtype)
        return dq_BSHd, dk_BMGd, dv_BMGe, dweights_BSHr, dprofiles_rE.to(profiles_rE.dtype), None


class _Operands(NamedTuple):
    """Matmul operands by key-value head: queries, keys, values, and the weights and profiles of the bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    profiles: Tensor

    @classmethod
    def build(
        cls, q_BSHd: Tensor, k_BMGd: Tensor, v_BMGe: Tensor, weights: Tensor, profiles: Tensor, settings: _Settings
    ) -> _Operands:
        groups = k_BMGd.shape[2]
        q_BGhSd = _by_group(as_operand(q_BSHd, settings.wide), groups)
        k_BGMd, v_BGMe = (as_operand(x, settings.wide).transpose(1, 2).contiguous() for x in (k_BMGd, v_BMGe))
        return cls(q_BGhSd, k_BGMd, v_BGMe, _by_group(weights, groups), profiles)


def _scores(part: _Slice, operands: _Operands, settings: _Settings) -> Tensor:
    """Scores in the wide dtype, minus infinity where a query must not see a key, [N, h * Q, K]."""
    scores_NRK = matmul_wide(
        part.select_queries(operands.q), part.select_keys(operands.k).transpose(1, 2), settings.wide
    )
    scores_NRK.mul_(settings.scale)
    distance_QK = part.list_distances(scores_NRK.device)
    profile_NRE = part.select_queries(operands.weights).to(settings.wide) @ operands.profiles.to(settings.wide)
    scores_NhQK = scores_NRK.unflatten(1, (-1, part.hi - part.lo))
    scores_NhQK += gather_bias(profile_NRE.unflatten(1, (-1, part.hi - part.lo)), distance_QK)
    hidden_QK = distance_QK < 0
    if settings.window is not None:
        hidden_QK = hidden_QK | (distance_QK >= settings.window)
    scores_NhQK.masked_fill_(hidden_QK, -math.inf)
    return scores_NRK


def _scatter_bias(d_NRK: Tensor, part: _Slice, extent: int) -> Tensor:
    """The gradient of every distance's bias, [N, h * Q, E]: each distance is that of one key at most."""
    d_NhQK = d_NRK.unflatten(1, (-1, part.hi - part.lo))
    index_QK = index_distances(part.list_distances(d_NRK.device), extent)
    summed = d_NhQK.new_zeros(*d_NhQK.shape[:3], extent + 1)
    # Those without a bias would meet in one place, in any order: they are zeros.
    kept_NhQK = d_NhQK.masked_fill(index_QK == extent, 0.0)
    return summed.scatter_add_(-1, index_QK.expand_as(d_NhQK), kept_NhQK)[..., :extent].flatten(1, 2)


def _matmul_back(a_NRK: Tensor, b_NRx: Tensor, wide: torch.dtype) -> Tensor:
    return matmul_wide(a_NRK.to(b_NRx.dtype).transpose(1, 2), b_NRx, wide)


def _by_group(x_BSHx: Tensor, groups: int) -> Tensor:
    """[B, G, h, S, x], a view."""
    return x_BSHx.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
