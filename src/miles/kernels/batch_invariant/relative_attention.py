"""Batch-invariant attention with a relative position bias, in torch on every device.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, h = H / G, d channels of a key, e of a
value, r profiles over E distances, p and F the same padded; b tiles, m queries of a tile, n keys of a block; A spans of
equal size, Q some queries of each, R = h * Q, N their keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.attention.params import AttentionInputs, AttentionParams, RelativeBias
from miles.kernels.attention.relative import gather_bias, index_distances
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans
from miles.kernels.batch_invariant.attention_reference import (
    matmul_tiles,
    pad_channels,
    reference_attention,
    reference_attention_backward,
)
from miles.kernels.batch_invariant.elementwise import accumulation_dtype

__all__ = ["relative_span_attention"]


def relative_span_attention(inputs: AttentionInputs, bias: RelativeBias, spans: AttentionSpans) -> Tensor:
    """Attention of every query over the keys of its span up to its own, with a position bias, [T, H, e].

    For a gradient every span needs keys of its own.
    """
    tensors = (*inputs[:3], bias.weights_THr, bias.profiles_rE)
    return _RelativeAttention.apply(*tensors, spans, inputs.params)  # pyright: ignore[reportReturnType]


class _TileBias:
    """The bias of tiles of queries, from a matmul of one shape."""

    def __init__(self, weights_THr: Tensor, profiles_rE: Tensor) -> None:
        self._weights_THr, self._extent = weights_THr, profiles_rE.shape[1]
        self._wide = accumulation_dtype(weights_THr.dtype)
        padded_rF = pad_channels(profiles_rE, self._wide)
        rank = pad_channels(profiles_rE.T, self._wide).shape[1]
        self._profiles_pF = F.pad(padded_rF, (0, 0, 0, rank - len(profiles_rE)))

    def __call__(self, token_bm: Tensor, head_bm: Tensor) -> Callable[[Tensor], Tensor]:
        weights_bmp = pad_channels(self._weights_THr[token_bm, head_bm], self._wide)
        profiles_bpF = self._profiles_pF.expand(len(token_bm), -1, -1).contiguous()
        profile_bmE = matmul_tiles(weights_bmp, profiles_bpF)[..., : self._extent]
        # One distance more, for keys without a bias.
        padded_bmE = F.pad(profile_bmE, (0, 1))
        return lambda distance_bmn: padded_bmE.gather(-1, index_distances(distance_bmn, self._extent))


class _SliceBias:
    """The bias of queries in backward, and the gradients of weights and profiles."""

    def __init__(self, weights_THr: Tensor, profiles_rE: Tensor) -> None:
        self._wide = accumulation_dtype(weights_THr.dtype)
        self._weights_THr, self._profiles_rE = weights_THr, profiles_rE.to(self._wide)
        self.extent = profiles_rE.shape[1]
        self.weights_grad = torch.zeros_like(weights_THr, dtype=self._wide)
        self.profiles_grad = torch.zeros_like(self._profiles_rE)

    def _read_weights(self, rows_AQ: Tensor, groups: int) -> Tensor:
        weights_AQHr = self._weights_THr[rows_AQ].to(self._wide)
        return weights_AQHr.unflatten(2, (groups, -1)).movedim(1, 3).flatten(2, 3)

    def compute(self, rows_AQ: Tensor, distance_QN: Tensor, groups: int) -> Tensor:
        profile_AGRE = self._read_weights(rows_AQ, groups) @ self._profiles_rE
        return gather_bias(profile_AGRE, _repeat_heads(distance_QN, profile_AGRE.shape[2]))

    def accumulate(self, rows_AQ: Tensor, distance_QN: Tensor, grad_AGRN: Tensor) -> None:
        _, groups, rows, _ = grad_AGRN.shape
        index_RN = index_distances(_repeat_heads(distance_QN, rows), self.extent)
        summed_AGRE = grad_AGRN.new_zeros(*grad_AGRN.shape[:3], self.extent + 1)
        # Those without a bias would meet in one place, in any order: they are zeros.
        kept_AGRN = grad_AGRN.masked_fill(index_RN == self.extent, 0.0)
        dprofile_AGRE = summed_AGRE.scatter_add_(-1, index_RN.expand_as(kept_AGRN), kept_AGRN)[..., :-1]
        dweights_AGRr = dprofile_AGRE @ self._profiles_rE.T
        queries = rows_AQ.shape[1]
        self.weights_grad[rows_AQ] = dweights_AGRr.unflatten(2, (-1, queries)).movedim(3, 1).flatten(2, 3)
        weights_AGRr = self._read_weights(rows_AQ, groups)
        self.profiles_grad += weights_AGRr.flatten(0, 2).T @ dprofile_AGRE.flatten(0, 2)


def _repeat_heads(distance_QN: Tensor, rows: int) -> Tensor:
    """The distances of the queries of every head, [R, N]."""
    return distance_QN.repeat(rows // len(distance_QN), 1)


class _RelativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_SGd: Tensor,
        v_SGe: Tensor,
        weights_THr: Tensor,
        profiles_rE: Tensor,
        spans: AttentionSpans,
        params: AttentionParams,
    ) -> Tensor:
        bias = _TileBias(weights_THr, profiles_rE)
        out_THe, lse_TH = reference_attention(q_THd, k_SGd, v_SGe, spans, params, bias=bias)
        ctx.spans, ctx.params = spans, params
        ctx.save_for_backward(q_THd, k_SGd, v_SGe, out_THe, lse_TH, weights_THr, profiles_rE)
        return out_THe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, weights_THr, profiles_rE = ctx.saved_tensors
        bias = _SliceBias(weights_THr, profiles_rE)
        dq, dk, dv, _ = reference_attention_backward(grad_THe, tuple(saved), ctx.spans, ctx.params, bias=bias)
        dweights, dprofiles = bias.weights_grad.to(weights_THr.dtype), bias.profiles_grad.to(profiles_rE.dtype)
        return dq, dk, dv, dweights, dprofiles, None, None
