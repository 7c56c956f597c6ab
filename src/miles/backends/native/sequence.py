"""What the engine remembers of one request.

Shapes: T tokens of prompt and response, L layers with experts, x experts a token, Z words of a mask.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np

from miles.backends.native.order import Ints, Words
from miles.backends.native.request import Ask, Finish, Top
from miles.core.errors import EngineError
from miles.core.extras import ROUTED
from miles.core.protocols import Completion
from miles.core.types import EMPTY, Array, Author, Span, Status, Version

Decode = Callable[[Items[int]], str]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """The memory of one request.

    ``tokens`` are the prompt and what is known to have been drawn, ``limit`` at most; a step that has not landed may
    have drawn one more. A token in ``ends`` ends it; those ``barred`` are kept away while it is too short. The last
    ``tail`` tokens are searched for stop strings, if there are any. ``stamps`` say from which drawn token on which
    version wrote, and ``version`` is the last of these. ``followers`` have the same prompt, arrived while it was being
    computed, and take it over when it is done. ``rank`` orders requests. ``scores`` are log-probs of the prompt from
    ``ask.score_from`` on; those up to ``scoring`` are on their way. ``routed_TLx`` are experts that were saved when its
    pages were given up.
    """

    number: int
    ask: Ask
    prompt_length: int
    prompt_T: Ints
    key: bytes
    ends: frozenset[int]
    barred: tuple[int, ...] = ()
    tail: int
    tokens: list[int]
    limit: int
    rank: tuple[int, int]
    vocabulary: int = 0
    arrived: float = 0.0
    seated: float = -1.0
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[Top, ...]] = field(default_factory=list)
    watched: list[tuple[Top, ...]] = field(default_factory=list)
    stamps: list[tuple[int, Version]] = field(default_factory=list)
    version: Version | None = None
    scored_under: Version | None = None
    scores: list[float | None] = field(default_factory=list)
    score_tops: list[tuple[Top, ...]] = field(default_factory=list)
    score_watched: list[tuple[Top, ...]] = field(default_factory=list)
    scoring: int = 0
    counts: Counter[int] | None = None
    mask_Z: Words | None = None
    routed_TLx: Array | None = None
    reason: str = ""
    matched: int | str | None = None
    message: str = ""
    failure: Exception | None = None
    cached_tokens: int = -1
    preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    epoch: int = -1
    seat: int = -1
    followers: list[Sequence] = field(default_factory=list)

    # -- what it asks for -------------------------------------------------------------------

    @property
    def fresh(self) -> bool:
        """Nothing was drawn yet, as far as is known."""
        return len(self.tokens) == self.prompt_length

    @property
    def scored_from(self) -> int:
        """The first position that is still to be scored; beyond the prompt when none is."""
        if self.ask.score_from is None:
            return self.prompt_length
        return self.ask.score_from + len(self.scores)

    @property
    def alike(self) -> bool:
        """May its prompt be computed along with that of others that have the same?"""
        return self.fresh and self.scoring >= self.prompt_length and self.limit > self.prompt_length

    @property
    def dependent(self) -> bool:
        """How its next token is drawn depends on the one before."""
        ask = self.ask
        return (
            ask.constraint is not None
            or ask.frequency_penalty != 0
            or ask.presence_penalty != 0
            or ask.repetition_penalty != 1
        )

    @property
    def edited(self) -> bool:
        """The host has a say in how its tokens are drawn."""
        return self.dependent or bool(self.ask.logit_bias) or self.ask.min_new_tokens > 0

    @property
    def looking(self) -> bool:
        """More is read off its logits than the tokens drawn."""
        return self.ask.tops > 0 or bool(self.ask.watch)

    @property
    def odd(self) -> bool:
        """Every token it draws is to be looked at on its own."""
        return self.tail > 0 or self.dependent

    def cut(self, start: int, end: int) -> Ints:
        """Some of its tokens."""
        if end <= self.prompt_length:
            return self.prompt_T[start:end]
        return np.array(self.tokens[start:end], np.int64)

    # -- what comes of it -------------------------------------------------------------------

    def stamp(self, version: Version) -> None:
        """From the next drawn token on, this version writes."""
        if self.version != version:
            self.stamps.append((len(self.logprobs), version))
        self.version = version

    def unscore(self) -> None:
        """Forget the log-probs of the prompt; the very first token has none to forget."""
        first = self.ask.score_from
        self.scores, self.score_tops, self.score_watched = ([None], [()], [()]) if first == 0 else ([], [], [])
        self.scoring = self.scored_from

    def concluded(self, decode: Decode | None) -> bool:
        """Was the token just drawn the last one? Then ``reason`` says why. To be asked once a token where ``odd``."""
        token = self.tokens[-1]
        if self.counts is not None:
            self.counts[token] += 1
        if self.tail and self._stopped(decode):
            self.reason = "stop"
        elif token in self.ends:
            self.reason, self.matched = "stop", token
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        elif self.ask.constraint is not None and self._bound(token):
            self.reason, self.matched = ("stop", token) if self.failure is None else ("abort", None)
        return self.reason != ""

    def _stopped(self, decode: Decode | None) -> bool:
        assert decode is not None
        text = decode(self.tokens[max(self.prompt_length, len(self.tokens) - self.tail) :])
        stops = (stop for stop in self.ask.sampling.stop if stop in text)
        self.matched = next(stops, None) or next((one for one in self.ask.stop_regex if re.search(one, text)), None)
        return self.matched is not None

    def _bound(self, token: int) -> bool:
        """Tell the constraint; true when it has seen its last token. What it raises ends this request alone."""
        constraint = self.ask.constraint
        assert constraint is not None
        try:
            constraint.advance(token)
            if constraint.finished():
                return True
            self.mask_Z = words_of(constraint.allowed(), self.vocabulary)
        except Exception as error:
            self.failure = error
        return self.failure is not None

    # -- the answer -------------------------------------------------------------------------

    def finish(self) -> Finish | None:
        """Why it ended; None while it goes on."""
        if not self.reason:
            return None
        kind = "stop" if self.reason == "stop" else "length" if self.reason == "length" else "abort"
        return Finish(kind=kind, length=len(self.logprobs), matched=self.matched, message=self.message)

    def routed(self, none_expert: Array | None, first: int) -> Array | None:
        """The experts [tokens, L, x] from token ``first`` on; ``none_expert`` of those that were never computed."""
        if none_expert is None or not self.ask.routed:
            return None
        known = none_expert[None][:0] if self.routed_TLx is None else self.routed_TLx
        missing = np.broadcast_to(none_expert, (len(self.tokens) - len(known), *none_expert.shape))
        return np.concatenate((known, missing))[first:]

    def completion(self, none_expert: Array | None) -> Completion:
        """What was written, one span a version. ``none_expert`` [L, x] is the routing of a token never computed."""
        bounds = [*(start for start, _ in self.stamps), len(self.logprobs)]
        tokens = np.array(self.tokens[self.prompt_length :], np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        whole = self.routed(none_expert, 0)
        routed = None if whole is None else whole[self.prompt_length :]
        spans = tuple(
            Span(
                author=Author.POLICY,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                extras=EMPTY if routed is None else {ROUTED: routed[start:end]},
            )
            for (start, version), end in zip(self.stamps, bounds[1:], strict=True)
        )
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(self.reason, Status.ABORTED)
        return Completion(
            spans=spans,
            status=status,
            reason=self.reason or "abort",
            cached_tokens=max(0, self.cached_tokens),
            given=EMPTY if whole is None else {ROUTED: whole[: self.prompt_length]},
        )


def words_of(allowed: Array, vocabulary: int) -> Words:
    """Truth values, or words of bits, as words of bits for a vocabulary. An error when nothing is allowed."""
    if allowed.dtype == np.bool_:
        allowed = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view(np.int32)
    words_Z = np.zeros(-(-vocabulary // 32), np.int32)
    words_Z[: len(allowed)] = allowed[: len(words_Z)]
    if not words_Z.any():
        raise EngineError("the constraint allows no token at all, and has not finished")
    return words_Z
