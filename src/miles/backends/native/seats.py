"""The seats requests run in: a row of numbers for each, as arrays that a step indexes at once.

Shapes: S seats, P pages of the longest sequence, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from miles.backends.native.order import Ints
from miles.backends.native.sampler import streams
from miles.backends.native.sequence import Sequence


class Seats:
    """A row for each request that runs: how far it is, its pages, and how its tokens are drawn.

    Of a request in a seat, keys and values of ``computed_S`` tokens are in its pages as far as steps were launched,
    and there is room for ``room_S``. It has ``length_S`` tokens, one that has not landed yet among them, and is to
    compute ``target_S``. ``token_S`` is its last token, -1 where it was drawn in this seat. ``trunk_S`` is the last
    page that holds nothing but prompt (samples of one prompt have it in common), and ``whole_S`` the tokens up to
    its end. ``ends_V`` counts the requests a token would end. ``copies`` (to -> from) of states are due before the
    next step.
    """

    def __init__(self, count: int, max_pages: int, vocabulary: int) -> None:
        self.count = count
        self.holders: list[Sequence | None] = [None] * count
        self.pages_SP = np.zeros((count, max_pages), np.int64)
        self.computed_S, self.length_S, self.target_S, self.room_S = (_ints(count) for _ in range(4))
        self.prompt_S, self.limit_S, self.token_S, self.trunk_S, self.whole_S = (_ints(count) for _ in range(5))
        self.first_S = _ints(count)
        self.ends_V = np.zeros(vocabulary, np.int32)
        self.odd_S, self.edited_S, self.looking_S = (np.zeros(count, np.bool_) for _ in range(3))
        self.temperature_S = np.ones(count, np.float32)
        self.top_k_S = _ints(count)
        self.top_p_S = np.ones(count, np.float32)
        self.min_p_S = np.zeros(count, np.float32)
        self.filters_S = np.zeros(count, np.bool_)
        self.stream_S = np.zeros(count, np.uint64)
        self.copies: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many more may sit down."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        """Sit down, without pages yet."""
        how, seat = sequence.ask.sampling, self._free.pop()
        sequence.seat = seat
        self.holders[seat] = sequence
        self.prompt_S[seat] = sequence.prompt_length
        self.first_S[seat] = sequence.prompt_length - how.drawn
        self.length_S[seat] = len(sequence.tokens)
        self.limit_S[seat] = sequence.limit
        # The last token is never computed; without any to draw, the prompt is.
        self.target_S[seat] = max(sequence.prompt_length, sequence.limit - 1)
        self.ends_V[list(sequence.ends)] += 1
        self.odd_S[seat] = sequence.odd
        self.edited_S[seat] = sequence.edited
        self.looking_S[seat] = sequence.looking
        self.temperature_S[seat] = how.temperature
        self.top_k_S[seat] = how.top_k
        self.top_p_S[seat] = how.top_p
        self.min_p_S[seat] = how.min_p
        self.filters_S[seat] = how.temperature > 0 and (how.top_k > 0 or how.top_p < 1 or how.min_p > 0)
        self.stream_S[seat] = streams(np.array([how.seed & 0xFFFFFFFFFFFFFFFF], np.uint64))[0]

    def begin(self, sequence: Sequence, computed: int, page_size: int) -> None:
        """Go on from ``computed`` tokens in the pages the sequence has."""
        seat, pages = sequence.seat, sequence.pages
        self.pages_SP[seat, : len(pages)] = pages
        self.room_S[seat] = len(pages) * page_size
        self.computed_S[seat] = computed
        self.token_S[seat] = sequence.tokens[-1]
        whole = sequence.prompt_length // page_size
        self.trunk_S[seat] = pages[whole - 1] if whole else -1
        self.whole_S[seat] = whole * page_size

    def grow(self, sequence: Sequence, page: int, page_size: int) -> None:
        """One more page."""
        self.pages_SP[sequence.seat, len(sequence.pages)] = page
        self.room_S[sequence.seat] += page_size
        sequence.pages.append(page)

    def leave(self, sequence: Sequence) -> None:
        self.ends_V[list(sequence.ends)] -= 1
        self.copies.pop(sequence.seat, None)
        self._free.append(sequence.seat)
        self.holders[sequence.seat] = None
        sequence.seat = -1

    def take_copies(self) -> dict[int, int]:
        """The copies that are due, now the caller's duty."""
        copies, self.copies = self.copies, {}
        return copies


def _ints(count: int) -> Ints:
    return np.zeros(count, np.int64)
