"""Tree attention backend: each segment of queries attends to its own runs of keys (shared prefixes, context parallel).

Shapes: T queries, M keys, K keys of all segments concatenated, H query heads, G key-value heads, d channels of a key, e
of a value, B segments of a block, S its most queries and N its most keys, P all slots of all blocks, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.eager import eager_attention, select_topk_tokens
from miles.kernels.attention.gather_rows import RowGather, gather_rows
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import AttentionInputs, AttentionParams, BlockIndexerInputs, IndexerInputs
from miles.kernels.attention.sinks import flash_attention_with_sinks
from miles.kernels.attention.varlen import (
    FreshRecurrentState,
    can_fuse,
    group_by_length,
    pad_channels,
    pad_head_dim,
    run_varlen_kernel,
    sdpa_attention,
)

# Blocks of more scores than this use eager attention: their mask alone would be large.
_MAX_MASKED_SCORES = 1 << 22
# With a window, blocks of more queries than this do too: its slices skip keys outside the window.
_MAX_MASKED_LENGTH = 256

KeyRuns = tuple[tuple[int, int], ...]
"""(first, length) of runs of key tokens that are consecutive in a sequence, wherever they are stored."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` adjacent queries, and the keys of their sequence from its first token on.

    The last keys are the queries' own: the last query sees all, the one before it all but the last.

    >>> Segment(2, ((0, 5), (9, 2))).keys
    7
    """

    length: int
    runs: KeyRuns

    @property
    def keys(self) -> int:
        return sum(n for _, n in self.runs)


def slice_runs(runs: KeyRuns, lo: int, hi: int) -> KeyRuns:
    """Keys ``lo`` to ``hi`` of the concatenated runs."""
    out: list[tuple[int, int]] = []
    start = 0
    for first, n in runs:
        a, b = max(lo, start), min(hi, start + n)
        if a < b:
            out.append((first + a - start, b - a))
        start += n
    return tuple(out)


def _split_by_chunk(segment: Segment, chunk: int) -> Iterator[Segment]:
    """Split a segment by the position chunks of its queries, each with the keys of that chunk."""
    keys, start = segment.keys, segment.keys - segment.length
    while start < keys:
        first = start // chunk * chunk
        end = min(keys, first + chunk)
        yield Segment(end - start, slice_runs(segment.runs, first, end))
        start = end


def trim_to_window(segment: Segment, window: int) -> Segment:
    """The segment without keys outside the window of every query."""
    hidden = max(0, segment.keys - segment.length - window + 1)
    return Segment(segment.length, slice_runs(segment.runs, hidden, segment.keys)) if hidden else segment


def list_keys(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Key tokens of all segments, concatenated."""
    runs = [np.arange(first, first + n) for s in segments for first, n in s.runs]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _PaddedBlocks:
    """(segments, most queries, most keys) of each padded block; the gathers of its queries and keys, and back."""

    shapes: list[tuple[int, int, int]]
    queries: RowGather
    keys: RowGather
    restore: RowGather


class _SegmentView:
    """Segments for one window and chunk, and what the layers with these share."""

    def __init__(self, segments: list[Segment], keys: int, device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.total, self.keys = sum(s.length for s in segments), keys
        self.longest, self.max_keys = max(s.length for s in segments), max(s.keys for s in segments)
        self._cu_seqlens: tuple[Tensor, Tensor] | None = None
        self._key_gather: RowGather | None = None
        self._padded_blocks: _PaddedBlocks | None = None
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def get_cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of each segment's queries and of its keys."""
        if self._cu_seqlens is None:
            lengths = [s.length for s in self.segments], [s.keys for s in self.segments]
            cu_seqlens = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths)
            queries, keys = (each.to(self.device, non_blocking=True) for each in cu_seqlens)
            self._cu_seqlens = queries, keys
        return self._cu_seqlens

    def get_key_gather(self) -> RowGather:
        """The gather of the keys of all segments, concatenated."""
        if self._key_gather is None:
            self._key_gather = RowGather(list_keys(self.segments), self.keys, self.device)
        return self._key_gather

    def get_padded_blocks(self) -> _PaddedBlocks:
        """Padded blocks of segments with equally long pasts and similar lengths.

        Padding then follows a segment's own tokens, in queries as in keys, where no query sees it.
        """
        if self._padded_blocks is None:
            self._padded_blocks = self._build_blocks()
        return self._padded_blocks

    def _build_blocks(self) -> _PaddedBlocks:
        pasts: dict[int, list[int]] = {}
        for count, segment in enumerate(self.segments):
            pasts.setdefault(segment.keys - segment.length, []).append(count)
        starts_B = np.array([0, *accumulate(s.length for s in self.segments)])
        shapes: list[tuple[int, int, int]] = []
        queries: list[NDArray[np.int64]] = []
        keys: list[NDArray[np.int64]] = []
        for past, numbers in pasts.items():
            for block in group_by_length([self.segments[i].length for i in numbers]):
                block_segments = [self.segments[numbers[i]] for i in block]
                longest = max(s.length for s in block_segments)
                shapes.append((len(block_segments), longest, past + longest))
                length_B1 = np.array([[s.length] for s in block_segments])
                query_BS = starts_B[[numbers[i] for i in block]][:, None] + np.arange(longest)
                queries.append(np.where(np.arange(longest) < length_B1, query_BS, -1).ravel())
                keys.append(self._pad_keys(block_segments, past + longest).ravel())
        query_P, key_P = np.concatenate(queries), np.concatenate(keys)
        slot_T = np.empty(self.total, np.int64)
        slot_T[query_P[query_P >= 0]] = np.flatnonzero(query_P >= 0)
        # A padding slot repeats some token.
        return _PaddedBlocks(
            shapes,
            RowGather(np.maximum(query_P, 0), self.total, self.device, real_P=query_P >= 0),
            RowGather(np.maximum(key_P, 0), self.keys, self.device, real_P=key_P >= 0),
            RowGather(slot_T, len(query_P), self.device),
        )

    def _pad_keys(self, segments: Sequence[Segment], width: int) -> NDArray[np.int64]:
        """The key tokens of each segment, [B, N]; -1 behind them."""
        key_M = np.arange(self.keys)
        key_BN = np.full((len(segments), width), -1)
        for key_N, segment in zip(key_BN, segments, strict=True):
            end = 0
            for first, n in segment.runs:
                key_N[end : end + n] = key_M[first : first + n]
                end += n
        return key_BN

    def get_mask(self, queries: int, keys: int, window: int | None) -> Tensor | None:
        """The mask of a block, [S, N]; None where it is plainly causal."""
        if queries == keys and window is None:
            return None
        if (queries, keys, window) not in self._masks:
            past = keys - queries
            seen_SN = torch.ones(queries, keys, device=self.device, dtype=torch.bool).tril(past)
            self._masks[queries, keys, window] = seen_SN if window is None else seen_SN.triu_(past + 1 - window)
        return self._masks[queries, keys, window]


