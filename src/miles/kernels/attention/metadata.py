"""Attention metadata of a step for the torch backend: padded blocks that all layers attend to in a few fused calls.

Shapes: T new tokens of all sequences, B sequences, M pages of the longest; in a block: N rows of pages, Q queries of
the longest row, X real queries, C tokens of the longest context.

Sequences are attended in blocks, padded to the longest; a block is built once for all layers with the same mask. A
*prefill* block has a row per sequence with several new tokens, which attend causally. A *decode* block has a row per
sequence with one. Where adjacent sequences begin with the same pages (samples of one prompt), these are left out of
their decode rows and become one row of a *prefix* block, queried by all of them; the two results are merged by their
sums of exponentials.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.compressed import list_windows
from miles.kernels.runtime.kv_cache import Ints

# A further block costs about as much as attending to this many pages with one query.
_BLOCK_COST = 160


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """Rows of pages and their queries.

    ``queries`` are the N * Q query tokens, repeated where a row has fewer; ``real`` are the indices of the real ones,
    in order. Both are None when all are real and consecutive, from token ``first`` on. ``mask`` [N, 1, Q or 1, C] is
    added to the scores.
    """

    rows: int
    width: int
    first: int
    context: int
    pages: Tensor
    mask: Tensor
    queries: Tensor | None = None
    real: Tensor | None = None

    def select_queries(self, q_THd: Tensor) -> Tensor:
        """The queries of all rows, [N * Q, H, d]; works on any tensor with a row per token."""
        if self.queries is None:
            return q_THd[self.first : self.first + self.rows * self.width]
        return q_THd.index_select(0, self.queries)


@dataclass(frozen=True, slots=True)
class AttentionBlocks:
    """All blocks of a step for layers with the same mask.

    Decode tokens come first, in the order ``decode_order`` (None: already in order); prefix blocks return those of
    ``prefix_tokens``. Prefill tokens follow in order.
    """

    decode: tuple[AttentionBlock, ...]
    decode_order: Tensor | None
    prefix: tuple[AttentionBlock, ...]
    prefix_tokens: Tensor | None
    prefill: tuple[AttentionBlock, ...]


@dataclass(frozen=True, slots=True)
class _VisibleRange:
    """The visible past of a token: at most ``window`` tokens, none outside its ``chunk`` of positions."""

    window: int | None = None
    chunk: int | None = None

    def lowest(self, positions: Ints) -> Ints:
        """The first position that each of these attends to."""
        lowest = np.zeros_like(positions)
        if self.window is not None:
            lowest = np.maximum(lowest, positions + 1 - self.window)
        if self.chunk is not None:
            lowest = np.maximum(lowest, positions // self.chunk * self.chunk)
        return lowest


_FULL = _VisibleRange()


@dataclass(frozen=True, slots=True)
class _BlockFactory:
    """Page size, device and dtype of the metadata."""

    page_size: int
    device: torch.device
    dtype: torch.dtype

    def to_device(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)

    def mask(self, visible: Tensor, context: int, lowest: Tensor | None = None) -> Tensor:
        """Minus infinity from the ``visible``-th token of the context on, and before the ``lowest``."""
        indices = torch.arange(context, device=self.device)
        hidden = indices >= visible[..., None]
        if lowest is not None:
            hidden = hidden | (indices < lowest[..., None])
        return torch.zeros(hidden.shape, device=self.device, dtype=self.dtype).masked_fill_(hidden, -math.inf)


class AttentionMetadata:
    """One step: KV-cache slots of its new tokens, and its blocks, built when the first layer needs them.

    ``longest`` is the length of the longest sequence, new tokens included. New tokens attend to positions before
    ``visible_ends_T``, by default up to their own; those of decode rows must.
    """

    def __init__(
        self,
        starts_B: Ints,
        counts_B: Ints,
        block_table_BM: Ints,
        slots_T: Ints,
        factory: _BlockFactory,
        visible_ends_T: Ints | None = None,
    ) -> None:
        self._starts_B = starts_B
        self._counts_B = counts_B
        self._block_table_BM = block_table_BM
        self._factory = factory
        self._visible_ends_T = visible_ends_T
        self._num_decodes = int((counts_B == 1).sum())
        self._blocks: dict[_VisibleRange, AttentionBlocks] = {}
        self._windows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.page_size = factory.page_size
        self.slots_T = factory.to_device(slots_T)
        self.longest = int((starts_B + counts_B).max())

    @cached_property
    def causal(self) -> AttentionMetadata:
        """The same step for layers that ignore bidirectional spans."""
        if self._visible_ends_T is None:
            return self
        causal = copy(self)
        causal._visible_ends_T = None
        causal._blocks = {}
        causal.__dict__.pop("full_blocks", None)
        return causal

    @cached_property
    def full_blocks(self) -> AttentionBlocks:
        """Blocks for full attention, with prefix blocks for pages that adjacent sequences share."""
        decode_and_prefix = _build_decode(
            self._starts_B[: self._num_decodes], self._block_table_BM[: self._num_decodes], self._factory
        )
        return AttentionBlocks(*decode_and_prefix, self._build_prefill(_FULL))

    def get_blocks(self, window: int | None = None, chunk: int | None = None) -> AttentionBlocks:
        """Blocks without prefixes for this window and chunk: every row holds all that its queries attend to."""
        visible_range = _VisibleRange(window, chunk)
        if visible_range not in self._blocks:
            self._blocks[visible_range] = self._build_blocks(visible_range)
        return self._blocks[visible_range]

    def get_windows(self, rate: int, reach: int) -> tuple[Tensor, Tensor]:
        """Windows of ``rate`` tokens that new tokens complete (``compressed``): the slots of the ``reach`` tokens that
        each reads, and its number in the sequence.
        """
        if (rate, reach) not in self._windows:
            stops_B = self._starts_B + self._counts_B
            owners_M, numbers_M, positions_ML = list_windows(self._starts_B, stops_B, rate, reach)
            pages_ML = self._block_table_BM[owners_M[:, None], positions_ML // self.page_size]
            slots_ML = pages_ML * self.page_size + positions_ML % self.page_size
            self._windows[rate, reach] = self._factory.to_device(slots_ML), self._factory.to_device(numbers_M)
        return self._windows[rate, reach]

    def _build_blocks(self, visible_range: _VisibleRange) -> AttentionBlocks:
        if visible_range == _FULL and self.full_blocks.prefix_tokens is None:
            return self.full_blocks
        starts_B = self._starts_B[: self._num_decodes]
        decode, permutation = (), None
        if self._num_decodes:
            lowest_B = None if visible_range == _FULL else visible_range.lowest(starts_B)
            base_B = np.zeros_like(starts_B) if lowest_B is None else lowest_B // self._factory.page_size
            decode, permutation = _build_decode_blocks(
                starts_B, base_B, lowest_B, self._block_table_BM[: self._num_decodes], self._factory
            )
        return AttentionBlocks(decode, permutation, (), None, self._build_prefill(visible_range))

    def _build_prefill(self, visible_range: _VisibleRange) -> tuple[AttentionBlock, ...]:
        num_decodes, size = self._num_decodes, self._factory.page_size
        if num_decodes == len(self._counts_B):
            return ()
        firsts = np.cumsum(self._counts_B)[num_decodes:] - self._counts_B[num_decodes:]
        starts, counts, pages = (
            self._starts_B[num_decodes:],
            self._counts_B[num_decodes:],
            self._block_table_BM[num_decodes:],
        )
        needed = -(-(starts + counts) // size) - visible_range.lowest(starts) // size
        return tuple(
            _build_prefill_block(
                starts[lo:hi],
                counts[lo:hi],
                int(firsts[lo]),
                pages[lo:hi],
                visible_range,
                self._factory,
                self._visible_ends_T,
            )
            for lo, hi in _split_blocks(counts, needed)
        )


class DecodeMetadata(AttentionMetadata):
    """A step of one new token per sequence whose shapes do not depend on the sequences, so that a CUDA graph may
    capture it: one block of every row, padded to ``context`` tokens, and everything computed on the device.

    ``starts_B`` and ``block_table_BM`` are tensors; every sequence has less than ``context`` tokens, a multiple of the
    page size. What a row has nothing to write to goes to ``padding_slot``, which no sequence has.
    """

    def __init__(
        self,
        starts_B: Tensor,
        slots_T: Tensor,
        block_table_BM: Tensor,
        *,
        context: int,
        page_size: int,
        dtype: torch.dtype,
        padding_slot: int,
    ) -> None:
        assert context % page_size == 0 and context <= block_table_BM.shape[1] * page_size
        self._row_starts_B = starts_B.long()
        self._row_pages_BM = block_table_BM
        self._padding_slot = padding_slot
        self._factory = _BlockFactory(page_size, slots_T.device, dtype)
        self._visible_ends_T = None
        self._blocks = {}
        self._windows = {}
        self.page_size = page_size
        self.slots_T = slots_T
        self.longest = context

    @cached_property
    def full_blocks(self) -> AttentionBlocks:
        """One block for full attention; no prefixes are shared."""
        return self.get_blocks()

    def get_windows(self, rate: int, reach: int) -> tuple[Tensor, Tensor]:
        """The window of each new token: where the token does not complete it, its last slot is the padding slot."""
        if (rate, reach) not in self._windows:
            starts_B = self._row_starts_B
            numbers_B = starts_B // rate
            offsets_L = torch.arange(rate - reach, rate, device=starts_B.device)
            positions_BL = (numbers_B[:, None] * rate + offsets_L).clamp_(min=0)
            pages_BL = self._select_pages(positions_BL // self.page_size)
            slots_BL = pages_BL * self.page_size + positions_BL % self.page_size
            is_open_B = (starts_B + 1) % rate != 0
            slots_BL[:, -1].masked_fill_(is_open_B, self._padding_slot)
            self._windows[rate, reach] = slots_BL, numbers_B
        return self._windows[rate, reach]

    def _build_blocks(self, visible_range: _VisibleRange) -> AttentionBlocks:
        size, starts_B = self.page_size, self._row_starts_B
        limits = [limit for limit in (visible_range.window, visible_range.chunk) if limit is not None]
        # As many tokens, from anywhere in a page on.
        context = min(self.longest, *((limit // size + 2) * size for limit in limits)) if limits else self.longest
        lowest_B = torch.zeros_like(starts_B)
        if visible_range.window is not None:
            lowest_B = (starts_B + 1 - visible_range.window).clamp_(min=0)
        if visible_range.chunk is not None:
            lowest_B = torch.maximum(lowest_B, starts_B // visible_range.chunk * visible_range.chunk)
        first_page_B = lowest_B // size
        columns_C = torch.arange(context // size, device=starts_B.device)
        visible_B = starts_B + 1 - first_page_B * size
        lowest_B11 = (lowest_B - first_page_B * size)[:, None, None] if limits else None
        block = AttentionBlock(
            rows=len(starts_B),
            width=1,
            first=0,
            context=context,
            pages=self._select_pages(first_page_B[:, None] + columns_C).flatten(),
            mask=self._factory.mask(visible_B[:, None, None], context, lowest_B11),
        )
        return AttentionBlocks((block,), None, (), None, ())

    def _select_pages(self, columns_BC: Tensor) -> Tensor:
        """The pages in these columns of the block table; beyond its last one, that."""
        return self._row_pages_BM.gather(1, columns_BC.clamp(max=self._row_pages_BM.shape[1] - 1)).long()


def build_attention_metadata(
    starts_B: Ints,
    counts_B: Ints,
    block_table_BM: Ints,
    page_size: int,
    *,
    device: torch.device,
    dtype: torch.dtype,
    visible_ends_T: Ints | None = None,
) -> tuple[Ints, AttentionMetadata]:
    """Positions of the new tokens, and the attention metadata of a step.

    Sequence b has ``starts_B[b]`` cached tokens and ``counts_B[b]`` new ones. Sequences with one new token come first,
    those that share pages next to each other; the others by similar length. Each new token attends to positions before
    ``visible_ends_T``, all of them in the cache or new; None: up to its own.
    """
    ends_B = np.cumsum(counts_B)
    firsts_B = ends_B - counts_B
    owner_T = np.repeat(np.arange(len(counts_B)), counts_B)
    positions_T = np.arange(int(ends_B[-1])) - (firsts_B - starts_B)[owner_T]
    slots_T = block_table_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size
    return positions_T, AttentionMetadata(
        starts_B, counts_B, block_table_BM, slots_T, _BlockFactory(page_size, device, dtype), visible_ends_T
    )


# -- decode ---------------------------------------------------------------------------------


def _build_decode(
    starts_B: Ints, block_table_BM: Ints, factory: _BlockFactory
) -> tuple[tuple[AttentionBlock, ...], Tensor | None, tuple[AttentionBlock, ...], Tensor | None]:
    """Decode and prefix blocks of sequences with one new token each."""
    if len(starts_B) == 0:
        return (), None, (), None
    groups = (
        _find_shared_prefixes(starts_B // factory.page_size, block_table_BM) if factory.device.type == "cpu" else []
    )
    prefix_B = np.zeros(len(starts_B), np.int64)
    for lo, hi, depth in groups:
        prefix_B[lo:hi] = depth
    prefix, tokens = (), None
    if groups:
        groups.sort(key=lambda group: group[2])
        firsts, ends, depths = (np.array(column) for column in zip(*groups, strict=True))
        cuts = _split_blocks(ends - firsts, depths)
        prefix = tuple(
            _build_prefix_block(firsts[lo:hi], (ends - firsts)[lo:hi], depths[lo:hi], block_table_BM, factory)
            for lo, hi in cuts
        )
        tokens = factory.to_device(np.concatenate([np.arange(lo, hi) for lo, hi, _ in groups]))
    decode, permutation = _build_decode_blocks(starts_B, prefix_B, None, block_table_BM, factory)
    return decode, permutation, prefix, tokens


def _find_shared_prefixes(full_pages_B: Ints, block_table_BM: Ints) -> list[tuple[int, int, int]]:
    """Adjacent sequences (first, end) that share (count) full pages, where that saves more than it costs."""
    max_pages = int(full_pages_B.max())
    both_pages = np.minimum(full_pages_B[1:], full_pages_B[:-1])
    same = (block_table_BM[1:, :max_pages] == block_table_BM[:-1, :max_pages]) & (
        np.arange(max_pages) < both_pages[:, None]
    )
    groups: list[tuple[int, int, int]] = []
    first = depth = saved_pages = 0
    for last, common in enumerate([*np.logical_and.accumulate(same, 1).sum(1).tolist(), 0]):
        size = last + 1 - first
        common_depth = common if size == 1 else min(depth, common)
        if common_depth and common_depth * size >= depth * (size - 1):
            depth = common_depth
            continue
        if size > 1:
            groups.append((first, last + 1, depth))
            saved_pages += (size - 1) * depth
        first, depth = last + 1, 0
    return groups if saved_pages > _BLOCK_COST else []


def _build_decode_blocks(
    starts_B: Ints, base_B: Ints, lowest_B: Ints | None, block_table_BM: Ints, factory: _BlockFactory
) -> tuple[tuple[AttentionBlock, ...], Tensor | None]:
    """Blocks of one query per row, over the pages from ``base_B`` on; and the permutation that restores their order."""
    visible_B = starts_B + 1 - base_B * factory.page_size
    if lowest_B is not None:
        lowest_B = lowest_B - base_B * factory.page_size
    needed_B = -(-visible_B // factory.page_size)
    permutation = np.argsort(needed_B, kind="stable")
    cuts = _split_blocks(np.ones_like(needed_B), needed_B[permutation])
    if len(cuts) == 1:
        return (_build_decode_block(None, visible_B, base_B, lowest_B, block_table_BM, factory),), None
    decode = tuple(
        _build_decode_block(permutation[lo:hi], visible_B, base_B, lowest_B, block_table_BM, factory) for lo, hi in cuts
    )
    return decode, factory.to_device(np.argsort(permutation))


def _build_decode_block(
    rows: Ints | None,
    visible_B: Ints,
    base_B: Ints,
    lowest_B: Ints | None,
    block_table_BM: Ints,
    factory: _BlockFactory,
) -> AttentionBlock:
    """One decode block; ``rows`` None: all rows."""
    if rows is not None:
        visible_B, base_B, block_table_BM = visible_B[rows], base_B[rows], block_table_BM[rows]
        lowest_B = None if lowest_B is None else lowest_B[rows]
    context = int(visible_B.max())
    lowest = None if lowest_B is None else factory.to_device(lowest_B)[:, None, None]
    return AttentionBlock(
        rows=len(visible_B),
        width=1,
        first=0,
        context=context,
        pages=factory.to_device(_select_pages(base_B, -(-context // factory.page_size), block_table_BM).ravel()),
        mask=factory.mask(factory.to_device(visible_B)[:, None, None], context, lowest),
        queries=None if rows is None else factory.to_device(rows),
    )


def _build_prefix_block(
    firsts: Ints, sizes: Ints, depths: Ints, block_table_BM: Ints, factory: _BlockFactory
) -> AttentionBlock:
    """One row per group of adjacent sequences: their shared pages, queried by all of them."""
    queries, real = _pad_rows(sizes)
    queries += (firsts - (np.cumsum(sizes) - sizes))[:, None]
    context = int(depths.max()) * factory.page_size
    return AttentionBlock(
        rows=len(firsts),
        width=int(sizes.max()),
        first=0,
        context=context,
        pages=factory.to_device(block_table_BM[firsts, : int(depths.max())].ravel()),
        mask=factory.mask(factory.to_device(depths * factory.page_size)[:, None, None], context),
        queries=factory.to_device(queries.ravel()),
        real=factory.to_device(real),
    )


# -- prefill --------------------------------------------------------------------------------


def _build_prefill_block(
    starts: Ints,
    counts: Ints,
    first: int,
    pages_NM: Ints,
    visible_range: _VisibleRange,
    factory: _BlockFactory,
    visible_ends_T: Ints | None,
) -> AttentionBlock:
    """One row per sequence: its new tokens attend causally, or to positions before ``visible_ends_T``."""
    base_N = visible_range.lowest(starts) // factory.page_size
    width, context = int(counts.max()), int((starts + counts - base_N * factory.page_size).max())
    queries = real = lowest = None
    if int(counts.min()) < width:
        indices, real_indices = _pad_rows(counts)
        queries, real = factory.to_device((indices + first).ravel()), factory.to_device(real_indices)
    offset_N1 = base_N[:, None] * factory.page_size
    if visible_range != _FULL:
        # A padding query repeats the last real one, so that it sees something.
        positions_NQ = starts[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
        lowest = factory.to_device(visible_range.lowest(positions_NQ) - offset_N1)[:, None]
    visible_NQ = starts[:, None] - offset_N1 + np.arange(1, width + 1)
    if visible_ends_T is not None:
        visible_NQ = visible_ends_T[first + _pad_rows(counts)[0]] - offset_N1
    return AttentionBlock(
        rows=len(starts),
        width=width,
        first=first,
        context=context,
        pages=factory.to_device(_select_pages(base_N, -(-context // factory.page_size), pages_NM).ravel()),
        mask=factory.mask(factory.to_device(visible_NQ)[:, None], context, lowest),
        queries=queries,
        real=real,
    )


# -- helpers --------------------------------------------------------------------------------


def _select_pages(base_N: Ints, count: int, pages_NM: Ints) -> Ints:
    """``count`` pages of each row from ``base_N`` on; beyond a row's last page, any existing one."""
    if not base_N.any():
        return pages_NM[:, :count]
    columns_NM = base_N[:, None] + np.arange(count)
    return np.take_along_axis(pages_NM, np.minimum(columns_NM, pages_NM.shape[1] - 1), 1)


