"""Attention of runs of queries that each see a past of their own: trees of sequences, and sequences cut over ranks.

Shapes: T queries, M keys, K keys of all segments one after the other, H query heads, G key-value heads, d channels of a
key, e of a value, B segments of a block, S its most queries and N its most keys, P all slots of all blocks, padding
included.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.masked import masked_attention
from miles.kernels.segments_rows import Copies, take
from miles.kernels.sinks import sunk_attention
from miles.kernels.terms import Index, Terms
from miles.kernels.varlen import (
    FUSED_STEP,
    FUSED_WIDTH,
    HALF,
    PackedCarry,
    blocks_of,
    plain_attention,
    varlen_kernel,
    widen,
)

# Blocks of more scores than this are written out slice by slice: their mask alone would be large.
_MASKED_SCORES = 1 << 22
# With a window, blocks of more queries than this: slices leave out what lies behind it.
_MASKED_LENGTH = 256

Runs = tuple[tuple[int, int], ...]
"""(first, length) of stretches of key tokens that follow each other in a sequence, wherever they lie."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` queries that stand next to each other, and the keys of their sequence from its first token on.

    The last keys are the queries' own: the last query sees all, the one before it all but the last.

    >>> Segment(2, ((0, 5), (9, 2))).keys
    7
    """

    length: int
    runs: Runs

    @property
    def keys(self) -> int:
        return sum(n for _, n in self.runs)


def _part(runs: Runs, lo: int, hi: int) -> Runs:
    """The keys ``lo`` to ``hi`` of all that the runs name."""
    out: list[tuple[int, int]] = []
    start = 0
    for first, n in runs:
        a, b = max(lo, start), min(hi, start + n)
        if a < b:
            out.append((first + a - start, b - a))
        start += n
    return tuple(out)


def _cut(segment: Segment, chunk: int) -> Iterator[Segment]:
    """A segment by the chunks of positions its queries are in, each with the keys of that chunk."""
    keys, at = segment.keys, segment.keys - segment.length
    while at < keys:
        first = at // chunk * chunk
        end = min(keys, first + chunk)
        yield Segment(end - at, _part(segment.runs, first, end))
        at = end


def _near(segment: Segment, window: int) -> Segment:
    """Without the keys that lie behind the window of every query."""
    far = max(0, segment.keys - segment.length - window + 1)
    return Segment(segment.length, _part(segment.runs, far, segment.keys)) if far else segment


def _keys_of(segments: Sequence[Segment]) -> NDArray[np.int64]:
    """The key tokens of all, one segment after the other."""
    runs = [np.arange(first, first + n) for s in segments for first, n in s.runs]
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """(segments, most queries, most keys) of each padded block; who fills its slots; where each query sits."""

    shapes: list[tuple[int, int, int]]
    queries: Copies
    keys: Copies
    back: Copies


class _View:
    """Segments as one kind of layer sees them, and what its layers share."""

    def __init__(self, segments: list[Segment], keys: int, device: torch.device) -> None:
        self.segments, self.device = segments, device
        self.total, self.keys = sum(s.length for s in segments), keys
        self.longest, self.most = max(s.length for s in segments), max(s.keys for s in segments)
        self._ends: tuple[Tensor, Tensor] | None = None
        self._copies: Copies | None = None
        self._blocks: _Blocks | None = None
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def ends(self) -> tuple[Tensor, Tensor]:
        """Where each segment's queries, and its keys, begin and end when all lie one after the other."""
        if self._ends is None:
            lengths = [s.length for s in self.segments], [s.keys for s in self.segments]
            ends = (torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in lengths)
            queries, keys = (each.to(self.device, non_blocking=True) for each in ends)
            self._ends = queries, keys
        return self._ends

    def copies(self) -> Copies:
        """Keys one segment after the other."""
        if self._copies is None:
            self._copies = Copies(_keys_of(self.segments), self.keys, self.device)
        return self._copies

    def blocks(self) -> _Blocks:
        """Segments with as long a past share a block when they are of like length.

        Padding then follows a segment's own tokens, in queries as in keys, where nobody looks at it.
        """
        if self._blocks is None:
            self._blocks = self._lay_out()
        return self._blocks

    def _lay_out(self) -> _Blocks:
        pasts: dict[int, list[int]] = {}
        for number, segment in enumerate(self.segments):
            pasts.setdefault(segment.keys - segment.length, []).append(number)
        starts = [0, *accumulate(s.length for s in self.segments)]
        shapes: list[tuple[int, int, int]] = []
        queries: list[NDArray[np.int64]] = []
        keys: list[NDArray[np.int64]] = []
        for past, numbers in pasts.items():
            for block in blocks_of([self.segments[i].length for i in numbers]):
                chosen = [self.segments[numbers[i]] for i in block]
                longest = max(s.length for s in chosen)
                shapes.append((len(chosen), longest, past + longest))
                for i, segment in zip(block, chosen, strict=True):
                    start, more = starts[numbers[i]], longest - segment.length
                    queries.append(np.pad(np.arange(start, start + segment.length), (0, more), constant_values=-1))
                    keys.append(np.pad(_keys_of([segment]), (0, more), constant_values=-1))
        query_P, key_P = np.concatenate(queries), np.concatenate(keys)
        slot_T = np.empty(self.total, np.int64)
        slot_T[query_P[query_P >= 0]] = np.flatnonzero(query_P >= 0)
        # A padding slot repeats some token.
        return _Blocks(
            shapes,
            Copies(np.maximum(query_P, 0), self.total, self.device, real_P=query_P >= 0),
            Copies(np.maximum(key_P, 0), self.keys, self.device, real_P=key_P >= 0),
            Copies(slot_T, len(query_P), self.device),
        )

    def mask(self, queries: int, keys: int, window: int | None) -> Tensor | None:
        """What each query of a block sees, [S, N]; None where plainly all before it."""
        if queries == keys and window is None:
            return None
        if (queries, keys, window) not in self._masks:
            past = keys - queries
            seen_SN = torch.ones(queries, keys, device=self.device, dtype=torch.bool).tril(past)
            self._masks[queries, keys, window] = seen_SN if window is None else seen_SN.triu_(past + 1 - window)
        return self._masks[queries, keys, window]


