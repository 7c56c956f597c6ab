"""Batch-invariant attention over spans of queries, with its gradient: the same bits in every batch, prefill or decode.

Shapes: T queries, S rows of keys and values, H query heads, G key-value heads, d channels of a key, e of a value, I
tiles of queries, J of keys.

In backward no two programs add to the same element, so that runs are bitwise reproducible.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.attention.paged_prefill import TILE, build_prefill_tiles
from miles.kernels.attention.params import AttentionParams, PagedAttentionParams
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, Selection, SpanBatch
from miles.kernels.batch_invariant.attention_paged import launch_prefill
from miles.kernels.batch_invariant.attention_reference import (
    compute_sink_grad,
    reference_attention,
    reference_attention_backward,
)
from miles.kernels.batch_invariant.attention_tile_config import (
    build_invariant_config,
    build_softmax_constants,
    pack_heads,
    select_dkv_tile,
    select_dq_tile,
)
from miles.kernels.numerics import MAX_HEAD_DIM
from miles.kernels.runtime.kv_cache import Ints
from miles.kernels.runtime.triton_compat import device_guard, use_triton

# Rows of a program that computes the dot products of gradients and outputs.
_ROWS = 16


def span_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    batch: SpanBatch,
    params: AttentionParams,
    sinks_H: Tensor | None = None,
    selection: Selection | None = None,
) -> Tensor:
    """Attention of every query over the keys of its span, or the positions it selects of them, [T, H, e].

    With a selection, or heads too large for the Triton kernels, it is computed by torch on every device.
    """
    return _SpanAttention.apply(q_THd, k_SGd, v_SGe, sinks_H, batch, params, selection)  # pyright: ignore[reportReturnType]


class _SpanAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_SGd: Tensor,
        v_SGe: Tensor,
        sinks_H: Tensor | None,
        batch: SpanBatch,
        params: AttentionParams,
        selection: Selection | None,
    ) -> Tensor:
        if use_triton(q_THd) and selection is None and q_THd.shape[-1] <= MAX_HEAD_DIM:
            out_THe, lse_TH = launch_forward(q_THd, k_SGd, v_SGe, batch, params, sinks_H)
        else:
            out_THe, lse_TH = reference_attention(q_THd, k_SGd, v_SGe, batch.spans, params, sinks_H, selection)
        ctx.batch, ctx.params = batch, params
        ctx.selection = selection
        ctx.save_for_backward(q_THd, k_SGd, v_SGe, out_THe, lse_TH, sinks_H)
        return out_THe

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THe: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, sinks_H = ctx.saved_tensors
        if use_triton(grad_THe) and ctx.selection is None and saved[0].shape[-1] <= MAX_HEAD_DIM:
            dq, dk, dv, delta_TH = launch_backward(grad_THe, tuple(saved), ctx.batch, ctx.params)
        else:
            dq, dk, dv, delta_TH = reference_attention_backward(
                grad_THe, tuple(saved), ctx.batch.spans, ctx.params, ctx.selection
            )
        dsinks_H = None if sinks_H is None else compute_sink_grad(sinks_H, saved[4], delta_TH)
        return dq, dk, dv, dsinks_H, None, None, None


# -- Triton -----------------------------------------------------------------------------------


def launch_forward(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    batch: SpanBatch,
    params: AttentionParams,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention output of every query, [T, H, e], and its log-sum-exp, [T, H] in float32."""
    q_THd, k_SGd, v_SGe = pack_heads(q_THd), pack_heads(k_SGd), pack_heads(v_SGe)
    heads = q_THd.shape[1]
    out_THe = torch.empty(len(q_THd), heads, v_SGe.shape[2], dtype=q_THd.dtype, device=q_THd.device)
    lse_TH = torch.empty(len(q_THd), heads, dtype=torch.float32, device=q_THd.device)
    tiles = _get_query_tiles(batch, q_THd.device)
    unpaged = PagedAttentionParams(0, params.scale, params.window, params.chunk, params.softcap, sinks_H)
    with device_guard(q_THd):
        ends_T = _get_visible_ends(batch, q_THd.device)
        launch_prefill((q_THd, k_SGd, v_SGe, tiles, tiles), unpaged, out_THe, lse_TH, ends_T)
    return out_THe, lse_TH


