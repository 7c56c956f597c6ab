"""Attention of one engine step on an accelerator: keys and values into their pages, then each row over its own.

Shapes: T new tokens, B sequences of a step, of which the first have one new token each, M most pages of one, H query
heads, G key-value heads, d channels of a key, e of a value, N = (H + 2 G) * d.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels import alone
from miles.kernels.cache import Held, Ints, PagedCache, SeatedCarry
from miles.kernels.decode import decode_attention
from miles.kernels.latent import head_tiles, latent_decode_attention, latent_prefill_attention
from miles.kernels.prefill import prefill_attention
from miles.kernels.prepare import Heads, prepare
from miles.kernels.terms import Index, Terms
from miles.kernels.tiling import Look
from miles.kernels.work import DecodeWork

# Partial results there is room for beyond two a row: enough for a single row to be spread over a whole card.
_SPARE_ITEMS = 512


class Shape(NamedTuple):
    """Key-value heads and query heads of each (of latent attention tiles of heads, and all of them), and the reach."""

    kv_heads: int
    each: int
    window: int | None = None
    chunk: int | None = None


class Works:
    """How the rows of one step with one new token each are cut into pieces, for every shape of heads there is.

    With each shape comes how many queries meet the same tokens at once. ``read`` says that somebody asked for a cut.
    """

    read: bool = False

    def __init__(self, shapes: Mapping[Shape, int], *, max_rows: int, device: torch.device, sms: int) -> None:
        self._sms, self._device = sms, device
        self._alone: dict[tuple[int, int, int], alone.Scratch] = {}
        max_items = 2 * max_rows + _SPARE_ITEMS
        self._works = {
            shape: DecodeWork(max_rows, max_items, device, trunk_queries=queries) for shape, queries in shapes.items()
        }

    def send(self, lengths_B: Ints, group_B: Ints, shared_B: Ints) -> bool:
        """Lay a step out and send it; whether anyone shares a prefix in it."""
        trunks = False
        for shape, work in self._works.items():
            work.fill(
                *(lengths_B, group_B, shared_B),
                kv_heads=shape.kv_heads,
                queries_per_kv=shape.each,
                sms=self._sms,
                window=shape.window,
                chunk=shape.chunk,
            )
            work.send()
            trunks = trunks or work.has_trunks
        return trunks

    def __getitem__(self, shape: Shape) -> DecodeWork:
        self.read = True
        return self._works[shape]

    def alone(self, groups: int, each: int, width: int) -> alone.Scratch:
        """What a row that is alone needs of room, in layers of this shape; made when the first of them asks."""
        shape = (groups, each, width)
        if shape not in self._alone:
            self._alone[shape] = alone.scratch(*shape, sms=self._sms, device=self._device)
        return self._alone[shape]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where the tokens of a step are and go. ``tiles`` are the new tokens of those who have several."""

    slots_T: Tensor
    pages_BM: Tensor
    rows_B: Tensor
    singles: int
    works: Works
    trunks: bool
    tiles: Tensor | None
    page_size: int


class CardAttend:
    """The attention of one step (an ``Attend``), in device code of our own."""

    latent = True

    def __init__(self, cache: PagedCache, step: Step) -> None:
        self._cache = cache
        self._step = step

    def carry(self, layer: int) -> SeatedCarry:
        raise AssertionError("recurrent layers do not come here")

    def straight(
        self,
        layer: int,
        qkv_TN: Tensor,
        heads: Heads,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """From a layer's projection to what its heads saw, [T, H * d]."""
        held = self._cache.layers[layer]
        assert held.values is not None
        if self._alone(heads) and held.values.slots.shape == held.keys.slots.shape:
            step, groups = self._step, heads.kv_heads
            look = Look(step.page_size, terms.scale, terms.window, terms.chunk, terms.softcap, sinks_H)
            room = step.works.alone(groups, heads.heads // groups, heads.head_dim)
            cached = (held.keys.slots, held.values.slots, step.pages_BM, step.rows_B, step.slots_T)
            return alone.attend_one(qkv_TN, heads, *cached, look, room)
        q_THd = prepare(
            qkv_TN,
            heads=heads.heads,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            rotation=heads.rotation,
            positions_T=heads.positions_T,
            interleaved=heads.interleaved,
            q_weight_d=heads.q_weight_d,
            k_weight_d=heads.k_weight_d,
            eps=heads.eps,
            offset=heads.offset,
            key_slots=held.keys.slots,
            value_slots=held.values.slots,
            slots_T=self._step.slots_T,
        )
        return self._attend(q_THd, held, terms, sinks_H).flatten(1)

    def _alone(self, heads: Heads) -> bool:
        """Whether there is one row, one token of it is new, and one launch can do all there is to do."""
        step = self._step
        few = heads.heads // heads.kv_heads <= alone.MOST_QUERIES and heads.head_dim <= alone.MOST_CHANNELS
        return few and step.singles == len(step.slots_T) == 1 and heads.positions_T is not None

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
        assert index is None, "layers that choose whom they see do not come here"
        held = self._cache.layers[layer]
        held.keys.slots.index_copy_(0, self._step.slots_T, k_TGd)
        if held.values is None:
            return self._latent(q_THd, held, terms, v_TGe.shape[-1])
        held.values.slots.index_copy_(0, self._step.slots_T, v_TGe)
        return self._attend(q_THd, held, terms, sinks_H)

    def _attend(self, q_THd: Tensor, held: Held, terms: Terms, sinks_H: Tensor | None) -> Tensor:
        assert held.values is not None
        step, keys, values = self._step, held.keys.slots, held.values.slots
        kv_heads = keys.shape[1]
        out_THe = q_THd.new_empty(*q_THd.shape[:2], values.shape[-1])
        how: dict[str, Any] = {
            "page_size": step.page_size,
            "scale": terms.scale,
            "window": terms.window,
            "chunk": terms.chunk,
            "softcap": terms.softcap,
            "sinks_H": sinks_H,
        }
        if step.singles:
            read = (q_THd[: step.singles], keys, values, step.pages_BM, step.rows_B[: step.singles])
            work = step.works[Shape(kv_heads, q_THd.shape[1] // kv_heads, terms.window, terms.chunk)]
            decode_attention(*read, work, has_trunks=step.trunks, out=out_THe[: step.singles], **how)
        if step.tiles is not None:
            prefill_attention(q_THd, keys, values, step.pages_BM, step.tiles, out=out_THe, **how)
        return out_THe

    def _latent(self, q_THd: Tensor, held: Held, terms: Terms, width: int) -> Tensor:
        step, keys, heads = self._step, held.keys.slots, q_THd.shape[1]
        out_THe = q_THd.new_empty(len(q_THd), heads, width)
        how: dict[str, Any] = {"value_dim": width, "page_size": step.page_size, "scale": terms.scale}
        if step.singles:
            read = (q_THd[: step.singles], keys, step.pages_BM, step.rows_B[: step.singles])
            work = step.works[Shape(head_tiles(heads), heads)]
            latent_decode_attention(*read, work, has_trunks=step.trunks, out=out_THe[: step.singles], **how)
        if step.tiles is not None:
            latent_prefill_attention(q_THd, keys, step.pages_BM, step.tiles, out=out_THe, **how)
        return out_THe
