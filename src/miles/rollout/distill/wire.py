"""Wire format of teacher scoring over SGLang's ``/generate``: the request body, and validation of the response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.types import Floats
from miles.rollout.reward.types import GradingError

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A request for the log-probs of ``tokens`` from position ``start`` on, which is above 0.

    At each position also the ``top_k`` most likely tokens and the tokens ``query_ids``, with their log-probs.
    """

    tokens: tuple[int, ...]
    start: int
    top_k: int = 0
    query_ids: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Number of tokens to score."""
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A teacher's log-probs of the n tokens of a request, with k top tokens and u queried tokens per position.

    A model with fewer tokens than ``top_k`` returns as many as it has.
    """

    logprob_n: Floats
    top_nk: Ids
    top_logprob_nk: Floats
    queried_nu: Floats


def build_request_body(
    requests: Sequence[ScoreRequest], *, temperature: float, max_new_tokens: int = 0
) -> dict[str, Any]:
    """Build the body for ``/generate``; ``max_new_tokens`` are generated beyond the scored tokens."""
    # A server returns no log-prob for the first position asked for, so the request starts one earlier.
    body: dict[str, Any] = {
        "input_ids": [list(request.tokens) for request in requests],
        "sampling_params": {"temperature": temperature, "max_new_tokens": max_new_tokens},
        "return_logprob": True,
        "logprob_start_len": [request.start - 1 for request in requests],
    }
    if any(request.top_k for request in requests):
        body["top_logprobs_num"] = [request.top_k for request in requests]
    if any(request.query_ids for request in requests):
        body["token_ids_logprob"] = [list(request.query_ids) for request in requests]
    return body


def parse_scores(request: ScoreRequest, response: Any) -> TokenScores:
    """Parse a response; ``GradingError`` where it is not about the tokens sent."""
    meta = response.get("meta_info") if isinstance(response, dict) else None
    if not isinstance(meta, dict):
        raise GradingError("the response has no meta_info, as one of SGLang's /generate has")
    finish_reason = meta.get("finish_reason")
    if isinstance(finish_reason, dict) and finish_reason.get("type") == "abort":
        raise GradingError(f"the request was aborted ({str(finish_reason.get('message'))[:200]})")
    scored = [_parse_pair(entry) for entry in _get_entries(meta, "input_token_logprobs", request)]
    sent = list(request.tokens[request.start :])
    if [token for token, _ in scored] != sent:
        raise GradingError("the response's log-probs are of other tokens than were sent")
    top_rows = _parse_rows(meta, "input_top_logprobs", request) if request.top_k else [[] for _ in sent]
    if len({len(row) for row in top_rows}) > 1 or any(len({t for t, _ in row}) < len(row) for row in top_rows):
        raise GradingError("the response's likeliest tokens are not as many at each place, or not all different")
    queried = _parse_rows(meta, "input_token_ids_logprobs", request) if request.query_ids else [[] for _ in sent]
    if any({token for token, _ in row} != set(request.query_ids) for row in queried):
        raise GradingError("the response's log-probs are not of the tokens that were asked about")
    return TokenScores(
        logprob_n=np.array([value for _, value in scored], np.float32),
        top_nk=np.array([[token for token, _ in row] for row in top_rows], np.int32),
        top_logprob_nk=np.array([[value for _, value in row] for row in top_rows], np.float32),
        queried_nu=np.array([[dict(row)[token] for token in request.query_ids] for row in queried], np.float32),
    )


def _parse_rows(meta: dict[str, Any], field: str, request: ScoreRequest) -> list[list[tuple[int, float]]]:
    rows = _get_entries(meta, field, request)
    if not all(isinstance(row, list) for row in rows):
        raise GradingError(f"the response's {field} are not lists")
    return [[_parse_pair(entry) for entry in row] for row in rows]


def _get_entries(meta: dict[str, Any], field: str, request: ScoreRequest) -> list[Any]:
    entries = meta.get(field)
    if not isinstance(entries, list) or len(entries) != len(request) + 1:
        count = len(entries) if isinstance(entries, list) else "no"
        raise GradingError(f"the response has {count} {field} for {len(request) + 1} tokens")
    return entries[1:]


def _parse_pair(entry: Any) -> tuple[int, float]:
    """A token and its log-prob, which a server writes as [log-prob, token, text]."""
    value, token = entry[:2] if isinstance(entry, list) and len(entry) > 1 else (None, None)
    if not isinstance(token, int) or isinstance(value, bool) or not isinstance(value, int | float):
        raise GradingError(f"the response has {str(entry)[:50]} where a log-prob and a token belong")
    if not math.isfinite(value) or value > 1e-3:
        raise GradingError(f"the response gives token {token} the log-prob {value}")
    return token, float(value)
