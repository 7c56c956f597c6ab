"""What a runner does otherwise on an accelerator: device code for attention and drawing, and recorded steps.

Shapes: as in ``order``; S seats.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.graphs import Graphs, Key
from miles.backends.native.order import Ints, Manner, Order
from miles.backends.native.sending import Sender
from miles.core.types import Array
from miles.kernels.arithmetic import exact
from miles.kernels.cache import PagedCache
from miles.kernels.card import CardAttend, Shape, Step, Works
from miles.kernels.device_code import HAVE_TRITON, processors
from miles.kernels.draw import draw
from miles.kernels.exact.draw import draw as exact_draw
from miles.kernels.exact.paged import ExactCardAttend, ExactWorks
from miles.kernels.latent import head_tiles
from miles.kernels.prefill import prefill_tiles
from miles.models.decoder import Decoder
from miles.models.door import Model
from miles.models.spec import AttentionSpec, DecoderSpec, MlaSpec

# Queries that meet the tokens of a shared prefix at once; of wide numbers and latent vectors fewer fit a processor.
_QUERIES, _WIDE_QUERIES = 64, 16


class Card:
    """The device code of one engine. The cache has a page, and ``drawn_S`` a seat, that no request is ever given."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        seats: int,
        longest: int,
        page_size: int,
        send: Sender,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        sms = processors(device)
        works = ExactWorks if exact() else Works
        self._works = works(_shapes(spec, dtype), max_rows=seats, device=device, sms=sms)
        self._seats, self._longest, self._page_size, self._send = seats, longest, page_size, send
        self._device = device
        self._warmed: set[Key] = set()

    def graphs(
        self, decoder: Decoder, cache: PagedCache, drawn_S: Tensor, spare: int, none_expert: Array | None
    ) -> Graphs:
        """Recordings of steps over this cache, of which ``spare`` is the page that is no request's."""
        return Graphs(
            decoder,
            cache=cache,
            works=self._works,
            drawn_S=drawn_S,
            max_rows=self._seats,
            longest=self._longest,
            page_size=self._page_size,
            spare_slot=spare * self._page_size,
            none_expert=none_expert,
            warmed=self._warmed,
        )

    def attend(self, order: Order, positions_T: Ints, cache: PagedCache) -> CardAttend:
        """The attention of a step that is not recorded: single tokens, and chunks of prompts beside them."""
        n, size = order.singles, self._page_size
        rows = np.arange(len(order.seats_B))
        pages_T = order.pages_BM[rows.repeat(order.counts_B), positions_T // size]
        chunks = slice(n, None)
        tiles = prefill_tiles(order.starts_B[chunks], order.counts_B[chunks], rows[chunks], n)
        (slots_T,) = self._send(pages_T * size + positions_T % size)
        pages_BM, rows_B, tiles_I4 = self._send(order.pages_BM.astype(np.int32), rows.astype(np.int32), tiles)
        trunks = n > 0 and self._works.send(order.starts_B[:n] + 1, order.group_B[:n], order.shared_B[:n])
        step = Step(
            slots_T=slots_T,
            pages_BM=pages_BM,
            rows_B=rows_B,
            singles=n,
            works=self._works,
            trunks=trunks,
            tiles=tiles_I4 if len(tiles) else None,
            page_size=size,
        )
        return ExactCardAttend(cache, step) if exact() else CardAttend(cache, step)

    def draw(self, logits_DV: Tensor, manner: Manner) -> tuple[Tensor, Tensor]:
        """Tokens and their log-probs, one a row."""
        floats = (manner.temperature_D, manner.uniform_D, manner.top_p_D, manner.min_p_D)
        temperature_D, uniform_D, top_p_D, min_p_D = self._send(*floats)
        (top_k_D,) = self._send(manner.top_k_D)
        tokens_D = torch.empty(len(logits_DV), dtype=torch.int64, device=self._device)
        logprobs_D = torch.empty(len(logits_DV), dtype=torch.float32, device=self._device)
        drawing = exact_draw if exact() else draw
        drawing(
            logits_DV,
            temperature_D,
            uniform_D,
            top_k_B=top_k_D,
            top_p_B=top_p_D,
            min_p_B=min_p_D,
            filters=bool(manner.filters_D.any()),
            tokens_out_B=tokens_D,
            logprobs_out_B=logprobs_D,
        )
        return tokens_D, logprobs_D


def fits(spec: DecoderSpec, model: Model, device: torch.device) -> bool:
    """Whether device code serves a model: our own, of layers that all look back at keys and values, none by choice."""
    mixers = [layer.mixer for layer in spec.layers]
    plain = all(
        mixer is None or isinstance(mixer, AttentionSpec) or (isinstance(mixer, MlaSpec) and mixer.indexer is None)
        for mixer in mixers
    )
    return device.type == "cuda" and HAVE_TRITON and plain and isinstance(model, Decoder)


def _shapes(spec: DecoderSpec, dtype: torch.dtype) -> Mapping[Shape, int]:
    shapes: dict[Shape, int] = {}
    for mixer in (layer.mixer for layer in spec.layers):
        if isinstance(mixer, AttentionSpec):
            each = mixer.num_heads // mixer.num_kv_heads
            shapes[Shape(mixer.num_kv_heads, each, mixer.window, mixer.chunk)] = _QUERIES
        elif isinstance(mixer, MlaSpec) and exact():  # from keys and values, as in training
            shapes[Shape(mixer.num_heads, 1)] = _QUERIES
        elif isinstance(mixer, MlaSpec):
            shape = Shape(head_tiles(mixer.num_heads), mixer.num_heads)
            shapes[shape] = _QUERIES if dtype.itemsize == 2 else _WIDE_QUERIES
    return shapes
