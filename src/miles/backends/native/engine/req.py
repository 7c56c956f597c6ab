"""Per-request state (``Req``) and the output stream its caller reads (``RequestOutput``).

Shapes: T tokens of prompt and response, L MoE layers, x experts per token, Z words of a token bit mask.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from miles.backends.native.engine.draft_tree import NO_DRAFTS, DraftTree
from miles.backends.native.engine.lora import ServedAdapter
from miles.backends.native.engine.prefix_cache import ROOT
from miles.backends.native.engine.request import (
    BitWords,
    FinishReason,
    GenerateRequest,
    Ints,
    OutputChunk,
    PromptLogprobs,
    TokenLogprob,
)
from miles.backends.native.engine.stop_regex import StopPattern
from miles.backends.native.engine.vision import PromptImages
from miles.core.errors import EngineError
from miles.core.protocols import Completion, SpeculationCounts
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Array, Author, Span, Status, Version

_STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}

DecodeFn = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False, kw_only=True)
class Req:
    """Mutable state of one request.

    ``tokens`` are the prompt and the sampled tokens the host knows, at most ``max_length``; an in-flight step may have
    sampled one more. A token in ``stop_token_ids`` ends the request; ``banned_tokens`` are masked below
    ``min_new_tokens``. The last ``stop_window`` tokens are decoded and searched for stop strings. ``version_starts``
    lists (index of the first sampled token, weight version); ``version`` is the last of these. ``followers`` have the
    same prompt, arrived during its prefill, and fork from it when it is done. ``sort_key`` orders requests.
    ``prompt_logprobs`` start at ``request.logprob_start_len``; positions before ``next_scored`` are in flight.
    ``records`` (routed experts, selections of indexers) were saved when the request's pages were released. ``images``
    are those of the prompt.
    ``draft`` are the drafted tokens that a step verifies, ``draft_bucket`` is where their acceptance is counted
    (``speculation``), ``draft_masks`` are the grammar's masks by branch and offset, and ``branch_pages`` the pages of
    each branch, from which page of the sequence on. ``accepted_drafts[i]`` is the number of verifications that accepted
    ``i`` of its drafted tokens; None without speculative decoding. ``drafted_ends`` is 1 if its last token was drafted
    and ended it. ``lora_overtaken`` requests were admitted before it
    while its adapter ``lora`` had no slot; ``lora_versions`` lists (index of the first sampled token, version of the
    adapter).
    """

    number: int
    request: GenerateRequest
    prompt_length: int
    prompt_T: Ints
    prompt_key: bytes
    stop_token_ids: frozenset[int]
    banned_tokens: tuple[int, ...] = ()
    stop_window: int
    stop_patterns: tuple[StopPattern, ...] = ()
    tokens: list[int]
    max_length: int
    sort_key: tuple[int, int]
    images: PromptImages | None = None
    lora: ServedAdapter | None = None
    lora_overtaken: int = 0
    lora_versions: list[tuple[int, int]] = field(default_factory=list)
    rng_stream: int = 0
    vocab_size: int = 0
    arrival_time: float = 0.0
    start_time: float = -1.0
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    token_ids_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    version_starts: list[tuple[int, Version]] = field(default_factory=list)
    version: Version | None = None
    prompt_version: Version | None = None
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    prompt_token_ids_logprobs: list[tuple[TokenLogprob, ...]] = field(default_factory=list)
    next_scored: int = 0
    token_counts: Counter[int] | None = None
    grammar_mask_Z: BitWords | None = None
    records: dict[str, Array] = field(default_factory=dict)
    finish_kind: str = ""
    matched_stop: int | str | None = None
    finish_message: str = ""
    error: Exception | None = None
    cached_tokens: int = -1
    preemptions: int = 0
    pages: list[int] = field(default_factory=list)
    prefix_nodes: list[int] = field(default_factory=list)
    cache_epoch: int = -1
    slot: int = -1
    followers: list[Req] = field(default_factory=list)
    draft: DraftTree = NO_DRAFTS
    draft_bucket: int = 0
    draft_masks: dict[tuple[int, int], BitWords] = field(default_factory=dict)
    branch_pages: list[tuple[int, list[int]]] = field(default_factory=list)
    drafted_tokens: int = 0
    drafted_ends: int = 0
    accepted_drafts: list[int] | None = None

    # -- properties of the request ----------------------------------------------------------

    @property
    def has_no_output(self) -> bool:
        """True if no sampled token is known to the host yet."""
        return len(self.tokens) == self.prompt_length

    @property
    def prefix_root(self) -> int:
        """The root of its prefixes in the cache: another one for each version of each adapter."""
        return ROOT if self.lora is None else -self.lora.uid

    @property
    def can_share_prefill(self) -> bool:
        """True if requests with the same prompt may share one prefill with this one."""
        return self.has_no_output and self.next_scored >= self.prompt_length and self.max_length > self.prompt_length

    @property
    def needs_last_token(self) -> bool:
        """True if sampling the next token needs the previous one on the host: penalties or a grammar."""
        request = self.request
        return (
            request.constraint is not None
            or request.frequency_penalty != 0
            or request.presence_penalty != 0
            or request.repetition_penalty != 1
        )

    @property
    def has_logit_edits(self) -> bool:
        """True if the host changes the logits: penalties, masks, biases."""
        return self.needs_last_token or bool(self.request.logit_bias) or self.request.min_new_tokens > 0

    @property
    def can_speculate(self) -> bool:
        """True if drafted tokens can be verified: drafts follow sampled tokens."""
        return not self.has_no_output

    @property
    def has_logprob_queries(self) -> bool:
        """True if log-probs of more than the sampled tokens are returned."""
        return self.request.top_logprobs_num > 0 or bool(self.request.token_ids_logprob)

    @property
    def needs_token_check(self) -> bool:
        """True if ``check_finished`` must see every sampled token."""
        return self.stop_window > 0 or self.needs_last_token

    def slice_tokens(self, start: int, end: int) -> Ints:
        if end <= self.prompt_length:
            return self.prompt_T[start:end]
        return np.array(self.tokens[start:end], np.int64)

    def prefix_keys(self, start: int, end: int) -> list[int]:
        """Return the prefix cache's keys of some tokens: the tokens themselves, except where images are."""
        if self.images is None:
            return self.tokens[start:end]
        return self.images.keys[start:end] + self.tokens[max(start, self.prompt_length) : end]

    # -- updates after a step ---------------------------------------------------------------

    @property
    def policy_version(self) -> Version | None:
        """The version of a run's policy that its adapter is."""
        return None if self.lora is None else self.lora.policy_version

    def record_version(self, version: Version) -> None:
        """Mark the next sampled token as the first of ``version``."""
        if self.version != version:
            self.version_starts.append((len(self.logprobs), version))
        self.version = version

    def change_lora_version(self, version: int) -> None:
        """Mark the next sampled token as the first of another version of the adapter.

        Keys and values of both versions are in its pages then, which nobody else may find.
        """
        self.lora_versions = [*(start for start in self.lora_versions if start[0] < len(self.logprobs))]
        self.lora_versions.append((len(self.logprobs), version))
        self.cache_epoch = -1

    def record_verification(self, drafted: int, accepted: int, *, drafted_end: bool) -> None:
        """Count a step that verified ``drafted`` tokens and accepted ``accepted``, the last of which may be the end."""
        self.drafted_ends += drafted_end
        counts = self.accepted_drafts = self.accepted_drafts or []
        counts.extend([0] * (accepted + 1 - len(counts)))
        counts[accepted] += 1
        self.drafted_tokens += drafted

    def drop_unsampled_logprobs(self) -> None:
        """Drop queried log-probs of accepted drafts behind the token that ended the request."""
        del self.top_logprobs[len(self.logprobs) :]
        del self.token_ids_logprobs[len(self.logprobs) :]

    def reset_prompt_logprobs(self) -> None:
        """Discard the log-probs of the prompt; the very first token never has one."""
        first = self.request.logprob_start_len
        self.prompt_logprobs = [None] if first == 0 else []
        self.prompt_top_logprobs = [()] if first == 0 else []
        self.prompt_token_ids_logprobs = [()] if first == 0 else []
        self.next_scored = self.prompt_length if first is None else first + len(self.prompt_logprobs)

    def check_finished(self, decode: DecodeFn | None) -> bool:
        """Return whether the last sampled token ended the request, and set ``finish_kind``.

        Call exactly once per token if ``needs_token_check``.
        """
        token = self.tokens[-1]
        if self.token_counts is not None:
            self.token_counts[token] += 1
        if self.stop_window and self._match_stop_string(decode):
            self.finish_kind = "stop"
        elif token in self.stop_token_ids:
            self.finish_kind, self.matched_stop = "stop", token
        elif len(self.tokens) >= self.max_length:
            self.finish_kind = "length"
        elif self.request.constraint is not None and self._advance_constraint(token):
            self.finish_kind, self.matched_stop = ("stop", token) if self.error is None else ("abort", None)
        return self.finish_kind != ""

    def _match_stop_string(self, decode: DecodeFn | None) -> bool:
        assert decode is not None
        text = decode(self.tokens[max(self.prompt_length, len(self.tokens) - self.stop_window) :])
        strings = (stop for stop in self.request.sampling.stop if stop in text)
        patterns = (pattern.pattern for pattern in self.stop_patterns if pattern.search(text))
        self.matched_stop = next(strings, None) or next(patterns, None)
        return self.matched_stop is not None

    def _advance_constraint(self, token: int) -> bool:
        """Return whether the constraint is finished. An error it raises ends only this request."""
        constraint = self.request.constraint
        assert constraint is not None
        try:
            constraint.advance(token)
            if constraint.is_finished():
                return True
            self.grammar_mask_Z = pack_token_mask(constraint.get_allowed_tokens(), self.vocab_size)
        except Exception as error:
            self.error = error
        return self.error is not None

    # -- results ----------------------------------------------------------------------------

    def build_finish_reason(self) -> FinishReason | None:
        """Return why the request ended; None while it runs."""
        if not self.finish_kind:
            return None
        kind = "stop" if self.finish_kind == "stop" else "length" if self.finish_kind == "length" else "abort"
        length = len(self.logprobs)
        return FinishReason(kind=kind, length=length, matched=self.matched_stop, message=self.finish_message)

    def build_speculation_counts(self) -> SpeculationCounts | None:
        """Return what speculative decoding did for the request so far; None if the engine does without."""
        if self.accepted_drafts is None:
            return None
        counts = tuple(self.accepted_drafts)  # the step thread may be counting
        return SpeculationCounts(
            verifications=sum(counts),
            drafted=self.drafted_tokens,
            accepted=sum(accepted * count for accepted, count in enumerate(counts)),
            histogram=counts,
            drafted_ends=self.drafted_ends,
        )

    def gather_records(self, name: str, unrecorded: Mapping[str, Array], first: int = 0) -> Array | None:
        """Return the records [tokens, L, x] from token ``first`` on; those of ``unrecorded`` for tokens never computed.

        None if they are not recorded, or not wanted.
        """
        if name not in unrecorded or (name == ROUTED_EXPERTS and not self.request.return_routed_experts):
            return None
        none = unrecorded[name]
        known = self.records.get(name, none[None][:0])
        missing = np.broadcast_to(none, (len(self.tokens) - len(known), *none.shape))
        return np.concatenate((known, missing))[first:]

    def build_completion(self, unrecorded: Mapping[str, Array]) -> Completion:
        """Return the sampled tokens, one span per weight version."""
        bounds = [*[start for start, _ in self.version_starts], len(self.logprobs)]
        tokens = np.array(self.tokens[self.prompt_length :], np.int32)
        logprobs = np.array(self.logprobs, np.float32)
        found = [(name, self.gather_records(name, unrecorded)) for name in unrecorded]
        records = {name: values for name, values in found if values is not None}
        prompt = self.prompt_length
        spans = [
            Span(
                author=Author.POLICY,
                tokens=tokens[start:end],
                logprobs=logprobs[start:end],
                version=version,
                extras={name: values[prompt + start : prompt + end] for name, values in records.items()},
            )
            for (start, version), end in zip(self.version_starts, bounds[1:], strict=True)
        ]
        return Completion(
            spans=tuple(spans),
            status=_STATUS.get(self.finish_kind, Status.ABORTED),
            finish_reason=self.finish_kind or "abort",
            cached_tokens=max(0, self.cached_tokens),
            prompt_extras={name: values[:prompt] for name, values in records.items()},
            speculation=self.build_speculation_counts(),
        )


