"""A step as the scheduler remembers it, and how the order to the runner is made of it.

Shapes: as in ``order``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.backends.native.order import NO_COPIES, Drawn, Edits, Floats, Ints, Looked, Looks, Manner, Order, Scoring
from miles.backends.native.request import Top
from miles.backends.native.sampler import uniforms
from miles.backends.native.seats import Seats
from miles.backends.native.sequence import Sequence
from miles.core.types import Version

Bools = NDArray[np.bool_]
Uints = NDArray[np.uint64]


class Chunk(NamedTuple):
    """The next ``length`` tokens of a sequence that has computed ``start`` of them."""

    sequence: Sequence
    start: int
    length: int


class Fork(NamedTuple):
    """A follower that draws from its leader's logits; ``page`` is for its copy of the prompt's last, unfilled one."""

    leader: Sequence
    follower: Sequence
    page: int


class Scored(NamedTuple):
    """Positions of a prompt that are scored, from ``first`` on, the token before it in ``row`` of the step."""

    sequence: Sequence
    first: int
    length: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One step, as it is remembered until it has landed.

    ``draws`` get a token each, row by row, the last of them by ``forks``. ``lasts_D`` are the rows of those who may
    draw no more after this, ``odd_D`` those whose every token is to be looked at. ``filled`` are those who fill a page
    with what they drew, and up to which token; ``done`` have no more to compute and nothing to draw.
    """

    order: Order
    draws: list[Sequence]
    forks: list[Fork]
    led: list[Sequence]
    filled: list[tuple[Sequence, int]]
    scored: list[Scored]
    done: list[Sequence]
    lasts_D: Ints
    odd_D: Bools | None


class Still(NamedTuple):
    """What stays the same of seats from step to step: how they draw, and whether any is out of the ordinary."""

    seats_D: Ints
    stream_D: Uints
    prompt_D: Ints
    first_D: Ints
    limit_D: Ints
    temperature_D: Floats
    top_k_D: Ints
    top_p_D: Floats
    min_p_D: Floats
    filters_D: Bools
    edited: bool
    looking: bool
    odd_D: Bools | None

    @property
    def plain(self) -> bool:
        """Whether a step of them alone can be recorded."""
        return not (self.edited or self.looking)

    def manner(self, length_D: Ints) -> Manner:
        """How the next token of each is drawn."""
        return Manner(
            temperature_D=self.temperature_D,
            top_k_D=self.top_k_D,
            top_p_D=self.top_p_D,
            min_p_D=self.min_p_D,
            filters_D=self.filters_D,
            uniform_D=uniforms(self.stream_D, (length_D - self.first_D).astype(np.uint64)),
        )


def still_of(seats_D: Ints, seats: Seats) -> Still:
    """What stays the same of these seats."""
    odd_D = seats.odd_S[seats_D]
    return Still(
        seats_D=seats_D,
        stream_D=seats.stream_S[seats_D],
        prompt_D=seats.prompt_S[seats_D],
        first_D=seats.first_S[seats_D],
        limit_D=seats.limit_S[seats_D],
        temperature_D=seats.temperature_S[seats_D],
        top_k_D=seats.top_k_S[seats_D],
        top_p_D=seats.top_p_S[seats_D],
        min_p_D=seats.min_p_S[seats_D],
        filters_D=seats.filters_S[seats_D],
        edited=bool(seats.edited_S[seats_D].any()),
        looking=bool(seats.looking_S[seats_D].any()),
        odd_D=odd_D if odd_D.any() else None,
    )


class Singles(NamedTuple):
    """Those who run one token each, and all about them that stays while they are the same.

    ``found_B`` are their seats in order of rank; ``still`` has them with those who share a prompt as neighbours.
    ``changes`` is how often anyone had come to the hall or gone.
    """

    found_B: Ints
    changes: int
    sequences: list[Sequence]
    still: Still
    group_B: Ints
    shared_B: Ints
    ones_B: Ints
    places_B: Ints


def singles_of(found_B: Ints, changes: int, sequences: Callable[[Ints], list[Sequence]], seats: Seats) -> Singles:
    """Put those next to each other who share a prompt."""
    seats_B = found_B[np.argsort(seats.trunk_S[found_B], kind="stable")]
    group_B, shared_B = groups_of(seats_B, seats)
    return Singles(
        found_B=found_B,
        changes=changes,
        sequences=sequences(seats_B),
        still=still_of(seats_B, seats),
        group_B=group_B,
        shared_B=shared_B,
        ones_B=np.ones(len(seats_B), np.int64),
        places_B=np.arange(len(seats_B)),
    )


