"""Attention of an engine's step in exact arithmetic: keys and values into their pages, then each row over its own.

Shapes: T new tokens, B sequences of a step, M most pages of one, H query heads, G key-value heads, d channels of a key,
e of a value.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from miles.kernels.cache import Held, Ints, PagedCache, SeatedCarry
from miles.kernels.card import CardAttend, Shape, Works
from miles.kernels.exact.attention_paged import decode_attention, prefill_attention
from miles.kernels.exact.attention_plain import plain_attention
from miles.kernels.exact.attention_spans import paged_spans
from miles.kernels.exact.attention_tables import even
from miles.kernels.exact.attention_work import ChunkWork
from miles.kernels.prepare import Heads
from miles.kernels.terms import Index, Terms

# Partial results there is room for beyond two a row: a chunk of 512 tokens each.
_SPARE_ITEMS = 2048
# Queries of a trunk: of more than these the states do not all fit the registers, which pays only where a row has many.
_TRUNK_QUERIES, _MANY_HEADS = 32, 8


class ExactPagedAttend:
    """The attention of one step (an ``Attend``) in plain torch.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more, in any order and number. Latent
    attention is asked for its keys and values, so the cache holds those.
    """

    latent = False

    def __init__(self, cache: PagedCache, starts_B: Ints, counts_B: Ints, pages_BM: Ints, page_size: int) -> None:
        self._cache = cache
        self._spans = spans = paged_spans(starts_B, counts_B, pages_BM, page_size)
        assert spans.row_K is not None
        place_T = np.arange(spans.queries) - spans.first_N.repeat(counts_B)
        self._slots_T = torch.from_numpy(spans.row_K[(spans.start_N + starts_B).repeat(counts_B) + place_T])

    def carry(self, layer: int) -> SeatedCarry:
        """What a recurrent layer left behind cannot be told here."""
        raise AssertionError(f"layer {layer} remembers by a state, for which there is no exact arithmetic")

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
        assert index is None, "who may be seen is not chosen in exact arithmetic"
        held, slots_T = self._cache.layers[layer], self._slots_T.to(q_THd.device)
        assert held.values is not None, "values are held apart from keys"
        held.keys.slots.index_copy_(0, slots_T, k_TGd)
        held.values.slots.index_copy_(0, slots_T, v_TGe)
        return plain_attention(q_THd, held.keys.slots, held.values.slots, self._spans, terms, sinks_H)[0]


class ExactWorks(Works):
    """``Works`` of steps that are cut into the chunks of exact attention."""

    def __init__(self, shapes: Mapping[Shape, int], *, max_rows: int, device: torch.device, sms: int) -> None:
        super().__init__({}, max_rows=max_rows, device=device, sms=sms)
        max_items = 2 * max_rows + _SPARE_ITEMS
        self._works = {
            shape: ChunkWork(
                max_rows,
                max_items,
                device,
                trunk_queries=queries if shape.each > _MANY_HEADS else min(queries, _TRUNK_QUERIES),
            )
            for shape, queries in shapes.items()
        }


class ExactCardAttend(CardAttend):
    """The attention of one step (an ``Attend``) on a card. The step's works are ``ExactWorks``.

    Latent attention is asked for its keys and values, so the cache holds those.
    """

    latent = False

    def _alone(self, heads: Heads) -> bool:
        """Never: that launch cuts a row's past by how long it is, and exact sums are cut in one way only."""
        return False

    def _attend(self, q_THd: Tensor, held: Held, terms: Terms, sinks_H: Tensor | None) -> Tensor:
        assert held.values is not None, "values are held apart from keys"
        step, keys, values = self._step, held.keys.slots, held.values.slots
        kv_heads = keys.shape[1]
        q_THd = even(q_THd)
        out_THe = torch.empty(*q_THd.shape[:2], values.shape[-1], dtype=q_THd.dtype, device=q_THd.device)
        if step.singles:
            work = step.works[Shape(kv_heads, q_THd.shape[1] // kv_heads, terms.window, terms.chunk)]
            assert isinstance(work, ChunkWork), "exact attention needs exact works"
            decode_attention(
                *(q_THd[: step.singles], keys, values, step.pages_BM, step.rows_B[: step.singles], work, terms),
                page_size=step.page_size,
                sinks_H=sinks_H,
                out=out_THe[: step.singles],
                has_trunks=step.trunks,
            )
        if step.tiles is not None:
            prefill_attention(
                *(q_THd, keys, values, step.pages_BM, step.tiles, terms),
                page_size=step.page_size,
                sinks_H=sinks_H,
                out=out_THe,
            )
        return out_THe