def pack_token_mask(allowed: Array, vocab_size: int) -> BitWords:
    """Convert booleans, or words of bits, to words of bits for a vocabulary; raise if no token is allowed."""
    if allowed.dtype == np.bool_:
        allowed = np.packbits(np.pad(allowed, (0, -len(allowed) % 32)), bitorder="little").view(np.int32)
    words_Z = np.zeros(-(-vocab_size // 32), np.int32)
    words_Z[: len(allowed)] = allowed[: len(words_Z)]
    if not words_Z.any():
        raise EngineError("the constraint allows no token, but has not finished")
    return words_Z


class RequestOutput:
    """The output stream of one request: an async iterator of ``OutputChunk``. Use it only on the engine's event loop.

    A chunk holds the tokens sampled since the previous chunk; a slow reader gets longer chunks and blocks nobody.
    Call ``cancel`` (leaving an ``async with`` block does) to drop the request; otherwise it runs to its end unread.
    """

    def __init__(
        self,
        req: Req,
        unrecorded: Mapping[str, Array],
        *,
        on_wait: Callable[[RequestOutput], None],
        on_cancel: Callable[[RequestOutput], None],
    ) -> None:
        self.request: GenerateRequest = req.request
        self.req = req
        self._unrecorded = unrecorded
        self._on_wait = on_wait
        self._on_cancel = on_cancel
        self._num_read = 0
        self._result: Completion | Exception | None = None
        self._chunk_waiters: list[asyncio.Future[None]] = []
        self._result_waiters: list[asyncio.Future[None]] = []

    # -- reading ----------------------------------------------------------------------------

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> OutputChunk:
        req, first = self.req, self._num_read
        while True:
            ended = self._result is not None
            # Log-probs are appended last, so a token that has one is complete even while a step is writing.
            end = len(req.logprobs)
            if end > first:
                break
            if isinstance(self._result, Exception):
                raise self._result
            if ended:
                raise StopAsyncIteration
            if not self._chunk_waiters:
                self._on_wait(self)
            await _wait(self._chunk_waiters)
        self._num_read = end
        prompt = req.prompt_length
        return OutputChunk(
            first=first,
            tokens=req.tokens[prompt + first : prompt + end],
            logprobs=req.logprobs[first:end],
            top_logprobs=req.top_logprobs[first:end],
            token_ids_logprobs=req.token_ids_logprobs[first:end],
        )

    async def completion(self) -> Completion:
        """Wait for the end and return the whole output. Cancelling the waiting task cancels the request."""
        try:
            if self._result is None:
                await _wait(self._result_waiters)
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self._result is not None
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def cancel(self) -> None:
        """Drop the request if it has not ended, and free its memory."""
        if self._result is None:
            self._on_cancel(self)

    async def __aenter__(self) -> RequestOutput:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # -- state so far -----------------------------------------------------------------------

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ended; None while it runs."""
        return None if self._result is None else self.req.build_finish_reason()

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probs of the prompt so far; None if they were not requested."""
        req, request = self.req, self.request
        if request.logprob_start_len is None:
            return None
        return PromptLogprobs(
            first=request.logprob_start_len,
            logprobs=tuple(req.prompt_logprobs),
            top_logprobs=tuple(req.prompt_top_logprobs) if request.top_logprobs_num else (),
            token_ids_logprobs=tuple(req.prompt_token_ids_logprobs) if request.token_ids_logprob else (),
        )

    @property
    def tokens(self) -> list[int]:
        """Tokens sampled so far."""
        return self.req.tokens[self.req.prompt_length :]

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the tokens sampled so far."""
        return list(self.req.logprobs)

    @property
    def top_logprobs(self) -> list[tuple[TokenLogprob, ...]]:
        """The most likely tokens at each sampled position."""
        return list(self.req.top_logprobs)

    @property
    def token_ids_logprobs(self) -> list[tuple[TokenLogprob, ...]]:
        """The log-probs of ``request.token_ids_logprob`` at each sampled position."""
        return list(self.req.token_ids_logprobs)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return max(0, self.req.cached_tokens)

    @property
    def speculation(self) -> SpeculationCounts | None:
        """Drafted and accepted tokens so far; None without speculative decoding."""
        return self.req.build_speculation_counts()

    @property
    def lora_versions(self) -> list[tuple[int, int]]:
        """The versions of the adapter: the index of the first sampled token of each, and its number."""
        return list(self.req.lora_versions)

    @property
    def preemptions(self) -> int:
        """How often the request lost its pages and was recomputed."""
        return self.req.preemptions

    @property
    def version(self) -> Version | None:
        """The weight version that sampled the last token, or scored the prompt; None before that."""
        return self.req.version or self.req.prompt_version

    def split_by_version(self, count: int) -> list[tuple[Version, int]]:
        """Return, for the first ``count`` sampled tokens, each weight version in order and how many it sampled."""
        starts = [start for start in list(self.req.version_starts) if start[0] < count]
        ends = [*(start for start, _ in starts[1:]), count]  # without any token there is no start
        return [(version, end - start) for (start, version), end in zip(starts, ends, strict=False)]

    @property
    def queue_seconds(self) -> float:
        """Time spent in the waiting queue by the engine's clock; 0 while it waits."""
        return max(0.0, self.req.start_time - self.req.arrival_time)

    def routed_experts(self, first: int = 0) -> Array | None:
        """Return the experts [tokens, L, x] of prompt and response from token ``first`` on, once it has ended.

        The last token is never computed and left out. None if experts are not recorded.
        """
        experts = self.req.gather_records(ROUTED_EXPERTS, self._unrecorded, first)
        return None if experts is None else experts[:-1]

    def indexer_topk(self) -> Array | None:
        """Return what indexers selected [tokens, L, k] for prompt and response, without the last token, once it has
        ended; None if it is not recorded.
        """
        selected = self.req.gather_records(INDEXER_TOPK, self._unrecorded)
        return None if selected is None else selected[:-1]

    # -- called by the engine ---------------------------------------------------------------

    def notify(self) -> bool:
        """Wake the readers if there are new tokens; return whether no reader is left waiting."""
        if self._result is not None or len(self.req.logprobs) > self._num_read:
            _wake(self._chunk_waiters)
        return not self._chunk_waiters

    def set_result(self, error: Exception | None = None) -> None:
        """Record the end of the request: its completion, or ``error``."""
        if self._result is None:
            self._result = error or self.req.error or self.req.build_completion(self._unrecorded)
            _wake(self._result_waiters)
            self.notify()


async def _wait(waiters: list[asyncio.Future[None]]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiters.append(future)
    await future


def _wake(waiters: list[asyncio.Future[None]]) -> None:
    for future in waiters:
        if not future.done():
            future.set_result(None)
    waiters.clear()
