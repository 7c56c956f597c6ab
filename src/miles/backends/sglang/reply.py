"""What a server says to ``/generate``, checked piece by piece: tokens, log-probs, why it ended, whose weights it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from miles.core.errors import EngineError

# Log-probs of servers that compute in few bits are now and then a little above 0.
ABOVE = 1e-3
_FIRST, _SECOND = itemgetter(0), itemgetter(1)


class Unfit(EngineError):
    """A reply that cannot be what was asked for: the server is not to be trusted with the next."""


class Denied(EngineError):
    """The request is what is wrong, the server says."""


@dataclass(slots=True)
class Reply:
    """A stream of one answer. ``take`` may be told all that there is each time, or only what is new.

    ``reason`` is None while it goes on, then ``stop``, ``length`` or ``abort``; ``label`` is what the server calls the
    weights that drew last, and ``runs``, where it can tell, what it calls those that drew the first tokens, the next,
    and so on, and how many each; ``experts`` is SGLang's ``routed_experts`` as it came.
    """

    vocabulary: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str | None = None
    label: str | None = None
    runs: list[tuple[str, int]] | None = None
    experts: str | None = None
    cached: int = 0

    def take(self, event: Any) -> None:
        """More of it, or ``Unfit``: what was taken before stays."""
        if isinstance(event, dict) and isinstance(error := event.get("error"), dict | str):
            raise _failure(error if isinstance(error, dict) else {"message": error}, "code")
        meta = event.get("meta_info") if isinstance(event, dict) else None
        if not isinstance(meta, dict):
            raise Unfit("its reply has no meta_info")
        runs = _runs(meta)
        self._grow(event, meta)
        self.runs = runs
        reason = meta.get("finish_reason")
        if isinstance(reason, dict):
            self._end(reason, meta)
        label, cached = meta.get("weight_version"), meta.get("cached_tokens")
        self.label = None if label is None else str(label)
        self.cached = cached if isinstance(cached, int) else 0

    def _grow(self, event: dict[str, Any], meta: dict[str, Any]) -> None:
        total = _whole(meta.get("completion_tokens"), "completion_tokens")
        fresh = total - len(self.tokens)
        if fresh < 0 or total > self.limit:
            raise Unfit(f"its reply counts {total} tokens, after {len(self.tokens)} and with a limit of {self.limit}")
        if not fresh:
            return
        tokens, lines = event.get("output_ids"), meta.get("output_token_logprobs")
        if not isinstance(tokens, list) or len(tokens) < fresh:
            raise Unfit(f"its reply has no output_ids for {fresh} new tokens")
        if not isinstance(lines, list) or len(lines) < fresh:
            count = len(lines) if isinstance(lines, list) else "no"
            raise Unfit(f"its reply has {count} log-probs for {fresh} new tokens")
        tokens, lines = tokens[-fresh:], lines[-fresh:]
        logprobs = self._as_it_should_be(tokens, lines)
        if logprobs is None:  # look at each, for the first that is wrong
            logprobs = [self._logprob(*both) for both in zip(tokens, lines, strict=True)]
        self.tokens += tokens
        self.logprobs += logprobs

    def _as_it_should_be(self, tokens: list[Any], lines: list[Any]) -> list[float] | None:
        """The log-probs, where all is right at a glance: of every token of a run, Python looks at none by itself."""
        if set(map(type, tokens)) != {int} or set(map(type, lines)) != {list} or min(map(len, lines)) < 2:
            return None
        values, named = list(map(_FIRST, lines)), list(map(_SECOND, lines))
        if named != tokens or min(tokens) < 0 or max(tokens) >= self.vocabulary:
            return None
        fit = set(map(type, values)) == {float} and all(map(math.isfinite, values)) and max(values) <= ABOVE
        return values if fit else None

    def _logprob(self, token: Any, line: Any) -> float:
        """That of a token, which a server writes as [log-prob, token, text]."""
        value, named = line[:2] if isinstance(line, list) and len(line) > 1 else (None, None)
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocabulary:
            raise Unfit(f"its reply has the token {str(token)[:50]}, and the vocabulary has {self.vocabulary}")
        if named != token:
            raise Unfit(f"its reply gives a log-prob of token {str(named)[:50]} where it drew token {token}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value > ABOVE:
            raise Unfit(f"its reply gives token {token} the log-prob {str(value)[:50]}")
        return float(value)

    def _end(self, reason: dict[str, Any], meta: dict[str, Any]) -> None:
        kind = reason.get("type")
        if kind not in ("stop", "length", "abort"):
            raise Unfit(f"its reply ends for the reason {str(reason)[:100]}")
        # An abort with a status is a refusal or a failure of the server's; one that was asked for has none.
        if kind == "abort" and isinstance(reason.get("status_code"), int):
            raise _failure(reason, "status_code")
        experts = meta.get("routed_experts")
        self.experts = experts if isinstance(experts, str) else None
        self.reason = kind


def _failure(told: dict[str, Any], name: str) -> EngineError:
    """What a server says instead of an answer: that the request is wrong, or that it failed."""
    status, said = told.get(name), str(told.get("message"))[:300].rstrip(".")
    if isinstance(status, int) and 400 <= status < 500:
        return Denied(said)
    return Unfit(f"it gave the request up ({status}: {said})")


def _runs(meta: dict[str, Any]) -> list[tuple[str, int]] | None:
    """Which weights drew how many tokens, all told: what servers of ours say when they are asked to."""
    told = meta.get("weight_versions")
    if told is None:
        return None
    pairs = told if isinstance(told, list) else [told]
    if not all(isinstance(pair, list) and [type(one) for one in pair] == [str, int] for pair in pairs):
        raise Unfit(f"its reply has {str(told)[:100]} for weight_versions")
    if min((count for _, count in pairs), default=1) < 1 or sum(n for _, n in pairs) != meta.get("completion_tokens"):
        raise Unfit(f"its reply has {meta.get('completion_tokens')} tokens, and weights that drew {str(told)[:100]}")
    return [(label, count) for label, count in pairs]


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise Unfit(f"its reply has {str(value)[:50]} for {name}")
    return value