def groups_of(seats_B: Ints, seats: Seats) -> tuple[Ints, Ints]:
    """Which neighbours have all pages of a prompt in common, and how many tokens that is."""
    trunk_B, whole_B = seats.trunk_S[seats_B], seats.whole_S[seats_B]
    joined_B = whole_B > 0
    joined_B[1:] &= trunk_B[1:] == trunk_B[:-1]
    joined_B[:1] = False
    group_B = (~joined_B).cumsum() - 1
    return group_B, whole_B * (np.bincount(group_B) > 1)[group_B]


class Rows(NamedTuple):
    """The sequences of a step in order: seats, tokens they have computed and bring, and the row of each one's last."""

    sequences: list[Sequence]
    seats_B: Ints
    starts_B: Ints
    counts_B: Ints
    lasts_B: Ints
    group_B: Ints
    shared_B: Ints
    singles: int


def rows_of(singles: Singles, chunks: Items[Chunk], seats: Seats) -> Rows:
    """Singles first, then chunks; those of one token come first among these."""
    count, seats_B = len(singles.found_B), singles.still.seats_D
    starts_B, counts_B, group_B, shared_B = seats.computed_S[seats_B], singles.ones_B, singles.group_B, singles.shared_B
    if not chunks:
        return Rows(singles.sequences, seats_B, starts_B, counts_B, singles.places_B, group_B, shared_B, count)
    counts_B = np.concatenate((counts_B, [chunk.length for chunk in chunks]))
    return Rows(
        sequences=[*singles.sequences, *(chunk.sequence for chunk in chunks)],
        seats_B=np.concatenate((seats_B, [chunk.sequence.seat for chunk in chunks])),
        starts_B=np.concatenate((starts_B, [chunk.start for chunk in chunks])),
        counts_B=counts_B,
        lasts_B=np.cumsum(counts_B) - 1,
        group_B=np.pad(group_B, (0, len(chunks)), constant_values=-1),
        shared_B=np.pad(shared_B, (0, len(chunks))),
        singles=int((counts_B == 1).sum()),
    )


def tokens_of(rows: Rows, chunks: Items[Chunk], seats: Seats) -> Ints:
    """The new tokens."""
    tokens_B = seats.token_S[rows.seats_B[: len(rows.seats_B) - len(chunks)]]
    if not chunks:
        return tokens_B
    return np.concatenate((tokens_B, *(one.sequence.cut(one.start, one.start + one.length) for one in chunks)))


def edits_of(draws: Items[Sequence], seats: Seats) -> Edits | None:
    """What the host changes in the logits of those who draw."""
    rows = [(row, one) for row, one in enumerate(draws) if seats.edited_S[one.seat]]
    if not rows:
        return None
    added = [pair for row, one in rows for pair in _penalties(row, one, int(seats.length_S[one.seat]))]
    scaled = [
        (row, token, one.ask.repetition_penalty)
        for row, one in rows
        if one.ask.repetition_penalty != 1
        for token in one.counts or ()
    ]
    biased = [(row, token, bias) for row, one in rows for token, bias in one.ask.logit_bias.items()]
    masks = [(row, one.mask_Z) for row, one in rows if one.mask_Z is not None]
    add_rows_E, add_tokens_E, add_E = _columns(added)
    scale_rows_E, scale_tokens_E, scale_E = _columns(scaled)
    bias_rows_E, bias_tokens_E, bias_E = _columns(biased)
    return Edits(
        add_rows_E=add_rows_E,
        add_tokens_E=add_tokens_E,
        add_E=add_E,
        scale_rows_E=scale_rows_E,
        scale_tokens_E=scale_tokens_E,
        scale_E=scale_E,
        mask_rows_K=np.array([row for row, _ in masks], np.int64),
        masks_KZ=np.array([mask for _, mask in masks], np.int32),
        bias_rows_E=bias_rows_E,
        bias_tokens_E=bias_tokens_E,
        bias_E=bias_E,
    )


