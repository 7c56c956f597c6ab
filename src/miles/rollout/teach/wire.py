"""SGLang's ``/generate`` as a way to have tokens scored: what is posted, and what is believed of the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles.core.types import Floats
from miles.rollout.reward.score import GradingError

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """Log-probs of ``tokens`` from position ``start`` on, which is above 0.

    Beside each, ``tops`` of the likeliest tokens and the tokens ``watch``, with their log-probs.
    """

    tokens: tuple[int, ...]
    start: int
    tops: int = 0
    watch: tuple[int, ...] = ()

    def __len__(self) -> int:
        """How many tokens are to be scored."""
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What a teacher said of the n tokens of a wish, k of the likeliest and u watched ones at each place.

    A model of fewer tokens than ``tops`` gives as many as it has.
    """

    logprob_n: Floats
    top_nk: Ids
    top_logprob_nk: Floats
    watched_nu: Floats


def body_of(wishes: Sequence[Wish], *, temperature: float, draw: int = 0) -> dict[str, Any]:
    """What is posted to ``/generate``; ``draw`` tokens are drawn beyond those that are scored."""
    # A server gives the first place it is asked about no log-prob, so it is asked about one before.
    body: dict[str, Any] = {
        "input_ids": [list(wish.tokens) for wish in wishes],
        "sampling_params": {"temperature": temperature, "max_new_tokens": draw},
        "return_logprob": True,
        "logprob_start_len": [wish.start - 1 for wish in wishes],
    }
    if any(wish.tops for wish in wishes):
        body["top_logprobs_num"] = [wish.tops for wish in wishes]
    if any(wish.watch for wish in wishes):
        body["token_ids_logprob"] = [list(wish.watch) for wish in wishes]
    return body


def said_of(wish: Wish, answer: Any) -> Said:
    """What an answer says, or ``GradingError`` where it is not about the tokens that were sent."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise GradingError("the answer has no meta_info, as one of SGLang's /generate has")
    ended = meta.get("finish_reason")
    if isinstance(ended, dict) and ended.get("type") == "abort":
        raise GradingError(f"the request was aborted ({str(ended.get('message'))[:200]})")
    own = [_pair(entry) for entry in _entries(meta, "input_token_logprobs", wish)]
    sent = list(wish.tokens[wish.start :])
    if [token for token, _ in own] != sent:
        raise GradingError("the answer's log-probs are of other tokens than were sent")
    tops = _rows(meta, "input_top_logprobs", wish) if wish.tops else [[] for _ in sent]
    if len({len(row) for row in tops}) > 1 or any(len({token for token, _ in row}) < len(row) for row in tops):
        raise GradingError("the answer's likeliest tokens are not as many at each place, or not all different")
    watched = _rows(meta, "input_token_ids_logprobs", wish) if wish.watch else [[] for _ in sent]
    if any({token for token, _ in row} != set(wish.watch) for row in watched):
        raise GradingError("the answer's log-probs are not of the tokens that were asked about")
    return Said(
        logprob_n=np.array([value for _, value in own], np.float32),
        top_nk=np.array([[token for token, _ in row] for row in tops], np.int32),
        top_logprob_nk=np.array([[value for _, value in row] for row in tops], np.float32),
        watched_nu=np.array([[dict(row)[token] for token in wish.watch] for row in watched], np.float32),
    )


def _rows(meta: dict[str, Any], field: str, wish: Wish) -> list[list[tuple[int, float]]]:
    rows = _entries(meta, field, wish)
    if not all(isinstance(row, list) for row in rows):
        raise GradingError(f"the answer's {field} are not lists")
    return [[_pair(entry) for entry in row] for row in rows]


def _entries(meta: dict[str, Any], field: str, wish: Wish) -> list[Any]:
    entries = meta.get(field)
    if not isinstance(entries, list) or len(entries) != len(wish) + 1:
        count = len(entries) if isinstance(entries, list) else "no"
        raise GradingError(f"the answer has {count} {field} for {len(wish) + 1} tokens")
    return entries[1:]


def _pair(entry: Any) -> tuple[int, float]:
    """A token and its log-prob, which a server writes as [log-prob, token, text]."""
    value, token = entry[:2] if isinstance(entry, list) and len(entry) > 1 else (None, None)
    if not isinstance(token, int) or isinstance(value, bool) or not isinstance(value, int | float):
        raise GradingError(f"the answer has {str(entry)[:50]} where a log-prob and a token belong")
    if not math.isfinite(value) or value > 1e-3:
        raise GradingError(f"the answer gives token {token} the log-prob {value}")
    return token, float(value)