def launch_backward(
    grad_THe: Tensor, saved: tuple[Tensor, ...], batch: SpanBatch, params: AttentionParams
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, and the dot products of gradient and output, [T, H].

    ``saved`` are queries, keys, values, outputs and log-sum-exps of the forward.
    """
    # Imported on first use, when Triton compiles it.
    from miles.kernels.batch_invariant.attention_backward_triton import dkv_kernel, dq_kernel, row_dot_kernel

    q_THd, k_SGd, v_SGe = (pack_heads(x) for x in saved[:3])
    out_THe = saved[3]
    lse_TH = saved[4]
    grad_THe = grad_THe.contiguous()
    unpaged = PagedAttentionParams(0, params.scale, params.window, params.chunk, params.softcap)
    device = q_THd.device
    ends_T = _get_visible_ends(batch, device)
    config = build_invariant_config(q_THd, k_SGd, v_SGe, unpaged)._replace(has_visible_ends=ends_T is not None)
    heads = q_THd.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q_THd, k_SGd, v_SGe))
    delta_TH = torch.empty_like(lse_TH)
    tensors = (q_THd, k_SGd, v_SGe, grad_THe, lse_TH, delta_TH)
    scalars = (q_THd.stride(0), *build_softmax_constants(unpaged), params.scale)
    with device_guard(q_THd):
        rows = delta_TH.numel()
        row_dot_kernel[(-(-rows // _ROWS),)](grad_THe, out_THe, delta_TH, rows, config._replace(M=_ROWS), num_warps=4)
        dkv_config, tile, parts = select_dkv_tile(config, q_THd.dtype)
        tiles = _get_key_tiles(batch, dkv_config.N, device)
        dkv_kernel[(config.G, len(tiles), parts)](
            *tensors,
            tiles,
            tiles if ends_T is None else ends_T,
            dk,
            dv,
            *scalars,
            dkv_config,
            parts,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        dq_config, tile = select_dq_tile(config, q_THd.dtype)
        tiles = _get_query_tiles(batch, device)
        dq_kernel[(heads, len(tiles), TILE // dq_config.M)](
            *tensors,
            tiles,
            tiles if ends_T is None else ends_T,
            dq,
            *scalars,
            dq_config,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return dq, dk, dv, delta_TH


def _get_query_tiles(batch: SpanBatch, device: torch.device) -> Tensor:
    """Tiles of all queries, [I, 4]: first key of the span, first query, queries, position of the first."""
    if (device, "queries") not in batch.tiles:
        spans = batch.spans
        tiles_I4 = build_prefill_tiles(spans.keys_N - spans.count_N, spans.count_N, spans.start_N, 0)
        batch.tiles[device, "queries"] = torch.from_numpy(tiles_I4).to(device, non_blocking=True)
    return batch.tiles[device, "queries"]


def _get_visible_ends(batch: SpanBatch, device: torch.device) -> Tensor | None:
    """One past the last position that each query attends to, on the device; None if that is its own."""
    ends_T = batch.spans.ends_T
    if ends_T is None:
        return None
    if (device, "ends") not in batch.tiles:
        batch.tiles[device, "ends"] = torch.from_numpy(ends_T.astype(np.int32)).to(device, non_blocking=True)
    return batch.tiles[device, "ends"]


def _get_key_tiles(batch: SpanBatch, size: int, device: torch.device) -> Tensor:
    """Tiles of all keys, [J, 6]: first key of the span, first query, keys, keys before the first query, first key.

    The last column is the position of the first query that sees a key of the tile. Those seen by the most queries come
    first, since they take longest.
    """
    if (device, size) not in batch.tiles:
        spans = batch.spans
        parts_N = -(-spans.keys_N // size)
        span_J = np.arange(len(parts_N)).repeat(parts_N)
        first_J = (np.arange(len(span_J)) - (parts_N.cumsum() - parts_N)[span_J]) * size
        past_N = spans.keys_N - spans.count_N
        low_J = np.maximum(first_J, past_N[span_J])
        if spans.ends_T is not None:
            low_J = _find_first_queries(spans, span_J, first_J)
        keys_J = spans.keys_N[span_J]
        columns = (spans.start_N[span_J], spans.first_N[span_J], keys_J, past_N[span_J], first_J, low_J)
        tiles_J6 = np.stack(columns, 1).astype(np.int32)
        tiles_J6 = tiles_J6[(low_J - keys_J).argsort(kind="stable")]
        batch.tiles[device, size] = torch.from_numpy(tiles_J6).to(device, non_blocking=True)
    return batch.tiles[device, size]


def _find_first_queries(spans: AttentionSpans, span_J: Ints, first_J: Ints) -> Ints:
    """The position of the first query that sees any key from ``first_J`` on: visible ends never decrease in a span."""
    assert spans.ends_T is not None
    ends = np.split(spans.ends_T, spans.first_N[1:])
    past_N = spans.keys_N - spans.count_N
    found = [
        past_N[n] + np.searchsorted(ends[n], first, side="right") for n, first in zip(span_J, first_J, strict=True)
    ]
    return np.array(found, np.int64)
