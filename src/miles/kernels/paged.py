"""Attention over a paged cache: write the new keys and values into their pages, attend to each sequence's own.

Shapes: T new tokens of all sequences, H query heads, G key-value heads, d head_dim, L layers, P pages of p slots each,
N sequences of a block, Q most new tokens among them, M most pages, C most tokens of context (C <= M * p).

Sequences are attended to in blocks of neighbours, padded to the longest. Reading pages by index and one
fused attention call per block is all there is to it; what a block needs is laid out once for all layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Ints = NDArray[np.int64]

# A further block costs about as much as attending to this many pages with one query.
_BLOCK_COST = 64


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
        self.page_size = page_size
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


@dataclass(frozen=True, slots=True)
class Block:
    """``sequences`` neighbours with up to ``queries`` new tokens each: rows ``first`` to ``last`` of T.

    ``spread`` says which row fills each padded place and ``gather`` which place each row is in; None
    where nothing is padded. ``mask`` is added to the scores.
    """

    first: int
    last: int
    sequences: int
    queries: int
    context: int
    pages: Tensor
    mask_N1QC: Tensor
    spread: Tensor | None
    gather: Tensor | None


@dataclass(frozen=True, slots=True)
class Layout:
    """One step: in which slot each new token goes, and the blocks in the order of T."""

    slots_T: Tensor
    blocks: tuple[Block, ...]


def split(queries: Ints, pages: Ints) -> list[tuple[int, int]]:
    """Cut neighbours into blocks while that saves more padding than a block costs: best first, then each half."""
    total = len(queries)
    whole = total * int(queries.max()) * int(pages.max())
    if total > 1 and whole > 2 * _BLOCK_COST:
        sizes = np.arange(1, total)
        left = sizes * np.maximum.accumulate(queries)[:-1] * np.maximum.accumulate(pages)[:-1]
        right = sizes * np.maximum.accumulate(queries[::-1])[:-1] * np.maximum.accumulate(pages[::-1])[:-1]
        cost = left + right[::-1]
        cut = int(cost.argmin())
        if cost[cut] + _BLOCK_COST < whole:
            cut += 1
            rest = split(queries[cut:], pages[cut:])
            return split(queries[:cut], pages[:cut]) + [(lo + cut, hi + cut) for lo, hi in rest]
    return [(0, total)]


def lay_out(
    starts_B: Ints, counts_B: Ints, pages_BM: Ints, page_size: int, *, device: torch.device, dtype: torch.dtype
) -> tuple[Ints, Layout]:
    """Positions of the new tokens, and the layout of a step.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more. Sequences with
    one new token come first; neighbours should be of like length.
    """
    ends_B = np.cumsum(counts_B)
    firsts_B = ends_B - counts_B
    owner_T = np.repeat(np.arange(len(counts_B)), counts_B)
    positions_T = np.arange(int(ends_B[-1])) - (firsts_B - starts_B)[owner_T]
    slots_T = pages_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size
    context_B = starts_B + counts_B
    needed_B = -(-context_B // page_size)
    singles = int((counts_B == 1).sum())
    bounds = [(0, singles)] if singles > 0 else []
    bounds += [(singles, len(counts_B))] if singles < len(counts_B) else []
    blocks = tuple(
        _block(
            starts_B[base + lo : base + hi],
            counts_B[base + lo : base + hi],
            int(firsts_B[base + lo]),
            pages_BM[base + lo : base + hi, : int(needed_B[base + lo : base + hi].max())],
            device=device,
            dtype=dtype,
        )
        for base, end in bounds
        for lo, hi in split(counts_B[base:end], needed_B[base:end])
    )
    return positions_T, Layout(torch.from_numpy(slots_T).to(device), blocks)


def _block(
    starts_N: Ints, counts_N: Ints, first: int, pages_NM: Ints, *, device: torch.device, dtype: torch.dtype
) -> Block:
    queries = int(counts_N.max())
    context = int((starts_N + counts_N).max())
    positions_NQ = torch.from_numpy(starts_N[:, None] + np.arange(queries)).to(device)
    hidden_NQC = torch.arange(context, device=device) > positions_NQ[..., None]
    mask_NQC = torch.zeros(hidden_NQC.shape, device=device, dtype=dtype).masked_fill_(hidden_NQC, float("-inf"))
    spread = gather = None
    total = int(counts_N.sum())
    if total != len(counts_N) * queries:
        rows_N = np.cumsum(counts_N) - counts_N
        within_NQ = np.minimum(np.arange(queries), counts_N[:, None] - 1)
        real_NQ = np.arange(queries) < counts_N[:, None]
        spread = torch.from_numpy((rows_N[:, None] + within_NQ).ravel()).to(device)
        gather = torch.from_numpy(np.flatnonzero(real_NQ)).to(device)
    return Block(
        first=first,
        last=first + total,
        sequences=len(counts_N),
        queries=queries,
        context=context,
        pages=torch.from_numpy(np.ascontiguousarray(pages_NM).ravel()).to(device),
        mask_N1QC=mask_NQC.unsqueeze(1),
        spread=spread,
        gather=gather,
    )


class PagedAttend:
    """The attention of one step (an ``Attend``): new tokens look at the pages of their own sequence."""

    def __init__(self, cache: PagedCache, layout: Layout) -> None:
        self._cache = cache
        self._layout = layout

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        k_slots, v_slots = self._cache.slots[layer]
        k_slots.index_copy_(0, self._layout.slots_T, k_TGd)
        v_slots.index_copy_(0, self._layout.slots_T, v_TGd)
        outs = [self._attend(block, layer, q_THd, k_TGd.shape[1]) for block in self._layout.blocks]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend(self, block: Block, layer: int, q_THd: Tensor, heads: int) -> Tensor:
        k_pages, v_pages = self._cache.pages[layer]
        n, dim = block.sequences, q_THd.shape[-1]
        k_NGCd = k_pages.index_select(0, block.pages).view(n, -1, heads, dim)[:, : block.context].transpose(1, 2)
        v_NGCd = v_pages.index_select(0, block.pages).view(n, -1, heads, dim)[:, : block.context].transpose(1, 2)
        q_XHd = q_THd[block.first : block.last]
        if block.queries == 1:
            # One query a sequence: the query heads that share a key-value head become its queries.
            q_NGrd = q_XHd.unflatten(1, (heads, -1))
            out_NGrd = F.scaled_dot_product_attention(q_NGrd, k_NGCd, v_NGCd, attn_mask=block.mask_N1QC)
            return out_NGrd.flatten(1, 2)
        if block.spread is not None:
            q_XHd = q_XHd.index_select(0, block.spread)
        q_NHQd = q_XHd.unflatten(0, (n, block.queries)).transpose(1, 2)
        out_NHQd = F.scaled_dot_product_attention(
            q_NHQd, k_NGCd, v_NGCd, attn_mask=block.mask_N1QC, enable_gqa=q_THd.shape[1] != heads
        )
        out_XHd = out_NHQd.transpose(1, 2).flatten(0, 1)
        return out_XHd if block.gather is None else out_XHd.index_select(0, block.gather)
