"""Bidirectional spans in causal attention: runs of tokens (of an image) that also attend to later tokens of their run.

Shapes: T queries, M keys, I queries of all spans, K keys of all spans concatenated, S queries and N keys of one span,
H query heads, G key-value heads, d channels of a key, e of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.gather_rows import RowGather, gather_rows
from miles.kernels.attention.params import AttentionInputs
from miles.kernels.attention.tree import Segment, TreeAttentionBackend, list_keys, slice_runs, trim_to_window
from miles.kernels.attention.varlen import (
    FreshRecurrentState,
    VarlenAttentionBackend,
    can_fuse,
    load_varlen_kernel,
    pad_channels,
    pad_head_dim,
    sdpa_attention,
)

Ints = NDArray[np.int64]


def find_spans(ends_T: Ints, first: int = 0) -> list[tuple[int, int]]:
    """(Start, end) of the runs of several tokens in which every token attends to the last one.

    Token t, at position ``first + t`` of its sequence, attends to positions before ``ends_T[t]``.

    >>> find_spans(np.array([1, 4, 4, 4, 5]))
    [(1, 4)]
    """
    changes = np.flatnonzero(np.diff(ends_T)) + 1
    spans: list[tuple[int, int]] = []
    for run in np.split(np.arange(len(ends_T)), changes):
        if len(run) and ends_T[run[0]] != first + run[0] + 1:
            assert ends_T[run[0]] == first + run[-1] + 1, "a bidirectional span is cut"
            spans.append((int(run[0]), int(run[-1]) + 1))
    return spans


class _SpanView(NamedTuple):
    """The spans as segments for one window, the gather of their keys, and their cumulative lengths and keys."""

    segments: list[Segment]
    gather: RowGather
    cu_seqlens: tuple[Tensor, Tensor]


class BidirectionalSpansBackend:
    """Attention backend of a packed batch with bidirectional spans; built once per forward, used by every layer.

    ``causal`` is the attention of all tokens over ``segments``, whose queries are concatenated. Query t attends to
    positions before ``ends_T[t]`` of its sequence: the attention of those within spans is computed again, and replaces
    that of ``causal``. A window hides the same earlier tokens as in causal attention.
    """

    latent = False

    def __init__(
        self,
        causal: VarlenAttentionBackend | TreeAttentionBackend,
        segments: Sequence[Segment],
        ends_T: Ints,
        device: torch.device | str,
    ) -> None:
        self._causal = causal
        self._device = torch.device(device)
        self._total = len(ends_T)
        self._spans: list[Segment] = []
        rows: list[Ints] = []
        start = 0
        for segment in segments:
            past = segment.keys - segment.length
            for lo, hi in find_spans(ends_T[start : start + segment.length], past):
                self._spans.append(Segment(hi - lo, slice_runs(segment.runs, 0, past + hi)))
                rows.append(np.arange(start + lo, start + hi))
            start += segment.length
        self._rows_I = torch.from_numpy(np.concatenate(rows or [np.empty(0, np.int64)])).to(self._device)
        self._views: dict[int | None, _SpanView] = {}

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        out_THe = self._causal(layer, inputs)
        params = inputs.params
        if not self._spans or params.ignores_spans:
            return out_THe
        is_plain = inputs.sinks_H is None and params.softcap is None and params.chunk is None and inputs.indexer is None
        assert is_plain, "bidirectional spans are supported in plain and sliding-window attention only"
        view = self._get_view(params.window)
        q_IHd = inputs.q_THd.index_select(0, self._rows_I)
        k_KGd, v_KGe = gather_rows(inputs.k_TGd, view.gather), gather_rows(inputs.v_TGe, view.gather)
        attend = _attend_varlen if can_fuse(q_IHd, v_KGe) else _attend_each
        out_IHe = attend(view, inputs._replace(q_THd=q_IHd, k_TGd=k_KGd, v_TGe=v_KGe))
        return out_THe.index_copy(0, self._rows_I, out_IHe.to(out_THe.dtype))

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        return self._causal.recurrent_state(layer)

    def drop_selection(self, layer: int) -> None:
        """Free what a layer's indexer selected."""
        self._causal.drop_selection(layer)

    def list_selection(self, layer: int, top: int, pool: int) -> Tensor:
        """Return what a layer's indexer selected."""
        return self._causal.list_selection(layer, top, pool)

    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None:
        """Let a layer that another rank has run have selected this."""
        self._causal.set_selection(layer, listed_Tt, top, pool)

    def _get_view(self, window: int | None) -> _SpanView:
        if window not in self._views:
            segments = [s if window is None else trim_to_window(s, window) for s in self._spans]
            lengths = [s.length for s in segments], [s.keys for s in segments]
            queries, keys = (torch.tensor([0, *accumulate(n)], dtype=torch.int32).to(self._device) for n in lengths)
            gather = RowGather(list_keys(segments), self._total, self._device)
            self._views[window] = _SpanView(segments, gather, (queries, keys))
        return self._views[window]


def _attend_varlen(view: _SpanView, inputs: AttentionInputs) -> Tensor:
    """All spans in one call of torch's varlen kernel, which aligns the last query with the last key."""
    q_IHd, k_KGd, v_KGe, params, *_ = inputs
    width, value_dim = pad_head_dim(q_IHd, v_KGe), v_KGe.shape[-1]
    q, k, v = (pad_channels(x, width) for x in (q_IHd, k_KGd, v_KGe))
    kernel, options = load_varlen_kernel()
    longest = max(s.length for s in view.segments), max(s.keys for s in view.segments)
    # No token is further ahead than the longest span.
    window_size = (-1, -1) if params.window is None else (params.window - 1, longest[0])
    out = kernel(q, k, v, *view.cu_seqlens, *longest, scale=params.scale, window_size=window_size, **options)
    return out if width == value_dim else out[..., :value_dim]


def _attend_each(view: _SpanView, inputs: AttentionInputs) -> Tensor:
    """Span by span, with a mask."""
    q_IHd, k_KGd, v_KGe, params, *_ = inputs
    outs: list[Tensor] = []
    lengths, keys = [s.length for s in view.segments], [s.keys for s in view.segments]
    for q_SHd, k_NGd, v_NGe in zip(q_IHd.split(lengths), k_KGd.split(keys), v_KGe.split(keys), strict=True):
        seen_SN = torch.ones(len(q_SHd), len(k_NGd), device=q_IHd.device, dtype=torch.bool)
        if params.window is not None:
            seen_SN = seen_SN.triu_(len(k_NGd) - len(q_SHd) + 1 - params.window)
        heads = (x.transpose(0, 1)[None] for x in (q_SHd, k_NGd, v_NGe))
        outs.append(sdpa_attention(*heads, params.scale, seen_SN)[0].transpose(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
