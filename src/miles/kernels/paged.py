"""Attention over a paged cache: write the new keys and values into their pages, attend to each sequence's own.

Shapes: T new tokens of all sequences, B of them the only one of their sequence, H query heads, G key-value heads,
r = H / G, d channels of a key, e of a value; in a block: N rows of pages, Q most queries of a row, q some of them,
X its real ones, C most tokens of context, R = Q * r, h some heads of an index, k tokens it chooses.

Layers that see all that came before take the blocks with trunks; those that see less, or weigh it otherwise, take
blocks in which every row holds all its queries see. Where nothing is out of reach yet, they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.cache import Held, Ints, KvShape, Paged, PagedCache, Seated, SeatedCarry, States
from miles.kernels.layout import Block, Blocks, Layout, lay_out
from miles.kernels.terms import Index, Terms

__all__ = ["Ints", "KvShape", "PagedAttend", "PagedCache", "States", "lay_out"]

_SHAPELESS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# The most scores that are written out at once.
_SCORES = 1 << 26


class _Ask(NamedTuple):
    """What one layer asks, of how many key-value heads."""

    q_THd: Tensor
    held: Held
    heads: int
    terms: Terms
    sinks_H: Tensor | None

    def read(self, block: Block) -> tuple[Tensor, Tensor]:
        """Keys and values of a block; values that are read off the keys are the keys as they are."""
        keys, values = self.held.keys, self.held.values
        k_NGCd = keys.read(block.pages, block.rows, block.context).transpose(1, 2)
        if values is None:
            return k_NGCd, k_NGCd
        return k_NGCd, values.read(block.pages, block.rows, block.context).transpose(1, 2)


class PagedAttend:
    """The attention of one step (an ``Attend``): new tokens look at the pages of their own sequence.

    ``seated`` are the states of a model that has recurrent layers.
    """

    latent = True

    def __init__(self, cache: PagedCache, layout: Layout, seated: Seated | None = None) -> None:
        self._cache = cache
        self._layout = layout
        self._seated = seated
        self._choices: dict[int, list[Tensor] | None] = {}

    def carry(self, layer: int) -> SeatedCarry:
        """What a recurrent layer left behind, and where to leave it."""
        assert self._seated is not None, "a model with recurrent layers needs states"
        return self._seated.carry(layer)

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        held, slots_T = self._cache.layers[layer], self._layout.slots_T
        held.keys.slots.index_copy_(0, slots_T, k_TGd)
        if held.values is not None:
            held.values.slots.index_copy_(0, slots_T, v_TGe)
        chosen = None if index is None else self._choose(layer, held, index)
        ask = _Ask(q_THd, held, k_TGd.shape[1], terms, sinks_H)
        # Every step has new shapes, and cuDNN would build a plan for each.
        with sdpa_kernel(_SHAPELESS) if q_THd.is_cuda else nullcontext():
            out_THe = self._attend(ask, chosen)
        return out_THe if held.values is not None else out_THe[..., : v_TGe.shape[-1]]

    def _attend(self, ask: _Ask, chosen: list[Tensor] | None) -> Tensor:
        window, chunk = self._binding(ask.terms.window), self._binding(ask.terms.chunk)
        written_out = ask.terms.softcap is not None or ask.sinks_H is not None
        # Without one width of keys and values there is no attention that also gives sums of exponentials.
        if window is None and chunk is None and chosen is None and not written_out and ask.held.even:
            return self._shared(ask)
        assert chosen is None or (window is None and chunk is None), "an index chooses among all that came before"
        blocks = self._layout.seen(window, chunk)
        masks = [block.mask for block in (*blocks.leaves, *blocks.chunks)] if chosen is None else chosen
        return _seen(ask, blocks, masks, written_out)

    def _binding(self, reach: int | None) -> int | None:
        """A reach that someone's context exceeds already."""
        return None if reach is None or reach >= self._layout.longest else reach

    # -- everyone sees all that came before -------------------------------------------------

    def _shared(self, ask: _Ask) -> Tensor:
        blocks = self._layout.shared
        outs = [_chunk(ask, block, block.mask) for block in blocks.chunks]
        if blocks.leaves:
            outs.insert(0, self._singles(ask))
        return _join(outs)

    def _singles(self, ask: _Ask) -> Tensor:
        blocks = self._layout.shared
        if blocks.trunk_tokens is None:
            out_BHe = _join([_alike(ask, block, block.mask) for block in blocks.leaves])
            return out_BHe if blocks.leaf_order is None else out_BHe.index_select(0, blocks.leaf_order)
        leaf_BHe, leaf_BH = _weighed(ask, blocks.leaves)
        if blocks.leaf_order is not None:
            leaf_BHe, leaf_BH = (x.index_select(0, blocks.leaf_order) for x in (leaf_BHe, leaf_BH))
        trunk_XHe, trunk_XH = _weighed(ask, blocks.trunks)
        tokens = blocks.trunk_tokens
        share_XH = torch.sigmoid(trunk_XH - leaf_BH.index_select(0, tokens)).to(ask.q_THd.dtype)
        both_XHe = torch.lerp(leaf_BHe.index_select(0, tokens), trunk_XHe, share_XH.unsqueeze(-1))
        return leaf_BHe.index_copy(0, tokens, both_XHe)

    # -- some see only what an index chose --------------------------------------------------

    def _choose(self, layer: int, held: Held, index: Index | int) -> list[Tensor] | None:
        """Masks, one a block, of the tokens that may be seen; None while that is all of them."""
        if not isinstance(index, Index):
            return self._choices[index]
        assert held.index is not None, "a layer that chooses keeps index keys"
        held.index.slots.index_copy_(0, self._layout.slots_T, index.k_Td)
        self._choices[layer] = None
        if index.top < self._layout.longest:
            blocks = self._layout.seen()
            self._choices[layer] = [_best(block, held.index, index) for block in (*blocks.leaves, *blocks.chunks)]
        return self._choices[layer]