class TreeAttentionBackend:
    """Attention backend over ``segments``, whose queries are concatenated; built once per forward, used by every layer.

    There may be more keys and values than queries: ``keys`` of them. On CUDA in half precision torch's varlen kernel
    computes it; otherwise segments of similar length with equally long pasts share a padded block. ``selections``
    replace what indexers select.
    """

    latent = False

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device | str,
        *,
        keys: int | None = None,
        selections: IndexerSelections | None = None,
    ) -> None:
        self._replay = selections
        self._segments = [s for s in segments if s.length]
        self._device = torch.device(device)
        self._total = sum(s.length for s in self._segments)
        self._keys = self._total if keys is None else keys
        assert all(s.length <= s.keys for s in self._segments), "a segment needs at least as many keys as queries"
        self._views: dict[tuple[int | None, int | None], _SegmentView] = {}
        self._selections: dict[int, list[Tensor | None]] = {}

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, _, v_MGe, params, _, index = inputs
        assert len(q_THd) == self._total, f"got {len(q_THd)} queries for segments of {self._total} in all"
        if not self._total:
            return q_THd[..., :1].expand(-1, -1, v_MGe.shape[-1])
        view = self._get_view(params)
        window = None if params.window is None or params.window >= view.max_keys else params.window
        inputs = inputs._replace(params=replace(params, chunk=None, window=window))
        if index is not None:
            assert params.window is None and params.chunk is None, "sparse attention with a window or chunk"
            assert not isinstance(index, BlockIndexerInputs), "block-sparse attention over a prefix tree"
            return _attend_selected(view, inputs, self._select_tokens(layer, index, view))
        if can_fuse(q_THd, v_MGe) and params.softcap is None:
            return _attend_varlen(view, inputs)
        return _attend_padded(view, inputs)

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        raise AssertionError(f"layer {layer} is recurrent, which tree attention does not support")

    def _select_tokens(self, layer: int, index: IndexerInputs | int, view: _SegmentView) -> list[Tensor | None]:
        """The selected positions of each segment's queries; None where all keys are visible."""
        if isinstance(index, int):
            assert index in self._selections, (
                f"layer {layer} reuses the selection of layer {index}, which has not run yet"
            )
            return self._selections[index]
        # A layer that is recomputed in backward must select the same tokens, even if its kernels round differently.
        is_recompute = layer in self._selections and torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]
        if not is_recompute:
            keys_Kd = gather_rows(index.k_Td.unsqueeze(1), view.get_key_gather()).squeeze(1)
            lengths, keys = [s.length for s in view.segments], [s.keys for s in view.segments]
            parts = zip(index.q_THd.split(lengths), keys_Kd.split(keys), index.weights_TH.split(lengths), strict=True)
            own = [select_topk_tokens(*part, index.topk) if len(part[1]) > index.topk else None for part in parts]
            self._selections[layer] = self._replace(layer, own, index)
        return self._selections[layer]

    def _replace(self, layer: int, own: Sequence[Tensor | None], index: IndexerInputs) -> list[Tensor | None]:
        """What each segment selects: its own selection, or the replayed one."""
        if self._replay is None:
            return list(own)
        selected: list[Tensor | None] = []
        first = 0
        for segment, own_St in zip(self._segments, own, strict=True):
            if own_St is None:
                selected.append(None)
            else:
                visible_S = torch.arange(segment.keys - segment.length, segment.keys, device=own_St.device) + 1
                used_S1t = self._replay.choose(
                    layer, first, own_St.unsqueeze(1), visible_S, unit=index.unit, limit=index.max_selected
                )
                selected.append(used_S1t.squeeze(1))
            first += segment.length
        return selected

    def _get_view(self, params: AttentionParams) -> _SegmentView:
        key = params.window, params.chunk
        if key not in self._views:
            segments = self._segments
            if params.chunk is not None:
                segments = [part for s in segments for part in _split_by_chunk(s, params.chunk)]
            if params.window is not None:
                segments = [trim_to_window(s, params.window) for s in segments]
            existing = next((view for view in self._views.values() if view.segments == segments), None)
            self._views[key] = existing or _SegmentView(segments, self._keys, self._device)
        return self._views[key]


