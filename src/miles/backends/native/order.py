"""One step as plain arrays: all that a runner needs to make it, and what comes back.

Shapes: T new tokens, B sequences, M most pages of one, D tokens drawn, N prompt tokens scored, V vocabulary, R rows
whose likeliest tokens are asked for, k how many, W (row, token) pairs looked up, E (row, token) pairs edited, K rows
under a mask, Z = V / 32 words of a mask, L layers with experts, x experts a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miles.core.types import Array

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Words = NDArray[np.int32]

_NONE = np.zeros(0, np.int64)
NO_COPIES: tuple[Ints, Ints] = (_NONE, _NONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How each row is drawn: by ``uniform_D`` through the inverse CDF, or the likeliest where the temperature is 0.

    ``filters_D`` says which rows have a top-k, top-p or min-p at all.
    """

    temperature_D: Floats
    top_k_D: Ints
    top_p_D: Floats
    min_p_D: Floats
    filters_D: NDArray[np.bool_]
    uniform_D: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """What the host changes in the logits of rows that draw, in this order, before the temperature.

    ``add_E`` is added (penalties), scores of ``scale_rows_E`` are divided by ``scale_E`` where positive and multiplied
    elsewhere, tokens whose bit (of ``masks_KZ``, lowest first) is 0 become impossible, ``bias_E`` is added.
    """

    add_rows_E: Ints
    add_tokens_E: Ints
    add_E: Floats
    scale_rows_E: Ints
    scale_tokens_E: Ints
    scale_E: Floats
    mask_rows_K: Ints
    masks_KZ: Words
    bias_rows_E: Ints
    bias_tokens_E: Ints
    bias_E: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """What else is read off log-probs: the ``tops`` likeliest of ``rows_R``, and the (row, token) pairs W.

    Rows are in ascending order.
    """

    tops: int
    rows_R: Ints
    watch_rows_W: Ints
    watch_tokens_W: Ints

    def cut(self, first: int, end: int) -> Looks:
        """What is to be read off the rows from ``first`` to ``end``, counted anew."""
        lo, hi = np.searchsorted(self.rows_R, (first, end))
        left, right = np.searchsorted(self.watch_rows_W, (first, end))
        return Looks(
            tops=self.tops,
            rows_R=self.rows_R[lo:hi] - first,
            watch_rows_W=self.watch_rows_W[left:right] - first,
            watch_tokens_W=self.watch_tokens_W[left:right],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Log-probs (of temperature 1) of tokens already there: ``tokens_N`` after the rows ``rows_N`` of the step."""

    rows_N: Ints
    tokens_N: Ints
    looks: Looks | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One step. Arrays and numbers only, so that it can be sent to another rank as bytes.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more; the first ``singles`` of
    them bring one each. Neighbours of one ``group_B`` (-1 is none) begin with the same ``shared_B`` tokens, whole
    pages; who is alone in its group shares 0. A token of -1 is the one last drawn in the seat of its row. ``rows_D``
    are the rows of the T from which a token is drawn for ``seats_D``; some rows give several. ``copies`` of pages and
    ``seat_copies`` of states are (sources, targets), all at once, before anything is written.

    A ``plain`` step is nothing but single tokens, one drawn from each in its order, with nothing scored, looked up
    or edited; there may be copies.
    """

    tokens_T: Ints
    starts_B: Ints
    counts_B: Ints
    seats_B: Ints
    singles: int
    pages_BM: Ints
    shared_B: Ints
    group_B: Ints
    rows_D: Ints
    seats_D: Ints
    manner: Manner
    copies: tuple[Ints, Ints] = NO_COPIES
    seat_copies: tuple[Ints, Ints] = NO_COPIES
    edits: Edits | None = None
    looks: Looks | None = None
    scoring: Scoring | None = None
    plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What ``Looks`` asked for: tokens [R, k], likeliest first, with their log-probs, and log-probs of the pairs."""

    tokens_Rk: Ints
    logprobs_Rk: Floats
    logprobs_W: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What came of a step: drawn tokens with their log-probs, experts of every token, what was looked up and scored."""

    tokens_D: Ints
    logprobs_D: Floats
    routed_TLx: Array | None = None
    looked: Looked | None = None
    scores_N: Floats | None = None
    scores_looked: Looked | None = None


class Flight(Protocol):
    """A step on its way."""

    def land(self) -> Drawn:
        """Wait for the device; an ``EngineError`` when what it computed is not finite. Once only."""
        ...


def positions_of(order: Order) -> Ints:
    """The positions [T] of the new tokens in their sequences."""
    if order.singles == len(order.starts_B):
        return order.starts_B
    ends_B = np.cumsum(order.counts_B)
    return np.arange(int(ends_B[-1])) + np.repeat(order.starts_B - ends_B + order.counts_B, order.counts_B)


def slots_of(order: Order, positions_T: Ints, page_size: int) -> Ints:
    """The slots [T] of the cache that the new tokens' keys and values go to."""
    rows = np.arange(len(order.starts_B))
    owner_T = rows if order.singles == len(rows) else np.repeat(rows, order.counts_B)
    return order.pages_BM[owner_T, positions_T // page_size] * page_size + positions_T % page_size
