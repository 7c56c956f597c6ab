"""Tree attention backend: each segment of queries attends to its own runs of keys (shared prefixes, context parallel).

Shapes: T queries, M keys, K keys of all segments concatenated, H query heads, G key-value heads, d channels of a key, e
of a value, B segments of a block, S its most queries and N its most keys, P all slots of all blocks, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.block_selection import select_topk_blocks
from miles.kernels.attention.compressed import (
    CompressorInputs,
    WindowTokens,
    compressed_attention,
    pack_windows,
    select_windows,
)
from miles.kernels.attention.eager import eager_attention, max_scores_at_once, select_topk_tokens
from miles.kernels.attention.gather_rows import RowGather, gather_rows, index_rows
from miles.kernels.attention.index_pools import expand_pools, select_topk_pools
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import (
    AttentionInputs,
    AttentionParams,
    BlockIndexerInputs,
    IndexerInputs,
    RelativeBias,
)
from miles.kernels.attention.relative import relative_attention
from miles.kernels.attention.sinks import flash_attention_with_sinks
from miles.kernels.attention.varlen import (
    FreshRecurrentState,
    can_fuse,
    group_by_length,
    list_positions,
    pad_channels,
    pad_head_dim,
    prefers_span_kernels,
    run_varlen_kernel,
    sdpa_attention,
)
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, SpanBatch

# Blocks of more scores than this use eager attention: their mask alone would be large.
_MAX_MASKED_SCORES = 1 << 22
# With a window, blocks of more queries than this do too: its slices skip keys outside the window.
_MAX_MASKED_LENGTH = 256
# On a CPU the kernel takes for each row of a block, forward and backward, at least as long as for so many scores.
_ROW_SCORES = 256

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
    return concatenate_ranges([run for s in segments for run in s.runs])


def concatenate_ranges(runs: Sequence[tuple[int, int]] | NDArray[np.int64]) -> NDArray[np.int64]:
    """The integers of runs, each given by its first one and its length.

    >>> concatenate_ranges([(5, 2), (0, 3)]).tolist()
    [5, 6, 0, 1, 2]
    """
    first_N, length_N = np.array(runs, np.int64).reshape(-1, 2).T
    before_N = np.cumsum(length_N) - length_N
    return np.arange(int(length_N.sum())) + np.repeat(first_N - before_N, length_N)


@dataclass(frozen=True, slots=True)
class _PaddedBlocks:
    """(segments, most queries, most keys) of each padded block; the gathers of its queries and keys, and back."""

    shapes: list[tuple[int, int, int]]
    queries: RowGather
    keys: RowGather
    restore: RowGather


@dataclass(frozen=True, slots=True)
class _MaskedTrees:
    """Padded blocks of whole trees: (trees, most tokens) and the mask of each; the gather of their tokens, and back."""

    shapes: list[tuple[int, int]]
    masks: list[Tensor]
    tokens: RowGather
    restore: RowGather


class _SegmentView:
    """Segments for one window and chunk, and what the layers with these share."""

    def __init__(self, segments: list[Segment], keys: int, device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.total, self.keys = sum(s.length for s in segments), keys
        self.key_counts = [s.keys for s in segments]
        self.longest, self.max_keys = max(s.length for s in segments), max(self.key_counts)
        self._cu_seqlens: tuple[Tensor, Tensor] | None = None
        self._key_gather: RowGather | None = None
        self._padded_blocks: _PaddedBlocks | None = None
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    @cached_property
    def spans(self) -> SpanBatch:
        """The segments with their gathered keys, for the kernels of short ones."""
        count_N = np.array([s.length for s in self.segments], np.int64)
        keys_N = np.array([s.keys for s in self.segments], np.int64)
        return SpanBatch(AttentionSpans(count_N.cumsum() - count_N, count_N, keys_N.cumsum() - keys_N, keys_N))

    def get_cu_seqlens(self) -> tuple[Tensor, Tensor]:
        """Cumulative lengths of each segment's queries and of its keys."""
        if self._cu_seqlens is None:
            lengths = [s.length for s in self.segments], self.key_counts
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

    @cached_property
    def masked_trees(self) -> _MaskedTrees | None:
        """Blocks of whole trees, where the scores that their masks hide take less time than a row for each segment.

        None where that is not so, and where the tokens of a tree are not adjacent or are not all queries.
        """
        starts = [0, *accumulate(s.length for s in self.segments)]
        roots: list[int] = []
        for segment, start, end in zip(self.segments, starts, starts[1:], strict=False):
            root, (first, length) = segment.runs[0][0], segment.runs[-1]
            if first + length != end or (root != start and (not roots or root != roots[-1])):
                return None
            if root == start:
                roots.append(root)
        if self.keys != self.total:
            return None
        size_N = np.diff([*roots, self.total])
        blocks = group_by_length(size_N.tolist())
        shapes = [(len(block), int(size_N[block].max())) for block in blocks]
        masked = sum(count * width * width for count, width in shapes)
        scores = sum(s.length * count for s, count in zip(self.segments, self.key_counts, strict=True))
        if masked > _MAX_MASKED_SCORES or masked - scores > _ROW_SCORES * (len(self.segments) - len(roots)):
            return None
        return self._mask_trees(np.array(roots), size_N, blocks, shapes)

    def _mask_trees(
        self,
        root_N: NDArray[np.int64],
        size_N: NDArray[np.int64],
        blocks: Sequence[Sequence[int]],
        shapes: list[tuple[int, int]],
    ) -> _MaskedTrees:
        order = np.concatenate(blocks)
        width_N = np.repeat([width for _, width in shapes], [count for count, _ in shapes])
        slot_P = np.arange(int(width_N.sum())) - np.repeat(np.cumsum(width_N) - width_N, width_N)
        real_P = slot_P < np.repeat(size_N[order], width_N)
        token_P = np.repeat(root_N[order], width_N) + np.where(real_P, slot_P, 0)
        slot_T = np.empty(self.total, np.int64)
        slot_T[token_P[real_P]] = np.flatnonzero(real_P)
        # The row of each token's mask, and what it sees: the keys of its segment up to its own.
        row_P = np.cumsum(np.repeat(width_N, width_N)) - np.repeat(width_N, width_N)
        length_B, keys_B = np.array([s.length for s in self.segments]), np.array(self.key_counts)
        before_T = np.repeat(np.cumsum(length_B) - length_B, length_B)
        seen_T = np.repeat(keys_B - length_B, length_B) + np.arange(self.total) - before_T + 1
        first_T = np.repeat(np.cumsum(keys_B) - keys_B, length_B)
        key_K = concatenate_ranges([run for s in self.segments for run in s.runs])
        seen_K = key_K[concatenate_ranges(np.stack((first_T, seen_T), 1))]
        tree_T = np.repeat(root_N, size_N)
        mask = np.zeros(int((width_N * width_N).sum()), np.bool_)
        mask[np.repeat(row_P[slot_T], seen_T) + seen_K - np.repeat(tree_T, seen_T)] = True
        mask[row_P[~real_P]] = True  # padding sees one token: softmax over none is not a number
        parts = torch.from_numpy(mask).to(self.device).split([count * width * width for count, width in shapes])
        return _MaskedTrees(
            shapes,
            [part.view(count, 1, width, width) for part, (count, width) in zip(parts, shapes, strict=True)],
            RowGather(token_P, self.total, self.device, real_P=real_P),
            RowGather(slot_T, len(token_P), self.device),
        )

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
        self._windows: dict[tuple[int, int], WindowTokens] = {}
        self._window_selections: dict[int, list[Tensor | None]] = {}

    def drop_selection(self, layer: int) -> None:
        """Free what the indexer of a layer selected, once its backward is done."""
        self._selections.pop(layer, None)

    def list_selection(self, layer: int, top: int, pool: int) -> Tensor:
        """Return the positions that the indexer of a layer selected, [T, top + pool - 1]; -1 where all are visible."""
        lengths = [segment.length for segment in self._segments]
        return list_positions(self._selections[layer], lengths, top + pool - 1, self._device)

    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None:
        """Let a layer that another rank has run have selected what ``list_selection`` returned there."""
        rows = listed_Tt.split([segment.length for segment in self._segments])
        self._selections[layer] = [
            rows_St if segment.keys > top else None for rows_St, segment in zip(rows, self._segments, strict=True)
        ]

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
            block = index.block if isinstance(index, BlockIndexerInputs) else None
            return _attend_selected(view, inputs, self._select_tokens(layer, index, view), block)
        if can_fuse(q_THd, v_MGe) and params.softcap is None:
            return _attend_varlen(view, inputs)
        is_plain = window is None and params.chunk is None and params.softcap is None and inputs.sinks_H is None
        if is_plain and self._device.type == "cpu" and view.masked_trees is not None:
            return _attend_trees(view.masked_trees, inputs)
        return _attend_padded(view, inputs)

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        raise AssertionError(f"layer {layer} is recurrent, which tree attention does not support")

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys, one segment after the other.

        ``inputs`` have the keys of all tokens, and the compressor their states.
        """
        q_THd, k_M1d, params = inputs.q_THd, inputs.k_TGd, inputs.params
        assert params.window is not None, "compressed attention has a window"
        view = self._get_view(replace(params, window=None))
        gather, keys = view.get_key_gather(), [s.keys for s in view.segments]
        key = compressor.rate, compressor.reach
        if key not in self._windows:
            self._windows[key] = pack_windows(keys, *key, self._device)
        windows = self._windows[key]
        states_Rx = index_rows(gather_rows(compressor.states_Tx, gather), windows.tokens_ML.flatten())
        keys_Vd, index_Vi = compressor.compress(states_Rx.unflatten(0, windows.tokens_ML.shape), windows.numbers_M)
        selections = self._select_windows(layer, compressor, index_Vi, windows.counts, view)
        lengths = [s.length for s in view.segments]
        k_parts = gather_rows(k_M1d, gather).squeeze(1).split(keys)
        parts = (q_THd.split(lengths), k_parts, keys_Vd.split(windows.counts), selections)
        options: dict[str, Any] = {"scale": params.scale, "window": params.window, "rate": compressor.rate}
        outs = [
            compressed_attention(q, k, compressed, sinks_H=inputs.sinks_H, selected_Sk=selected, **options)
            for q, k, compressed, selected in zip(*parts, strict=True)
        ]
        return torch.cat(outs)

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias; segments of similar length with equally long pasts share a block."""
        q_THd, k_MGd, v_MGe, params, *_ = inputs
        assert len(q_THd) == self._total, f"got {len(q_THd)} queries for segments of {self._total} in all"
        blocks = self._get_view(params).get_padded_blocks()
        queries, keys = ([b * each[i] for b, *each in blocks.shapes] for i in (0, 1))
        q, weights = (gather_rows(x, blocks.queries).split(queries) for x in (q_THd, bias.weights_THr))
        k, v = (gather_rows(x, blocks.keys).split(keys) for x in (k_MGd, v_MGe))
        outs: list[Tensor] = []
        for (count, *_), *block in zip(blocks.shapes, q, k, v, weights, strict=True):
            q_BSHd, k_BMGd, v_BMGe, weights_BSHr = (x.unflatten(0, (count, -1)) for x in block)
            out_BSHe = relative_attention(
                q_BSHd,
                k_BMGd,
                v_BMGe,
                weights_BSHr,
                bias.profiles_rE,
                scale=params.scale,
                window=params.window,
            )
            outs.append(out_BSHe.flatten(0, 1))
        return gather_rows(torch.cat(outs), blocks.restore)

    def _select_windows(
        self, layer: int, compressor: CompressorInputs, index_Vi: Tensor | None, counts: list[int], view: _SegmentView
    ) -> list[Tensor | None]:
        """The windows that an indexer selects for each segment's queries; None where all are visible."""
        index = compressor.indexer
        if index is None or index_Vi is None:
            return [None] * len(counts)
        if not _is_recompute(layer, self._window_selections):
            lengths, keys = [s.length for s in view.segments], [s.keys for s in view.segments]
            tensors = (index.q_Thi.split(lengths), index.weights_Th.split(lengths), index_Vi.split(counts))
            self._window_selections[layer] = [
                select_windows(index._replace(q_Thi=q, weights_Th=weights), found, compressor.rate, past=many - len(q))
                if len(found) > index.topk
                else None
                for q, weights, found, many in zip(*tensors, keys, strict=True)
            ]
        return self._window_selections[layer]

    def _select_tokens(
        self, layer: int, index: IndexerInputs | BlockIndexerInputs | int, view: _SegmentView
    ) -> list[Tensor | None]:
        """The selected positions, or blocks, of each segment's queries; None where all keys are visible."""
        if isinstance(index, int):
            assert index in self._selections, (
                f"layer {layer} reuses the selection of layer {index}, which has not run yet"
            )
            return self._selections[index]
        if not _is_recompute(layer, self._selections):
            keys_Kx = gather_rows(index.k_Td.unsqueeze(1), view.get_key_gather()).squeeze(1)
            selected: list[Tensor | None] = []
            first = 0
            for segment, keys_Mx in zip(view.segments, keys_Kx.split([s.keys for s in view.segments]), strict=True):
                selected.append(self._select_of_segment(layer, index, first, segment, keys_Mx))
                first += segment.length
            self._selections[layer] = selected
        return self._selections[layer]

    def _select_of_segment(
        self, layer: int, index: IndexerInputs | BlockIndexerInputs, first: int, segment: Segment, keys_Mx: Tensor
    ) -> Tensor | None:
        """What a segment selects, itself or replayed: positions [S, t], or blocks [G, S, t]."""
        if segment.keys <= index.max_selected:
            return None
        rows, past = slice(first, first + segment.length), segment.keys - segment.length
        if isinstance(index, BlockIndexerInputs):
            own_GSt = select_topk_blocks(index.q_TGd[rows], keys_Mx, index)
            return self._replace(layer, first, own_GSt.transpose(0, 1), past, index).transpose(0, 1)
        tensors = (index.q_THd[rows], keys_Mx, index.weights_TH[rows], index.topk)
        if index.pool is None:
            own_St = select_topk_tokens(*tensors)
        else:
            own_St = select_topk_pools(*tensors, index.pool, max_scores=max_scores_at_once(index.q_THd))
        own_St = self._replace(layer, first, own_St.unsqueeze(1), past, index).squeeze(1)
        return own_St if index.pool is None else expand_pools(own_St, index.unit, past)

    def _replace(
        self, layer: int, first: int, own_SGt: Tensor, past: int, index: IndexerInputs | BlockIndexerInputs
    ) -> Tensor:
        """What the segment whose first query is ``first`` selects: its own selection, or the replayed one."""
        if self._replay is None:
            return own_SGt
        visible_S = torch.arange(past + 1, past + len(own_SGt) + 1, device=own_SGt.device)
        return self._replay.choose(layer, first, own_SGt, visible_S, unit=index.unit, limit=index.max_selected)

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
    gather = view.get_key_gather()
    if prefers_span_kernels(inputs, view.max_keys):
        return span_attention(q_THd, gather_rows(k_MGd, gather), gather_rows(v_MGe, gather), view.spans, params)
    width = pad_head_dim(q_THd, v_MGe)
    value_dim = v_MGe.shape[-1]
    q, k, v = pad_channels(q_THd, width), *(pad_channels(gather_rows(x, gather), width) for x in (k_MGd, v_MGe))
    ends, key_ends = view.get_cu_seqlens()
    scale, window = params.scale, params.window
    if sinks_H is not None:
        keys = key_ends, view.max_keys
        out = flash_attention_with_sinks(q, k, v, sinks_H, ends, view.longest, scale=scale, window=window, keys=keys)
    else:
        out = run_varlen_kernel((q, k, v), (ends, key_ends), (view.longest, view.max_keys), scale, window)
    return out if width == value_dim else out[..., :value_dim]