def _attend_varlen(view: _SegmentView, inputs: AttentionInputs) -> Tensor:
    q_THd, k_MGd, v_MGe, params, sinks_H, _ = inputs
    width = pad_head_dim(q_THd, v_MGe)
    value_dim = v_MGe.shape[-1]
    gather = view.get_key_gather()
    q, k, v = pad_channels(q_THd, width), *(pad_channels(gather_rows(x, gather), width) for x in (k_MGd, v_MGe))
    ends, key_ends = view.get_cu_seqlens()
    scale, window = params.scale, params.window
    if sinks_H is not None:
        keys = key_ends, view.max_keys
        out = flash_attention_with_sinks(q, k, v, sinks_H, ends, view.longest, scale=scale, window=window, keys=keys)
    else:
        out = run_varlen_kernel((q, k, v), (ends, key_ends), (view.longest, view.max_keys), scale, window)
    return out if width == value_dim else out[..., :value_dim]


def _attend_selected(view: _SegmentView, inputs: AttentionInputs, selections: Sequence[Tensor | None]) -> Tensor:
    """Sparse attention, one segment after the other."""
    q_THd, k_MGd, v_MGe, params, sinks_H, _ = inputs
    lengths, keys = [s.length for s in view.segments], [s.keys for s in view.segments]
    k, v = (gather_rows(x, view.get_key_gather()).split(keys) for x in (k_MGd, v_MGe))
    outs = [
        eager_attention(
            q_SHd.unsqueeze(0),
            k_KGd.unsqueeze(0),
            v_KGe.unsqueeze(0),
            params,
            sinks_H=sinks_H,
            selected_BSt=None if selected_St is None else selected_St.unsqueeze(0),
        ).squeeze(0)
        for q_SHd, k_KGd, v_KGe, selected_St in zip(q_THd.split(lengths), k, v, selections, strict=True)
    ]
    return torch.cat(outs)


def _attend_padded(view: _SegmentView, inputs: AttentionInputs) -> Tensor:
    q_THd, k_MGd, v_MGe, *_ = inputs
    blocks = view.get_padded_blocks()
    queries, keys = ([b * each[i] for b, *each in blocks.shapes] for i in (0, 1))
    q = gather_rows(q_THd, blocks.queries).split(queries)
    k, v = (gather_rows(x, blocks.keys).split(keys) for x in (k_MGd, v_MGe))
    outs = [
        _attend_block(view, inputs._replace(q_THd=qb, k_TGd=kb, v_TGe=vb), shape)
        for shape, qb, kb, vb in zip(blocks.shapes, q, k, v, strict=True)
    ]
    return gather_rows(outs[0] if len(outs) == 1 else torch.cat(outs), blocks.restore)


def _attend_block(view: _SegmentView, inputs: AttentionInputs, shape: tuple[int, int, int]) -> Tensor:
    q, k, v, params, sinks_H, _ = inputs
    count, queries, keys = shape
    q_BSHd, k_BNGd, v_BNGe = q.unflatten(0, (count, queries)), *(x.unflatten(0, (count, keys)) for x in (k, v))
    window = None if params.window is None or params.window >= keys else params.window
    is_large = queries * keys > _MAX_MASKED_SCORES and queries != keys
    if (
        sinks_H is not None
        or params.softcap is not None
        or is_large
        or (window is not None and queries > _MAX_MASKED_LENGTH)
    ):
        out_BSHe = eager_attention(q_BSHd, k_BNGd, v_BNGe, replace(params, window=window), sinks_H=sinks_H)
        return out_BSHe.flatten(0, 1)
    mask_SN = view.get_mask(queries, keys, window)
    q_BHSd, k_BGNd, v_BGNe = q_BSHd.transpose(1, 2), k_BNGd.transpose(1, 2), v_BNGe.transpose(1, 2)
    return sdpa_attention(q_BHSd, k_BGNd, v_BGNe, params.scale, mask_SN).transpose(1, 2).flatten(0, 1)