# -- a block at a time ----------------------------------------------------------------------


def _seen(ask: _Ask, blocks: Blocks, masks: Sequence[Tensor], written_out: bool) -> Tensor:
    """Blocks without trunks, under these masks."""
    one, leaves = (_written_out, _written_out) if written_out else (_chunk, _alike)
    kinds = [leaves] * len(blocks.leaves) + [one] * len(blocks.chunks)
    everyone = zip(kinds, (*blocks.leaves, *blocks.chunks), masks, strict=True)
    outs = [kind(ask, block, mask) for kind, block, mask in everyone]
    if blocks.leaf_order is not None:
        cut = len(blocks.leaves)
        outs = [_join(outs[:cut]).index_select(0, blocks.leaf_order), *outs[cut:]]
    return _join(outs)


def _alike(ask: _Ask, block: Block, mask: Tensor) -> Tensor:
    """All queries of a row see the same: those of a key-value head become the queries of one head."""
    out_NGRe = F.scaled_dot_product_attention(
        _folded(ask, block), *ask.read(block), attn_mask=mask, scale=ask.terms.scale
    )
    return _unfolded(out_NGRe, block).flatten(2, 3).flatten(0, 1)


def _weighed(ask: _Ask, blocks: Sequence[Block]) -> tuple[Tensor, Tensor]:
    """What blocks whose rows see the same give, and the logarithms of their sums of exponentials."""
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for block in blocks:
        out_NGRe, sum_NGR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _folded(ask, block), *ask.read(block), attn_mask=block.mask, scale=ask.terms.scale
        )
        out_XHe, sum_XH = (_unfolded(x, block).flatten(2, 3).flatten(0, 1) for x in (out_NGRe, sum_NGR))
        outs.append(out_XHe if block.real is None else out_XHe.index_select(0, block.real))
        sums.append(sum_XH if block.real is None else sum_XH.index_select(0, block.real))
    return _join(outs), _join(sums)


def _folded(ask: _Ask, block: Block) -> Tensor:
    q_XHd = block.ask(ask.q_THd)
    q_NQGrd = q_XHd.unflatten(1, (ask.heads, -1)).unflatten(0, (block.rows, block.width))
    return q_NQGrd.transpose(1, 2).flatten(2, 3)


