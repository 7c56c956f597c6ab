"""Request slots: one row of scheduling and sampling state per running request, as arrays a step indexes at once.

Shapes: S slots, P pages of the longest sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miles.backends.native.engine.lora import LoraBatch, LoraSlotTable
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.request import Ints


class ReqSlots:
    """Structure of arrays with one row per running request.

    ``num_computed_S`` tokens have keys and values in the request's pages, counting launched steps; the pages have
    capacity for ``capacity_S``. The request has ``length_S`` tokens, including one that may still be in flight, and
    computes ``target_S`` in all. ``token_S`` is its last token, -1 if it was sampled on the device in this slot.
    ``prefix_page_S`` is the last page that holds only prompt tokens (samples of one prompt share it), and
    ``prefix_tokens_S`` the number of tokens up to its end. Its images end before token ``image_end_S``, and the rope
    positions of tokens behind them are their index plus ``rope_offset_S``; ``num_with_images`` requests have images.
    ``stop_counts_V`` counts the requests each token would end. ``copies`` (target -> source) of recurrent states are
    due before the next step. ``lora_slot_S`` is the device slot of its adapter in ``lora``, -1 without one.
    """

    def __init__(self, count: int, max_pages: int, vocab_size: int, lora: LoraSlotTable | None = None) -> None:
        self.count = count
        self.lora = lora
        self.lora_slot_S = np.full(count, -1, np.int64)
        self.reqs: list[Req | None] = [None] * count
        self.block_table_SP = np.zeros((count, max_pages), np.int64)
        self.num_computed_S = _zeros(count)
        self.length_S = _zeros(count)
        self.target_S = _zeros(count)
        self.capacity_S = _zeros(count)
        self.prompt_S = _zeros(count)
        self.max_length_S = _zeros(count)
        self.token_S = _zeros(count)
        self.prefix_page_S = _zeros(count)
        self.prefix_tokens_S = _zeros(count)
        self.image_end_S = _zeros(count)
        self.rope_offset_S = _zeros(count)
        self.num_with_images = 0
        self.rng_start_S = _zeros(count)
        self.rng_stream_S = np.zeros(count, np.uint64)
        self.stop_counts_V = np.zeros(vocab_size, np.int32)
        self.needs_check_S = np.zeros(count, np.bool_)
        self.has_edits_S = np.zeros(count, np.bool_)
        self.has_queries_S = np.zeros(count, np.bool_)
        self.temperature_S = np.ones(count, np.float32)
        self.top_k_S = _zeros(count)
        self.top_p_S = np.ones(count, np.float32)
        self.min_p_S = np.zeros(count, np.float32)
        self.has_filter_S = np.zeros(count, np.bool_)
        self.copies: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def allocate(self, req: Req) -> None:
        """Give the request a slot, without pages yet."""
        sampling, slot = req.request.sampling, self._free.pop()
        req.slot = slot
        self.reqs[slot] = req
        self.prompt_S[slot] = req.prompt_length
        self.rng_start_S[slot] = req.prompt_length - sampling.num_prior_tokens
        self.length_S[slot] = len(req.tokens)
        self.max_length_S[slot] = req.max_length
        # The last token is never computed; if none is sampled, the whole prompt is.
        self.target_S[slot] = max(req.prompt_length, req.max_length - 1)
        self._count_stops(req, 1)
        self.needs_check_S[slot] = req.needs_token_check
        self.has_edits_S[slot] = req.has_logit_edits
        self.has_queries_S[slot] = req.has_logprob_queries
        self.temperature_S[slot] = sampling.temperature
        self.top_k_S[slot] = sampling.top_k
        self.top_p_S[slot] = sampling.top_p
        self.min_p_S[slot] = sampling.min_p
        filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self.has_filter_S[slot] = sampling.temperature > 0 and filtered
        self.rng_stream_S[slot] = req.rng_stream
        self.image_end_S[slot] = 0 if req.images is None else req.images.end
        self.rope_offset_S[slot] = 0 if req.images is None else req.images.rope_offset
        self.num_with_images += req.images is not None
        self.lora_slot_S[slot] = -1 if req.lora is None or self.lora is None else self.lora.acquire(req.lora)

    def _count_stops(self, req: Req, change: int) -> None:
        for token in req.stop_token_ids:  # a few: an index array would take longer
            self.stop_counts_V[token] += change

    def has_lora_room(self, req: Req) -> bool:
        """Return whether the request's adapter has a device slot, or can get one."""
        return req.lora is None or self.lora is None or self.lora.has_room(req.lora)

    def build_lora_batch(self, req_slots_B: Ints) -> LoraBatch | None:
        """Return the adapters of a step's sequences; None if they have none."""
        return None if self.lora is None else self.lora.build_batch(self.lora_slot_S[req_slots_B])

    def start(self, req: Req, num_computed: int, page_size: int) -> None:
        """Fill in the pages of a request, of which ``num_computed`` tokens are computed."""
        slot, pages = req.slot, req.pages
        self.block_table_SP[slot, : len(pages)] = pages
        # Padded attention reads past the end and masks it: that must not be a page of another request, since a number
        # that is not finite stays so under a mask.
        self.block_table_SP[slot, len(pages) :] = pages[0]
        self.capacity_S[slot] = len(pages) * page_size
        self.num_computed_S[slot] = num_computed
        self.token_S[slot] = req.tokens[-1]
        full_pages = req.prompt_length // page_size
        self.prefix_page_S[slot] = pages[full_pages - 1] if full_pages else -1
        self.prefix_tokens_S[slot] = full_pages * page_size

    def add_page(self, req: Req, page: int, page_size: int) -> None:
        self.block_table_SP[req.slot, len(req.pages)] = page
        self.capacity_S[req.slot] += page_size
        req.pages.append(page)

    def replace_pages(self, req: Req, first: int, pages: Sequence[int], page_size: int) -> None:
        """Put other pages in place of those from the ``first`` on."""
        req.pages = [*req.pages[:first], *pages]
        self.block_table_SP[req.slot, first : len(req.pages)] = pages
        self.block_table_SP[req.slot, len(req.pages) :] = req.pages[0]
        self.capacity_S[req.slot] = len(req.pages) * page_size

    def release(self, req: Req) -> None:
        self._count_stops(req, -1)
        self.num_with_images -= req.images is not None
        self.copies.pop(req.slot, None)
        if req.lora is not None and self.lora is not None:
            self.lora.release(req.lora)
        self._free.append(req.slot)
        self.reqs[req.slot] = None
        req.slot = -1

    def take_copies(self) -> dict[int, int]:
        """Return the due copies; the caller must perform them."""
        copies, self.copies = self.copies, {}
        return copies


def _zeros(count: int) -> Ints:
    return np.zeros(count, np.int64)