def _is_recompute(layer: int, selections: Mapping[int, object]) -> bool:
    """Whether a layer runs again in backward: it must select the same, even if its kernels round differently."""
    return layer in selections and torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def _attend_selected(
    view: _SegmentView, inputs: AttentionInputs, selections: Sequence[Tensor | None], block: int | None
) -> Tensor:
    """Sparse attention, one segment after the other; with ``block`` to blocks of as many tokens."""
    name, options = ("selected_BSt", {}) if block is None else ("selected_BGSt", {"block": block})
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
            **({} if selected is None else {name: selected.unsqueeze(0), **options}),
        ).squeeze(0)
        for q_SHd, k_KGd, v_KGe, selected in zip(q_THd.split(lengths), k, v, selections, strict=True)
    ]
    return torch.cat(outs)


def _attend_trees(trees: _MaskedTrees, inputs: AttentionInputs) -> Tensor:
    q_THd, k_TGd, v_TGe, params, *_ = inputs
    tokens = [count * width for count, width in trees.shapes]
    q, k, v = (gather_rows(x, trees.tokens).split(tokens) for x in (q_THd, k_TGd, v_TGe))
    outs: list[Tensor] = []
    for shape, mask, *block in zip(trees.shapes, trees.masks, q, k, v, strict=True):
        q_BHSd, k_BGSd, v_BGSe = (x.unflatten(0, shape).transpose(1, 2) for x in block)
        out_BHSe = sdpa_attention(q_BHSd, k_BGSd, v_BGSe, params.scale, mask)
        outs.append(out_BHSe.transpose(1, 2).flatten(0, 1))
    return gather_rows(outs[0] if len(outs) == 1 else torch.cat(outs), trees.restore)


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