def _unfolded(x_NGR: Tensor, block: Block) -> Tensor:
    """The queries of each row apart again, [N, Q, G, r, ...]."""
    return x_NGR.unflatten(2, (block.width, -1)).transpose(1, 2)


def _chunk(ask: _Ask, block: Block, mask: Tensor) -> Tensor:
    """Every query of a row sees its own."""
    q_NHQd = block.ask(ask.q_THd).unflatten(0, (block.rows, block.width)).transpose(1, 2)
    out_NHQe = F.scaled_dot_product_attention(
        q_NHQd,
        *ask.read(block),
        attn_mask=mask,
        scale=ask.terms.scale,
        enable_gqa=ask.q_THd.shape[1] != ask.heads,
    )
    return _real(out_NHQe, block)


def _written_out(ask: _Ask, block: Block, mask: Tensor) -> Tensor:
    """Scores are bounded, or some of the weight goes to a sink: written out, in float32, some queries at a time."""
    wide = torch.promote_types(ask.q_THd.dtype, torch.float32)
    k_NGCd, v_NGCe = (x.to(wide) for x in ask.read(block))
    q_NQHd = block.ask(ask.q_THd).unflatten(0, (block.rows, block.width))
    q_NGrQd = q_NQHd.transpose(1, 2).unflatten(1, (ask.heads, -1)).to(wide)
    step = max(1, _SCORES // (block.rows * q_NQHd.shape[2] * block.context))
    outs: list[Tensor] = []
    for lo in range(0, block.width, step):
        q_NGrqd = q_NGrQd[..., lo : lo + step, :]
        scores_NGrqC = (q_NGrqd.flatten(2, 3) @ k_NGCd.transpose(-1, -2)).view(*q_NGrqd.shape[:4], -1)
        scores_NGrqC.mul_(ask.terms.scale)
        if ask.terms.softcap is not None:
            scores_NGrqC.div_(ask.terms.softcap).tanh_().mul_(ask.terms.softcap)
        scores_NGrqC.add_(mask[:, :, None, lo : lo + step])
        total_NGrq1 = scores_NGrqC.logsumexp(-1, keepdim=True)
        if ask.sinks_H is not None:
            total_NGrq1 = torch.logaddexp(total_NGrq1, ask.sinks_H.to(wide).view(ask.heads, -1, 1, 1))
        shares_NGrqC = scores_NGrqC.sub_(total_NGrq1).exp_()
        out_NGrqe = (shares_NGrqC.flatten(2, 3) @ v_NGCe).view(*q_NGrqd.shape[:4], -1)
        outs.append(out_NGrqe.flatten(1, 2).to(ask.q_THd.dtype))
    return _real(outs[0] if len(outs) == 1 else torch.cat(outs, 2), block)


def _real(out_NHQe: Tensor, block: Block) -> Tensor:
    out_XHe = out_NHQe.transpose(1, 2).flatten(0, 1)
    return out_XHe if block.real is None else out_XHe.index_select(0, block.real)


def _best(block: Block, keys: Paged, index: Index) -> Tensor:
    """The block's mask, narrowed to the best tokens of each query."""
    q_NQHd, weights_NQH = (
        block.ask(x).unflatten(0, (block.rows, block.width)).float() for x in (index.q_THd, index.weights_TH)
    )
    k_N1dC = keys.read(block.pages, block.rows, block.context).float().transpose(1, 2).unsqueeze(1)
    scores_NQC = block.mask.squeeze(1).float().expand(-1, block.width, -1)
    step = max(1, _SCORES // scores_NQC.numel())
    for q_NQhd, weights_NQh in zip(q_NQHd.split(step, 2), weights_NQH.split(step, 2), strict=True):
        scores_NQC = scores_NQC + (weights_NQh.unsqueeze(-2) @ (q_NQhd @ k_N1dC).relu_()).squeeze(-2)
    best_NQk = scores_NQC.topk(min(index.top, block.context), dim=-1).indices
    narrow_NQC = torch.full_like(scores_NQC, -torch.inf, dtype=block.mask.dtype).scatter_(-1, best_NQk, 0.0)
    return block.mask + narrow_NQC.unsqueeze(1)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
