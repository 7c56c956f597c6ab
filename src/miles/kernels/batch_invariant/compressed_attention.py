"""Batch-invariant compressed attention: a sliding window of tokens and the keys of complete windows, merged in order.

Both sets of keys are attended to by torch on every device, in tiles of one shape.

Shapes: T queries, S rows of tokens, V rows of windows, N spans, H query heads (h of an indexer), d channels of a key, i
of an indexer's key, R queries that see a complete window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.attention.compressed import CompressorInputs, WindowIndexerInputs, WindowTokens, list_windows
from miles.kernels.attention.gather_rows import index_rows
from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, Selection
from miles.kernels.batch_invariant.attention_reference import (
    compute_sink_grad,
    reference_attention,
    reference_attention_backward,
)
from miles.kernels.batch_invariant.dsa_indexer import score_heads, select_positions
from miles.kernels.batch_invariant.elementwise import accumulation_dtype, map_elements, sum_in_order
from miles.kernels.runtime.kv_cache import Ints

# Queries whose scores of windows are computed together.
_MAX_QUERIES = 256


@dataclass(frozen=True, slots=True)
class WindowSpans:
    """The queries ``row_R`` that see a complete window, and their spans: window k of a span is row k of its keys."""

    row_R: Ints
    spans: AttentionSpans


def build_window_spans(spans: AttentionSpans, rate: int) -> WindowSpans:
    """Return which windows of ``rate`` tokens each query of ``spans`` sees: those complete at its position.

    The windows of a span follow those of the span before it.
    """
    windows_N = spans.keys_N // rate
    start_N = windows_N.cumsum() - windows_N
    before_N = spans.keys_N - spans.count_N - spans.first_N
    ends_T = (np.arange(spans.queries) + before_N.repeat(spans.count_N) + 1) // rate
    row_R = np.flatnonzero(ends_T > 0)
    owner_R = np.arange(len(spans.count_N)).repeat(spans.count_N)[row_R]
    count_N = np.bincount(owner_R, minlength=len(spans.count_N))
    kept = count_N > 0
    count_N = count_N[kept]
    first_N = count_N.cumsum() - count_N
    return WindowSpans(row_R, AttentionSpans(first_N, count_N, start_N[kept], windows_N[kept], ends_T=ends_T[row_R]))


def pack_span_windows(spans: AttentionSpans, rate: int, reach: int, device: torch.device) -> WindowTokens:
    """Return the windows of all keys of spans that have keys of their own, one after the other."""
    owners_M, numbers_M, positions_ML = list_windows(np.zeros_like(spans.keys_N), spans.keys_N, rate, reach)
    tokens_ML = torch.from_numpy(positions_ML + spans.start_N[owners_M][:, None]).to(device)
    return WindowTokens(tokens_ML, torch.from_numpy(numbers_M).to(device), (spans.keys_N // rate).tolist())


@torch.no_grad()
def select_windows(index: WindowIndexerInputs, keys_Vi: Tensor, windows: WindowSpans) -> Selection | None:
    """What each query that sees a complete window selects of them; None where that is all.

    Of equal scores the first window is selected.
    """
    spans = windows.spans
    longest = int(spans.keys_N.max(initial=0))
    if index.topk >= longest:
        return None
    assert spans.ends_T is not None
    device = keys_Vi.device
    row_R, ends_R = (torch.from_numpy(x).to(device) for x in (windows.row_R, spans.ends_T))
    units_R1W = torch.zeros(len(row_R), 1, longest, dtype=torch.bool, device=device)
    columns = (x.tolist() for x in (spans.first_N, spans.count_N, spans.start_N, spans.keys_N))
    for first, count, start, keys in zip(*columns, strict=True):
        span_Wi = keys_Vi[start : start + keys]
        for low in range(first, first + count, _MAX_QUERIES):
            rows = slice(low, min(low + _MAX_QUERIES, first + count))
            seen = int(spans.ends_T[rows].max())
            weights_Qh = index.weights_Th[row_R[rows]]
            scores_QW = score_heads(index.q_Thi[row_R[rows]], weights_Qh, span_Wi[:seen])
            hidden_QW = torch.arange(seen, device=device) >= ends_R[rows, None]
            best_Qk = select_positions(scores_QW.masked_fill_(hidden_QW, -math.inf), index.topk)
            units_R1W[rows, 0, :seen] = torch.zeros_like(hidden_QW).scatter_(1, best_Qk, True) & ~hidden_QW
    return Selection(units_R1W, 1)


def attend_compressed(
    inputs: AttentionInputs, compressed_V1d: Tensor, spans: AttentionSpans, windows: WindowSpans, selection: Any
) -> Tensor:
    """Attend to a window of tokens and to the windows that are complete, or selected of these, [T, H, d].

    Keys are values too, and all heads share them. In training spans and windows have keys of their own.
    """
    settings = (inputs.params, spans, windows, selection)
    return _CompressedAttention.apply(inputs.q_THd, inputs.k_TGd, compressed_V1d, inputs.sinks_H, settings)  # pyright: ignore[reportReturnType]


class _CompressedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_S1d: Tensor, compressed_V1d: Tensor, sinks_H: Tensor | None, settings: Any
    ) -> Tensor:
        params, spans, windows, selection = settings
        wide_THd = q_THd.to(accumulation_dtype(q_THd.dtype))
        near_THd, near_TH = reference_attention(wide_THd, k_S1d, k_S1d, spans, params)
        far_THd, far_TH = torch.zeros_like(near_THd), torch.full_like(near_TH, -math.inf)
        if len(windows.row_R):
            row_R = torch.from_numpy(windows.row_R).to(q_THd.device)
            far = (compressed_V1d, compressed_V1d, windows.spans, _drop_window(params), None, selection)
            out_RHd, lse_RH = reference_attention(wide_THd[row_R], *far)
            far_THd.index_copy_(0, row_R, out_RHd)
            far_TH.index_copy_(0, row_R, lse_RH)
        out_THd, lse_TH = _merge([(near_THd, near_TH), (far_THd, far_TH)], sinks_H)
        out_THd = out_THd.to(q_THd.dtype)
        ctx.settings = settings
        ctx.save_for_backward(q_THd, k_S1d, compressed_V1d, sinks_H, out_THd, lse_TH)
        return out_THd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THd, k_S1d, compressed_V1d, sinks_H, out_THd, lse_TH = ctx.saved_tensors
        params, spans, windows, selection = ctx.settings
        saved = (q_THd, k_S1d, k_S1d, out_THd, lse_TH)
        dq_THd, dk_S1d, dv_S1d, delta_TH = reference_attention_backward(grad_THd, saved, spans, params)
        dcompressed_V1d = torch.zeros_like(compressed_V1d)
        if len(windows.row_R):
            row_R = torch.from_numpy(windows.row_R).to(q_THd.device)
            saved = (q_THd[row_R], compressed_V1d, compressed_V1d, out_THd[row_R], lse_TH[row_R])
            far = reference_attention_backward(grad_THd[row_R], saved, windows.spans, _drop_window(params), selection)
            dq_THd = dq_THd.index_add(0, row_R, far[0])
            dcompressed_V1d = far[1] + far[2]
        dsinks_H = None if sinks_H is None else compute_sink_grad(sinks_H, lse_TH, delta_TH)
        return dq_THd, dk_S1d + dv_S1d, dcompressed_V1d, dsinks_H, None


def _drop_window(params: AttentionParams) -> AttentionParams:
    return replace(params, window=None)


def _merge(parts: list[tuple[Tensor, Tensor]], sinks_H: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention to several sets of keys, [T, H, d], and its log-sum-exp; sums are in the order of the sets."""
    lses = [lse_TH for _, lse_TH in parts]
    if sinks_H is not None:
        lses.append(sinks_H.to(lses[0].dtype).expand_as(lses[0]))
    most_TH = torch.stack(lses).amax(0)
    weights = [map_elements(torch.exp, lse_TH - most_TH) for lse_TH in lses]
    total_TH = sum_in_order(weights)
    products = [out_THd * w_TH.unsqueeze(-1) for (out_THd, _), w_TH in zip(parts, weights, strict=False)]
    out_THd = sum_in_order(products) / total_TH.unsqueeze(-1)
    return out_THd, most_TH + map_elements(torch.log, total_TH)