def _pad_rows(counts_N: Ints) -> tuple[Ints, Ints]:
    """Rows of indices padded to equal width with each row's last one, and which entries are real."""
    index_Q = np.arange(int(counts_N.max()))
    firsts_N = np.cumsum(counts_N) - counts_N
    queries_NQ = firsts_N[:, None] + np.minimum(index_Q, counts_N[:, None] - 1)
    return queries_NQ, np.flatnonzero(index_Q < counts_N[:, None])


def _split_blocks(width: Ints, pages: Ints, base: int = 0) -> list[tuple[int, int]]:
    """Split adjacent rows into blocks while that saves more padding than it costs: the best cut, then each half."""
    total = len(width)
    unsplit_cost = total * int(width.max()) * int(pages.max())
    if total > 1 and unsplit_cost > 2 * _BLOCK_COST:
        sizes = np.arange(1, total)
        left = sizes * np.maximum.accumulate(width)[:-1] * np.maximum.accumulate(pages)[:-1]
        right = sizes * np.maximum.accumulate(width[::-1])[:-1] * np.maximum.accumulate(pages[::-1])[:-1]
        cost = left + right[::-1]
        cut = int(cost.argmin())
        if cost[cut] + _BLOCK_COST < unsplit_cost:
            cut += 1
            return _split_blocks(width[:cut], pages[:cut], base) + _split_blocks(width[cut:], pages[cut:], base + cut)
    return [(base, base + total)]