def _penalties(row: int, sequence: Sequence, length: int) -> Iterator[tuple[int, int, float]]:
    ask = sequence.ask
    if ask.frequency_penalty or ask.presence_penalty:
        for token, count in (sequence.counts or {}).items():
            yield row, token, -(ask.frequency_penalty * count + ask.presence_penalty)
    if length - sequence.prompt_length < ask.min_new_tokens:
        for token in sequence.barred:
            yield row, token, -np.inf


def _columns(triples: Items[tuple[int, int, float]]) -> tuple[Ints, Ints, Floats]:
    rows, tokens, values = zip(*triples, strict=True) if triples else ((), (), ())
    return np.array(rows, np.int64), np.array(tokens, np.int64), np.array(values, np.float32)


def looks_of(asked: Items[tuple[int, Sequence]]) -> Looks | None:
    """What else is read off the log-probs of these rows for these sequences."""
    tops = [(row, min(one.ask.tops, one.vocabulary)) for row, one in asked if one.ask.tops]
    pairs = [(row, token) for row, one in asked for token in one.ask.watch]
    if not tops and not pairs:
        return None
    return Looks(
        tops=max((count for _, count in tops), default=0),
        rows_R=np.array([row for row, _ in tops], np.int64),
        watch_rows_W=np.array([row for row, _ in pairs], np.int64),
        watch_tokens_W=np.array([token for _, token in pairs], np.int64),
    )


def scored_of(rows: Rows, chunks: Items[Chunk]) -> list[Scored]:
    """The positions of prompts that are scored by this step's rows."""
    found: list[Scored] = []
    for chunk, last in zip(chunks, rows.lasts_B[len(rows.lasts_B) - len(chunks) :].tolist(), strict=True):
        one = chunk.sequence
        # The token at a position is scored by the row before it.
        first = max(chunk.start + 1, one.scoring)
        count = min(chunk.start + chunk.length + 1, one.prompt_length) - first
        if count > 0:
            found.append(Scored(one, first, count, last - chunk.length + first - chunk.start))
    return found


def scoring_of(scored: Items[Scored]) -> Scoring | None:
    """What the runner is told of the positions to score."""
    if not scored:
        return None
    owners = enumerate(one.sequence for one in scored for _ in range(one.length))
    looks = looks_of(list(owners)) if any(one.sequence.looking for one in scored) else None
    return Scoring(
        rows_N=np.concatenate([np.arange(one.row, one.row + one.length) for one in scored]),
        tokens_N=np.concatenate([one.sequence.cut(one.first, one.first + one.length) for one in scored]),
        looks=looks,
    )


def copies_of(due: Mapping[int, int]) -> tuple[Ints, Ints]:
    """Copies (to -> from) as sources and targets."""
    return (np.array(list(due.values()), np.int64), np.array(list(due), np.int64)) if due else NO_COPIES


# -- what came of it ------------------------------------------------------------------------


def take_scores(scored: Items[Scored], drawn: Drawn, version: Version) -> None:
    """Give each prompt the log-probs of its positions."""
    assert drawn.scores_N is not None
    values, at = drawn.scores_N.tolist(), 0
    for one in scored:
        one.sequence.scored_under = version
        one.sequence.scores += values[at : at + one.length]
        at += one.length
    if drawn.scores_looked is not None:
        for sequence, tops, watched in _dealt(drawn.scores_looked, ((one.sequence, one.length) for one in scored)):
            sequence.score_tops += tops
            sequence.score_watched += watched


def take_looks(draws: Items[Sequence], looked: Looked) -> None:
    """Give each request what was looked up beside the token it drew."""
    for sequence, tops, watched in _dealt(looked, ((one, 1) for one in draws)):
        if not sequence.reason:
            sequence.tops += tops
            sequence.watched += watched


def _dealt(
    looked: Looked, owners: Iterable[tuple[Sequence, int]]
) -> Iterator[tuple[Sequence, list[tuple[Top, ...]], list[tuple[Top, ...]]]]:
    """What was looked up in the rows of each owner, one after the other."""
    best = zip(looked.tokens_Rk.tolist(), looked.logprobs_Rk.tolist(), strict=True)
    values = iter(looked.logprobs_W.tolist())
    for sequence, count in owners:
        most, watch = sequence.ask.tops, sequence.ask.watch
        rows = [next(best) for _ in range(count if most else 0)]
        tops = [tuple(zip(tokens[:most], logprobs[:most], strict=True)) for tokens, logprobs in rows]
        watched = [tuple((token, next(values)) for token in watch) for _ in range(count if watch else 0)]
        yield sequence, tops, watched