class CompressedLayers:
    """Compressed attention of the layers of a forward over spans with keys of their own, in training."""

    def __init__(self, spans: AttentionSpans) -> None:
        self._spans = spans
        self._windows: dict[tuple[int, int], tuple[WindowSpans, WindowTokens]] = {}

    def attend(self, inputs: AttentionInputs, states_Sx: Tensor, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys; ``states_Sx`` are those of all keys."""
        key = compressor.rate, compressor.reach
        if key not in self._windows:
            tokens = pack_span_windows(self._spans, *key, states_Sx.device)
            self._windows[key] = build_window_spans(self._spans, compressor.rate), tokens
        windows, tokens = self._windows[key]
        states_Rx = index_rows(states_Sx, tokens.tokens_ML.flatten()).unflatten(0, tokens.tokens_ML.shape)
        # Without a complete window too, so that the compressor gets gradients of zero.
        keys_Md, index_Mi = compressor.compress(states_Rx, tokens.numbers_M)
        if not self._spans.queries:
            return inputs.q_THd + inputs.k_TGd + keys_Md.unsqueeze(1)
        selection = None
        if compressor.indexer is not None and index_Mi is not None:
            selection = select_windows(compressor.indexer, index_Mi, windows)
        return attend_compressed(inputs, keys_Md.unsqueeze(1), self._spans, windows, selection)
