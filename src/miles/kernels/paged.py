"""Attention over a paged cache: write the new keys and values into their pages, attend to each sequence's own.

Shapes: T new tokens of all sequences, H query heads, G key-value heads, r = H / G, d head_dim, P pages of p slots,
B sequences, M most pages of one; in a block: N rows of pages, Q most queries of a row, X its real queries,
C most tokens of context.

Sequences are attended to in blocks, padded to the longest, by reading their pages and one fused attention
call; what a block needs is laid out once for all layers. There are three kinds. A *chunk* is a row for each
sequence with several new tokens, which see causally. A *leaf* is a row for each sequence with one. Where
neighbours begin with the same pages (samples of one prompt), these are cut off their leaves and become one
row of a *trunk*, whose queries are all of theirs; the two results are weighted by their sums of exponentials.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Ints = NDArray[np.int64]

# A further block costs about as much as attending to this many pages with one query.
_BLOCK_COST = 160
_SHAPELESS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class PagedCache:
    """Keys and values of every layer. Pages start as zeros: a masked slot must still hold a finite number."""

    def __init__(
        self,
        *,
        layers: int,
        pages: int,
        page_size: int,
        heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._all = _zeros((layers, 2, pages, page_size, heads, head_dim), device, dtype)
        pairs = [layer.unbind(0) for layer in self._all.unbind(0)]
        self.pages = [(k.view(pages, -1), v.view(pages, -1)) for k, v in pairs]
        self.slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in pairs]

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages, all at once: a target may be another's source."""
        device = self._all.device
        source, target = torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device)
        self._all[:, :, target] = self._all[:, :, source]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy leaves zeroing to the operating system: pages nobody uses take no memory and no time.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


