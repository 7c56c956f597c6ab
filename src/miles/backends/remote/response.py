"""Validation of ``/generate`` responses, event by event: tokens, log-probs, finish reason, weight versions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from miles.core.errors import EngineError
from miles.core.protocols import SpeculationCounts

# Log-probs computed in low precision are sometimes slightly above 0.
MAX_LOGPROB = 1e-3
# SGLang's message for a request that was aborted before it ran, or after it was retracted.
_WAITING = "Abort in waiting queue"
_FIRST, _SECOND = itemgetter(0), itemgetter(1)
# Names of accepted and drafted tokens, and of the histogram of accepted tokens: SGLang's, then its former ones.
_ACCEPTED_FIELDS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_DRAFTED_FIELDS = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_HISTOGRAM_FIELDS = ("spec_correct_drafts_histogram", "spec_accept_histogram")


class InvalidResponse(EngineError):
    """A response that cannot be right; the server is not to be trusted with the next request."""


class RequestDenied(EngineError):
    """The server reports that the request is invalid."""


@dataclass(slots=True)
class GenerateResponse:
    """The streamed response to one request; events may be cumulative or incremental.

    ``finish_reason`` is None while it is incomplete, then ``stop``, ``length`` or ``abort``. ``weight_version`` is the
    server's label of the weights that sampled the last token; ``version_runs``, if the server reports it, the labels of
    all weights that sampled the tokens, in order, and how many each; ``experts`` and ``indexer`` are SGLang's
    ``routed_experts`` and ``indexer_topk``. With ``num_prompt_tokens`` the server must have read so many.
    ``speculation`` is None if the server reports none. ``adapter`` is the LoRA adapter that the request named, and
    ``rid`` its id then. ``abort_at_token``: it is to be aborted at its first token; ``never_ran``: it was aborted while
    it waited to run; ``is_lost``: its server was lost.
    """

    vocab_size: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    weight_version: str | None = None
    version_runs: list[tuple[str, int]] | None = None
    experts: str | None = None
    indexer: str | None = None
    cached_tokens: int = 0
    num_prompt_tokens: int | None = None
    speculation: SpeculationCounts | None = None
    adapter: str | None = None
    rid: str | None = None
    abort_at_token: bool = False
    never_ran: bool = False
    is_lost: bool = False

    def add_event(self, event: Any) -> None:
        """Add an event; after ``InvalidResponse`` the tokens of earlier events stay."""
        if isinstance(event, dict) and isinstance(error := event.get("error"), dict | str):
            raise _server_error(error if isinstance(error, dict) else {"message": error}, "code")
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict):
            raise InvalidResponse("its response has no meta_info")
        if self.num_prompt_tokens is not None and meta.get("prompt_tokens") != self.num_prompt_tokens:
            raise RequestDenied(
                f"it read {str(meta.get('prompt_tokens'))[:20]} prompt tokens, and with its images the prompt has "
                f"{self.num_prompt_tokens}; its processor expands images otherwise"
            )
        version_runs = _parse_version_runs(meta)
        self._add_tokens(event, meta)
        self.version_runs = version_runs
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            self._finish(reason, meta)
        label, cached = meta.get("weight_version"), meta.get("cached_tokens")
        self.weight_version = None if label is None else str(label)
        self.cached_tokens = cached if isinstance(cached, int) else 0
        self.speculation = _parse_speculation(meta)

    def _add_tokens(self, event: dict[str, Any], meta: dict[str, Any]) -> None:
        total = _parse_count(meta.get("completion_tokens"), "completion_tokens")
        new = total - len(self.tokens)
        if new < 0 or total > self.limit:
            raise InvalidResponse(
                f"its response counts {total} tokens, after {len(self.tokens)} and with a limit of {self.limit}"
            )
        if not new:
            return
        tokens, entries = event.get("output_ids"), meta.get("output_token_logprobs")
        if not isinstance(tokens, list) or len(tokens) < new:
            raise InvalidResponse(f"its response has no output_ids for {new} new tokens")
        if not isinstance(entries, list) or len(entries) < new:
            count = len(entries) if isinstance(entries, list) else "no"
            raise InvalidResponse(f"its response has {count} log-probs for {new} new tokens")
        tokens, entries = tokens[-new:], entries[-new:]
        logprobs = self._parse_logprobs_fast(tokens, entries)
        if logprobs is None:  # parse each, to find the first that is wrong
            logprobs = [self._parse_logprob(token, entry) for token, entry in zip(tokens, entries, strict=True)]
        self.tokens += tokens
        self.logprobs += logprobs

    def _parse_logprobs_fast(self, tokens: list[Any], entries: list[Any]) -> list[float] | None:
        """The log-probs if all entries are valid, without a Python loop over tokens; else None."""
        if set(map(type, tokens)) != {int} or set(map(type, entries)) != {list} or min(map(len, entries)) < 2:
            return None
        values, named = list(map(_FIRST, entries)), list(map(_SECOND, entries))
        if named != tokens or min(tokens) < 0 or max(tokens) >= self.vocab_size:
            return None
        valid = set(map(type, values)) == {float} and all(map(math.isfinite, values)) and max(values) <= MAX_LOGPROB
        return values if valid else None

    def _parse_logprob(self, token: Any, entry: Any) -> float:
        """The log-prob of a token, which a server writes as [log-prob, token, text]."""
        value, named = entry[:2] if isinstance(entry, list) and len(entry) > 1 else (None, None)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
            raise InvalidResponse(f"its response has token {str(token)[:50]}, but the vocabulary has {self.vocab_size}")
        if named != token:
            raise InvalidResponse(
                f"its response has the log-prob of token {str(named)[:50]} where it sampled token {token}"
            )
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if not math.isfinite(number) or number > MAX_LOGPROB:
            raise InvalidResponse(f"its response gives token {token} the log-prob {str(value)[:50]}")
        return float(number)

    def _finish(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        kind = reason.get("type")
        if kind not in ("stop", "length", "abort"):
            raise InvalidResponse(f"its response has the finish reason {str(reason)[:100]}")
        # An abort with a status is an error of the server; one that was requested has none.
        if kind == "abort" and isinstance(reason.get("status_code"), int):
            raise _server_error(reason, "status_code")
        experts = meta.get("routed_experts")
        self.experts = experts if isinstance(experts, str) else None
        indexer = meta.get("indexer_topk")
        self.indexer = indexer if isinstance(indexer, str) else None
        self.finish_reason = kind
        self.never_ran = kind == "abort" and reason.get("message") == _WAITING


def _server_error(fields: dict[str, Any], status_field: str) -> EngineError:
    """The error that a server sent instead of a response: the request is invalid, or the server failed."""
    status, message = fields.get(status_field), str(fields.get("message"))[:300].rstrip(".")
    if isinstance(status, int) and 400 <= status < 500:
        return RequestDenied(message)
    return InvalidResponse(f"it failed the request ({status}: {message})")


def _parse_version_runs(meta: dict[str, Any]) -> list[tuple[str, int]] | None:
    """Which weights sampled how many tokens: a field of ``miles serve`` only."""
    value = meta.get("weight_versions")
    if value is None:
        return None
    pairs = value if isinstance(value, list) else [value]
    if not all(isinstance(pair, list) and [type(item) for item in pair] == [str, int] for pair in pairs):
        raise InvalidResponse(f"its response has {str(value)[:100]} for weight_versions")
    total = meta.get("completion_tokens")
    if min((count for _, count in pairs), default=1) < 1 or sum(count for _, count in pairs) != total:
        raise InvalidResponse(f"its response has {total} tokens, but weight_versions {str(value)[:100]}")
    return [(label, count) for label, count in pairs]


def _parse_speculation(meta: dict[str, Any]) -> SpeculationCounts | None:
    """The counts of speculative decoding; None where the server gives none that are counts.

    They are statistics only, so that a response without them is valid.
    """
    fields = (("spec_verify_ct",), _ACCEPTED_FIELDS, _DRAFTED_FIELDS)
    given = [next((meta[name] for name in names if name in meta), None) for names in fields]
    counts = [count for count in given if type(count) is int and count >= 0]
    if len(counts) != len(fields):
        return None
    histogram = next((meta[name] for name in _HISTOGRAM_FIELDS if isinstance(meta.get(name), list)), [])
    valid = all(type(count) is int and count >= 0 for count in histogram)
    verifications, accepted, drafted = counts
    ends = meta.get("spec_drafted_ends")  # a field of ``miles serve`` only
    return SpeculationCounts(
        verifications=verifications,
        drafted=drafted,
        accepted=accepted,
        histogram=tuple(histogram) if valid else (),
        drafted_ends=ends if type(ends) is int and 0 <= ends <= min(accepted, verifications) else 0,
    )


def _parse_count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidResponse(f"its response has {str(value)[:50]} for {name}")
    return value