class SegmentAttend:
    """An ``Attend`` over ``segments``, whose queries lie one after the other; made once per forward, for every layer.

    Keys and values may be more tokens than the queries: ``keys`` of them, where they are not as many. On CUDA in half
    precision torch's varlen kernel does it; otherwise segments of like length with as long a past share a padded block.
    """

    latent = False

    def __init__(self, segments: Sequence[Segment], device: torch.device | str, *, keys: int | None = None) -> None:
        self._segments = [s for s in segments if s.length]
        self._device = torch.device(device)
        self._total = sum(s.length for s in self._segments)
        self._keys = self._total if keys is None else keys
        assert all(s.length <= s.keys for s in self._segments), "a query sees itself"
        self._views: dict[tuple[int | None, int | None], _View] = {}

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_MGd: Tensor,
        v_MGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        assert len(q_THd) == self._total, f"{len(q_THd)} queries for segments of {self._total} in all"
        assert index is None, "who may be seen cannot be chosen among keys that lie in runs"
        if not self._total:
            return q_THd[..., :1].expand(-1, -1, v_MGe.shape[-1])
        view = self._view(terms)
        window = None if terms.window is None or terms.window >= view.most else terms.window
        terms = replace(terms, chunk=None, window=window)
        fused = q_THd.is_cuda and q_THd.dtype in HALF and max(q_THd.shape[-1], v_MGe.shape[-1]) <= FUSED_WIDTH
        if fused and terms.softcap is None:
            return _varlen(view, q_THd, k_MGd, v_MGe, terms, sinks_H)
        return _padded(view, q_THd, k_MGd, v_MGe, terms, sinks_H)

    def carry(self, layer: int) -> PackedCarry:
        """What a recurrent layer left behind cannot be told here."""
        raise AssertionError(f"layer {layer} remembers by a state, which cannot be taken up in the middle of a tree")

    def _view(self, terms: Terms) -> _View:
        key = terms.window, terms.chunk
        if key not in self._views:
            made = self._segments
            if terms.chunk is not None:
                made = [part for s in made for part in _cut(s, terms.chunk)]
            if terms.window is not None:
                made = [_near(s, terms.window) for s in made]
            same = next((view for view in self._views.values() if view.segments == made), None)
            self._views[key] = same or _View(made, self._keys, self._device)
        return self._views[key]


def _varlen(view: _View, q_THd: Tensor, k_MGd: Tensor, v_MGe: Tensor, terms: Terms, sinks_H: Tensor | None) -> Tensor:
    wanted = v_MGe.shape[-1]
    width = -(-max(q_THd.shape[-1], wanted) // FUSED_STEP) * FUSED_STEP
    copies, (ends, ends_of_keys) = view.copies(), view.ends()
    q, k, v = widen(q_THd, width), *(widen(take(x, copies), width) for x in (k_MGd, v_MGe))
    if sinks_H is not None:
        keys = ends_of_keys, view.most
        out = sunk_attention(q, k, v, sinks_H, ends, view.longest, scale=terms.scale, window=terms.window, keys=keys)
    else:
        kernel, options = varlen_kernel()
        back = (-1 if terms.window is None else terms.window - 1, 0)
        at = (ends, ends_of_keys, view.longest, view.most)
        out = kernel(q, k, v, *at, scale=terms.scale, window_size=back, **options)
    return out if width == wanted else out[..., :wanted]


def _padded(view: _View, q_THd: Tensor, k_MGd: Tensor, v_MGe: Tensor, terms: Terms, sinks_H: Tensor | None) -> Tensor:
    blocks = view.blocks()
    q, k, v = take(q_THd, blocks.queries), take(k_MGd, blocks.keys), take(v_MGe, blocks.keys)
    queries, keys = ([b * each[i] for b, *each in blocks.shapes] for i in (0, 1))
    parts = zip(blocks.shapes, q.split(queries), k.split(keys), v.split(keys), strict=True)
    outs = [_block(view, shape, qb, kb, vb, terms, sinks_H) for shape, qb, kb, vb in parts]
    return take(outs[0] if len(outs) == 1 else torch.cat(outs), blocks.back)


def _block(
    view: _View,
    shape: tuple[int, int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    sinks_H: Tensor | None,
) -> Tensor:
    number, queries, keys = shape
    q_BSHd, k_BNGd, v_BNGe = q.unflatten(0, (number, queries)), *(x.unflatten(0, (number, keys)) for x in (k, v))
    window = None if terms.window is None or terms.window >= keys else terms.window
    large = queries * keys > _MASKED_SCORES and queries != keys
    if sinks_H is not None or terms.softcap is not None or large or (window is not None and queries > _MASKED_LENGTH):
        out_BSHe = masked_attention(q_BSHd, k_BNGd, v_BNGe, replace(terms, window=window), sinks_H=sinks_H)
        return out_BSHe.flatten(0, 1)
    mask_SN = view.mask(queries, keys, window)
    q_BHSd, k_BGNd, v_BGNe = q_BSHd.transpose(1, 2), k_BNGd.transpose(1, 2), v_BNGe.transpose(1, 2)
    return plain_attention(q_BHSd, k_BGNd, v_BGNe, terms.scale, mask_SN).transpose(1, 2).flatten(0, 1)
