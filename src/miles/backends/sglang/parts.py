"""An answer put together of what several attempts wrote, on whatever server: tokens, versions, experts, its end.

Shapes: L layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from miles.backends.sglang.reply import Reply
from miles.core.extras import ROUTED
from miles.core.protocols import Completion, Sampling
from miles.core.routed import expert_dtype, from_sglang, unrecorded
from miles.core.types import EMPTY, Array, Author, Span, Status, Version

Decode = Callable[[Sequence[int]], str]

# Tokens before the place where an attempt went on, and behind it, among which a stop text may lie across it.
_WINDOW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a mixture is built: layers that have experts, how many a token goes to, and of how many."""

    layers: int
    chosen: int
    experts: int


class Parts:
    """What there is of one answer. ``ends`` are the tokens that end a sequence of this model."""

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        ends: frozenset[int],
        decode: Decode | None,
        experts: Experts | None,
    ) -> None:
        self._prompt = list(prompt)
        self._sampling = sampling
        self._stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else ends)
        self._decode = decode
        self._experts = experts
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._bounds: list[tuple[int, Version]] = []
        self._routed_TLk: Array | None = None
        self._cached: int | None = None
        self.reason: str | None = None

    @property
    def so_far(self) -> list[int]:
        """The prompt and what was written."""
        return [*self._prompt, *self._tokens]

    @property
    def rest(self) -> Sampling:
        """How the rest is to be drawn."""
        how, done = self._sampling, len(self._tokens)
        return replace(how, max_new_tokens=how.max_new_tokens - done, drawn=how.drawn + done)

    def add(self, reply: Reply, runs: Sequence[tuple[Version, int]]) -> None:
        """What an attempt wrote, and how much of it under which version in its turn.

        After it ``reason`` says why the answer ended, if it did.
        """
        start = first = len(self._tokens)
        assert sum(count for _, count in runs) == len(reply.tokens), "every token has the version that wrote it"
        if reply.experts is not None and self._experts is not None:
            self._record(reply.experts, len(self.so_far) + len(reply.tokens) - 1)
        self._tokens += reply.tokens
        self._logprobs += reply.logprobs
        for version, count in runs:
            if count and (not self._bounds or self._bounds[-1][1] != version):
                self._bounds.append((first, version))
            first += count
        if self._cached is None:
            self._cached = reply.cached
        if start and self._stopped_across(start):
            self.reason = "stop"
        elif reply.reason in ("stop", "length"):
            self.reason = reply.reason
        elif self._tokens:
            self.reason = self._end()

    def _end(self) -> str | None:
        """Why nothing may follow what a server had no time to end itself."""
        if self._tokens[-1] in self._stops:
            return "stop"
        if self._sampling.stop and self._decode is not None:
            text = self._decode(self._tokens[-_WINDOW:])
            if any(stop in text for stop in self._sampling.stop):
                return "stop"
        return "length" if len(self._tokens) >= self._sampling.max_new_tokens else None

    def _stopped_across(self, at: int) -> bool:
        """Whether a stop text lies across the place where an attempt went on; what is behind it is left out."""
        if not self._sampling.stop or self._decode is None:
            return False
        first = max(0, at - _WINDOW)
        for end in range(at + 1, min(len(self._tokens), at + _WINDOW) + 1):
            text = self._decode(self._tokens[first:end])
            if any(stop in text for stop in self._sampling.stop):
                del self._tokens[end:], self._logprobs[end:]
                self._bounds = [(start, version) for start, version in self._bounds if start < end]
                return True
        return False

    def _record(self, text: str, tokens: int) -> None:
        """Experts of the first ``tokens`` of prompt and answer; those that are known from before stay."""
        e = self._experts
        assert e is not None
        fresh_TLk = from_sglang(text, tokens=tokens, layers=e.layers, chosen=e.chosen, experts=e.experts)
        known = 0 if self._routed_TLk is None else len(self._routed_TLk)
        before = [] if self._routed_TLk is None else [self._routed_TLk]
        self._routed_TLk = np.concatenate([*before, fresh_TLk[known:]])

    def completion(self, reason: str) -> Completion:
        """All of it, one span a version."""
        whole = self._routed()
        routed = None if whole is None else whole[len(self._prompt) :]
        tokens, logprobs = np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32)
        stops = [*(start for start, _ in self._bounds[1:]), len(self._tokens)]
        spans = tuple(
            Span(
                author=Author.POLICY,
                tokens=tokens[start:stop],
                logprobs=logprobs[start:stop],
                version=version,
                extras=EMPTY if routed is None else {ROUTED: routed[start:stop]},
            )
            for (start, version), stop in zip(self._bounds, stops, strict=False)  # an answer may have no token
        )
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED}.get(reason, Status.ABORTED)
        given = EMPTY if whole is None else {ROUTED: whole[: len(self._prompt)]}
        return Completion(spans=spans, status=status, reason=reason, cached_tokens=self._cached or 0, given=given)

    def _routed(self) -> Array | None:
        e = self._experts
        if e is None:
            return None
        dtype, length = expert_dtype(e.experts), len(self._prompt) + len(self._tokens)
        known = np.empty((0, e.layers, e.chosen), dtype) if self._routed_TLk is None else self._routed_TLk[:length]
        missing = np.full((length - len(known), e.layers, e.chosen), unrecorded(dtype), dtype)
        return np.concatenate((known, missing))