# -- the layout of a step -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of pages and their queries.

    ``queries`` are the N * Q tokens that ask, some twice where a row has fewer; ``real`` are those of
    the N * Q places that count, in order. Both are None when every place counts and they are neighbours,
    from token ``first`` on. ``mask`` is added to the scores.
    """

    rows: int
    width: int
    first: int
    context: int
    pages: Tensor
    mask: Tensor
    queries: Tensor | None = None
    real: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """One step: the slot of each new token, and the blocks.

    Single tokens come first. Leaves give them in the order ``leaf_order`` (None: their own); trunks
    give those of ``trunk_tokens``. Chunks follow in their own order.
    """

    slots_T: Tensor
    leaves: tuple[Block, ...]
    leaf_order: Tensor | None
    trunks: tuple[Block, ...]
    trunk_tokens: Tensor | None
    chunks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class _Site:
    """Where a layout is made, and for what."""

    page_size: int
    device: torch.device
    dtype: torch.dtype

    def send(self, values: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int64)).to(self.device)

    def mask(self, visible: Tensor, context: int) -> Tensor:
        """Minus infinity from the ``visible``-th token of the context on."""
        hidden = torch.arange(context, device=self.device) >= visible[..., None]
        return torch.zeros(hidden.shape, device=self.device, dtype=self.dtype).masked_fill_(hidden, -math.inf)


def lay_out(
    starts_B: Ints, counts_B: Ints, pages_BM: Ints, page_size: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Ints, Layout]:
    """Positions of the new tokens, and the layout of a step.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more. Sequences with
    one new token come first, those that share pages as neighbours; further on, those of like length.
    """
    site = _Site(page_size, device, dtype)
    ends_B = np.cumsum(counts_B)
    firsts_B = ends_B - counts_B
    owner_T = np.repeat(np.arange(len(counts_B)), counts_B)
    positions_T = np.arange(int(ends_B[-1])) - (firsts_B - starts_B)[owner_T]
    slots_T = pages_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size
    one = int((counts_B == 1).sum())
    leaves, leaf_order, trunks, trunk_tokens = _singles(starts_B[:one], pages_BM[:one], site)
    needed_B = -(-(starts_B + counts_B) // page_size)
    chunks = tuple(
        _chunk(starts_B[lo:hi], counts_B[lo:hi], int(firsts_B[lo]), pages_BM[lo:hi], site)
        for lo, hi in (_split(counts_B[one:], needed_B[one:], one) if one < len(counts_B) else ())
    )
    return positions_T, Layout(site.send(slots_T), leaves, leaf_order, trunks, trunk_tokens, chunks)


def _singles(
    starts_B: Ints, pages_BM: Ints, site: _Site
) -> tuple[tuple[Block, ...], Tensor | None, tuple[Block, ...], Tensor | None]:
    """Leaves and trunks of sequences with one new token each."""
    if len(starts_B) == 0:
        return (), None, (), None
    groups = _shared(starts_B // site.page_size, pages_BM) if site.device.type == "cpu" else []
    trunk_B = np.zeros(len(starts_B), np.int64)
    for lo, hi, depth in groups:
        trunk_B[lo:hi] = depth
    trunks, tokens = (), None
    if groups:
        groups.sort(key=lambda group: group[2])
        firsts, ends, depths = (np.array(column) for column in zip(*groups, strict=True))
        cuts = _split(ends - firsts, depths)
        trunks = tuple(_trunk(firsts[lo:hi], (ends - firsts)[lo:hi], depths[lo:hi], pages_BM, site) for lo, hi in cuts)
        tokens = site.send(np.concatenate([np.arange(lo, hi) for lo, hi, _ in groups]))
    visible_B = starts_B + 1 - trunk_B * site.page_size
    needed_B = -(-visible_B // site.page_size)
    order = np.argsort(needed_B, kind="stable")
    cuts = _split(np.ones_like(needed_B), needed_B[order])
    if len(cuts) == 1:
        return (_leaf(None, visible_B, trunk_B, pages_BM, site),), None, trunks, tokens
    leaves = tuple(_leaf(order[lo:hi], visible_B, trunk_B, pages_BM, site) for lo, hi in cuts)
    return leaves, site.send(np.argsort(order)), trunks, tokens


def _shared(whole_B: Ints, pages_BM: Ints) -> list[tuple[int, int, int]]:
    """Neighbours (from, to) that begin with the same (count) full pages, where that saves more than it costs."""
    most = int(whole_B.max())
    both = np.minimum(whole_B[1:], whole_B[:-1])
    same = (pages_BM[1:, :most] == pages_BM[:-1, :most]) & (np.arange(most) < both[:, None])
    groups: list[tuple[int, int, int]] = []
    first = depth = saved = 0
    for last, common in enumerate([*np.logical_and.accumulate(same, 1).sum(1).tolist(), 0]):
        size = last + 1 - first
        joined = common if size == 1 else min(depth, common)
        if joined and joined * size >= depth * (size - 1):
            depth = joined
            continue
        if size > 1:
            groups.append((first, last + 1, depth))
            saved += (size - 1) * depth
        first, depth = last + 1, 0
    return groups if saved > _BLOCK_COST else []


def _split(width: Ints, pages: Ints, base: int = 0) -> list[tuple[int, int]]:
    """Cut neighbours into blocks while that saves more padding than a block costs: the best cut, then each half."""
    total = len(width)
    whole = total * int(width.max()) * int(pages.max())
    if total > 1 and whole > 2 * _BLOCK_COST:
        sizes = np.arange(1, total)
        left = sizes * np.maximum.accumulate(width)[:-1] * np.maximum.accumulate(pages)[:-1]
        right = sizes * np.maximum.accumulate(width[::-1])[:-1] * np.maximum.accumulate(pages[::-1])[:-1]
        cost = left + right[::-1]
        cut = int(cost.argmin())
        if cost[cut] + _BLOCK_COST < whole:
            cut += 1
            return _split(width[:cut], pages[:cut], base) + _split(width[cut:], pages[cut:], base + cut)
    return [(base, base + total)]


def _leaf(rows: Ints | None, visible_B: Ints, trunk_B: Ints, pages_BM: Ints, site: _Site) -> Block:
    """One query a row, over the pages behind its trunk; ``rows`` None is all of them."""
    if rows is not None:
        visible_B, trunk_B, pages_BM = visible_B[rows], trunk_B[rows], pages_BM[rows]
    context = int(visible_B.max())
    columns_NM = trunk_B[:, None] + np.arange(-(-context // site.page_size))
    pages_NM = np.take_along_axis(pages_BM, np.minimum(columns_NM, pages_BM.shape[1] - 1), 1)
    return Block(
        rows=len(visible_B),
        width=1,
        first=0,
        context=context,
        pages=site.send(pages_NM.ravel()),
        mask=site.mask(site.send(visible_B)[:, None, None], context),
        queries=None if rows is None else site.send(rows),
    )


def _trunk(firsts: Ints, sizes: Ints, depths: Ints, pages_BM: Ints, site: _Site) -> Block:
    """A row for each group of neighbours: their common pages, asked by all of them."""
    queries, real = _padded(sizes)
    queries += (firsts - (np.cumsum(sizes) - sizes))[:, None]
    context = int(depths.max()) * site.page_size
    return Block(
        rows=len(firsts),
        width=int(sizes.max()),
        first=0,
        context=context,
        pages=site.send(pages_BM[firsts, : int(depths.max())].ravel()),
        mask=site.mask(site.send(depths * site.page_size)[:, None, None], context),
        queries=site.send(queries.ravel()),
        real=site.send(real),
    )


def _chunk(starts: Ints, counts: Ints, first: int, pages_NM: Ints, site: _Site) -> Block:
    """A row for each sequence: its new tokens see what came before them."""
    width, context = int(counts.max()), int((starts + counts).max())
    queries = real = None
    if int(counts.min()) < width:
        places, kept = _padded(counts)
        queries, real = site.send((places + first).ravel()), site.send(kept)
    visible_NQ = site.send(starts[:, None] + np.arange(1, width + 1))
    return Block(
        rows=len(starts),
        width=width,
        first=first,
        context=context,
        pages=site.send(pages_NM[:, : -(-context // site.page_size)].ravel()),
        mask=site.mask(visible_NQ[:, None], context),
        queries=queries,
        real=real,
    )


def _padded(counts_N: Ints) -> tuple[Ints, Ints]:
    """Runs of neighbours as rows of equal width, each filled up with its last one; and which places are not filling."""
    places_Q = np.arange(int(counts_N.max()))
    firsts_N = np.cumsum(counts_N) - counts_N
    queries_NQ = firsts_N[:, None] + np.minimum(places_Q, counts_N[:, None] - 1)
    return queries_NQ, np.flatnonzero(places_Q < counts_N[:, None])


# -- the attention of a step ----------------------------------------------------------------


class PagedAttend:
    """The attention of one step (an ``Attend``): new tokens look at the pages of their own sequence."""

    def __init__(self, cache: PagedCache, layout: Layout) -> None:
        self._cache = cache
        self._layout = layout

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        k_slots, v_slots = self._cache.slots[layer]
        k_slots.index_copy_(0, self._layout.slots_T, k_TGd)
        v_slots.index_copy_(0, self._layout.slots_T, v_TGd)
        # Every step has new shapes, and cuDNN would build a plan for each.
        with sdpa_kernel(_SHAPELESS) if q_THd.is_cuda else nullcontext():
            return self._attend(layer, q_THd, k_TGd.shape[1])

    def _attend(self, layer: int, q_THd: Tensor, heads: int) -> Tensor:
        outs = [self._chunk(block, layer, q_THd, heads) for block in self._layout.chunks]
        if self._layout.leaves:
            outs.insert(0, self._singles(layer, q_THd, heads))
        return _join(outs)

    def _singles(self, layer: int, q_THd: Tensor, heads: int) -> Tensor:
        layout = self._layout
        if layout.trunk_tokens is None:
            out_BHd = _join([self._shared(block, layer, q_THd, heads)[0] for block in layout.leaves])
            return out_BHd if layout.leaf_order is None else out_BHd.index_select(0, layout.leaf_order)
        leaf_BHd, leaf_BH = self._weighed(layout.leaves, layer, q_THd, heads)
        if layout.leaf_order is not None:
            leaf_BHd, leaf_BH = (x.index_select(0, layout.leaf_order) for x in (leaf_BHd, leaf_BH))
        trunk_XHd, trunk_XH = self._weighed(layout.trunks, layer, q_THd, heads)
        tokens = layout.trunk_tokens
        share_XH = torch.sigmoid(trunk_XH - leaf_BH.index_select(0, tokens)).to(q_THd.dtype)
        both_XHd = torch.lerp(leaf_BHd.index_select(0, tokens), trunk_XHd, share_XH.unsqueeze(-1))
        return leaf_BHd.index_copy(0, tokens, both_XHd)

    def _weighed(self, blocks: tuple[Block, ...], layer: int, q_THd: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """What the blocks give, and the logarithms of their sums of exponentials."""
        outs, sums = zip(*(self._shared(block, layer, q_THd, heads, sums=True) for block in blocks), strict=True)
        return _join(outs), _join(sums)

    def _shared(
        self, block: Block, layer: int, q_THd: Tensor, heads: int, *, sums: bool = False
    ) -> tuple[Tensor, Tensor]:
        """All queries of a row see the same: those of a key-value head become the queries of one head."""
        shape = (block.rows, block.width, heads, -1)
        q_XHd = q_THd[: block.rows] if block.queries is None else q_THd.index_select(0, block.queries)
        q_NGqd = q_XHd.unflatten(1, (heads, -1)).unflatten(0, shape[:2]).transpose(1, 2).flatten(2, 3)
        k_NGCd, v_NGCd = self._read(block, layer, heads)
        if sums:
            out_NGqd, sum_NGq = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q_NGqd, k_NGCd, v_NGCd, attn_mask=block.mask
            )
            sum_XH = sum_NGq.unflatten(2, (block.width, -1)).transpose(1, 2).flatten(2).flatten(0, 1)
        else:
            out_NGqd = F.scaled_dot_product_attention(q_NGqd, k_NGCd, v_NGCd, attn_mask=block.mask)
            sum_XH = out_NGqd
        out_XHd = out_NGqd.unflatten(2, (block.width, -1)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        if block.real is None:
            return out_XHd, sum_XH
        return out_XHd.index_select(0, block.real), sum_XH.index_select(0, block.real)

    def _chunk(self, block: Block, layer: int, q_THd: Tensor, heads: int) -> Tensor:
        if block.queries is None:
            q_XHd = q_THd[block.first : block.first + block.rows * block.width]
        else:
            q_XHd = q_THd.index_select(0, block.queries)
        q_NHQd = q_XHd.unflatten(0, (block.rows, block.width)).transpose(1, 2)
        k_NGCd, v_NGCd = self._read(block, layer, heads)
        out_NHQd = F.scaled_dot_product_attention(
            q_NHQd, k_NGCd, v_NGCd, attn_mask=block.mask, enable_gqa=q_THd.shape[1] != heads
        )
        out_XHd = out_NHQd.transpose(1, 2).flatten(0, 1)
        return out_XHd if block.real is None else out_XHd.index_select(0, block.real)

    def _read(self, block: Block, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        k_Pp, v_Pp = self._cache.pages[layer]
        dim = self._cache.slots[layer][0].shape[-1]
        k_NCGd = k_Pp.index_select(0, block.pages).view(block.rows, -1, heads, dim)[:, : block.context]
        v_NCGd = v_Pp.index_select(0, block.pages).view(block.rows, -1, heads, dim)[:, : block.context]
        return k_NCGd.transpose(1, 2), v_NCGd.transpose(1, 2)


def _join(parts: list[Tensor] | tuple[Tensor, ...]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
