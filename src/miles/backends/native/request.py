"""A request, what its sequence remembers while it runs, and the seat it runs in.

Shapes: S seats, P pages of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from miles.core.protocols import Completion, Sampling
from miles.core.types import EMPTY, Array, Author, Span, Status, Version

Decode = Callable[[Items[int]], str]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The memory of one request.

    ``tokens`` are the prompt and what was drawn; keys and values of the first ``computed`` of them are
    in ``pages``. A token in ``ends`` ends it; the last ``tail`` tokens are searched for stop strings,
    if there are any. ``stamps`` say from which drawn token on which version wrote. ``followers`` have the
    same prompt, arrived while it was being computed, and take it over when it is done.
    """

    number: int
    prompt_length: int
    key: bytes
    sampling: Sampling
    ends: frozenset[int]
    tail: int
    tokens: list[int]
    logprobs: list[float] = field(default_factory=list)
    stamps: list[tuple[int, Version]] = field(default_factory=list)
    routed: list[Array] = field(default_factory=list)
    reason: str = ""
    cached_tokens: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    epoch: int = -1
    seat: int = -1
    followers: list[Sequence] = field(default_factory=list)

    @property
    def fresh(self) -> bool:
        """Nothing was drawn yet."""
        return len(self.tokens) == self.prompt_length

    def remember(self, token: int, logprob: float, version: Version, decode: Decode | None) -> bool:
        """Take a drawn token in; true when it was the last one, and then ``reason`` says why."""
        tokens = self.tokens
        if not self.stamps or self.stamps[-1][1] != version:
            self.stamps.append((len(self.logprobs), version))
        tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.ends or (self.tail and self._stopped(decode)):
            self.reason = "stop"
        elif len(tokens) - self.prompt_length >= self.sampling.max_new_tokens:
            self.reason = "length"
        return self.reason != ""

    def _stopped(self, decode: Decode | None) -> bool:
        assert decode is not None
        text = decode(self.tokens[max(self.prompt_length, len(self.tokens) - self.tail) :])
        return any(stop in text for stop in self.sampling.stop)

    def completion(self, none_expert: Array | None) -> Completion:
        """What was written, one span a version. ``none_expert`` [L, k] is the routing of a token never computed."""
        bounds = [*(start for start, _ in self.stamps), len(self.logprobs)]
        tokens = np.array(self.tokens[self.prompt_length :], np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        routed = None
        if none_expert is not None:
            missing = len(tokens) - len(self.routed)
            routed = np.array([*self.routed, *[none_expert] * missing], none_expert.dtype)
        spans = tuple(
            Span(
                author=Author.POLICY,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                extras=EMPTY if routed is None else {"routed_experts": routed[start:end]},
            )
            for (start, version), end in zip(self.stamps, bounds[1:], strict=True)
        )
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(self.reason, Status.ABORTED)
        return Completion(
            spans=spans, status=status, reason=self.reason or "abort", cached_tokens=max(0, self.cached_tokens)
        )


def tail_of(stop: Items[str]) -> int:
    """How many last tokens can hold a stop string that the very last one completed.

    A token is at least one byte, so a string of n bytes lies in n tokens; four more keep it clear of a
    character that the cut may have split.
    """
    return 4 + max(len(text.encode()) for text in stop) if stop else 0


class Seats:
    """A row for each request that runs: its pages and how its tokens are drawn, as arrays a step can index.

    ``copies`` (to -> from) are due before the next step: whoever sits in the one goes on from where the other is.
    """

    def __init__(self, count: int, max_pages: int) -> None:
        self.pages_SP = np.zeros((count, max_pages), np.int64)
        self.temperature_S = np.ones(count, np.float32)
        self.top_k_S = np.zeros(count, np.int64)
        self.top_p_S = np.ones(count, np.float32)
        self.min_p_S = np.zeros(count, np.float32)
        self.filters_S = np.zeros(count, np.bool_)
        self.seed_S = np.zeros(count, np.uint64)
        self.copies: dict[int, int] = {}
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many more may sit down."""
        return len(self._free)

    def take(self, sequence: Sequence) -> None:
        how, seat = sequence.sampling, self._free.pop()
        sequence.seat = seat
        self.temperature_S[seat] = how.temperature
        self.top_k_S[seat] = how.top_k
        self.top_p_S[seat] = how.top_p
        self.min_p_S[seat] = how.min_p
        self.filters_S[seat] = how.temperature > 0 and (how.top_k > 0 or how.top_p < 1 or how.min_p > 0)
        self.seed_S[seat] = how.seed & 0xFFFFFFFFFFFFFFFF

    def show(self, sequence: Sequence, first: int = 0) -> None:
        """Copy the sequence's pages from the ``first`` on into its row."""
        self.pages_SP[sequence.seat, first : len(sequence.pages)] = sequence.pages[first:]

    def leave(self, sequence: Sequence) -> None:
        self.copies.pop(sequence.seat, None)
        self._free.append(sequence.seat)
        sequence.seat = -1

    def take_copies(self) -> dict[int, int]:
        """The copies that are due, now the caller's duty."""
        copies, self.copies = self.copies, {}
        return copies
