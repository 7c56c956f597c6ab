"""Span extras: per-token data the engine returned for prompt tokens, written into the spans of those tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from miles.core.errors import EngineError
from miles.core.types import Array, Span


def fill_span_extras(spans: Sequence[Span], extras: Mapping[str, Array]) -> list[Span]:
    """Fill ``extras``, which are of the spans' last tokens, in where a token has no entry of that name yet.

    The maximum of an integer type marks a missing entry. A token keeps its first entry, which is what the tokens after
    it were sampled with.
    """
    out = list(spans)
    for name, values in extras.items():
        end = len(values)
        if end > sum(map(len, spans)):
            raise EngineError(f"the engine returned {name} for {end} tokens, but was sent {sum(map(len, spans))}.")
        for at in range(len(out) - 1, -1, -1):
            size = min(len(out[at]), end)
            if size:
                out[at] = _fill_span(out[at], name, values[end - size : end])
            end -= size
    return out


def _fill_span(span: Span, name: str, tail: Array) -> Span:
    """Write ``tail`` to the last tokens of ``span``, where it has no entry."""
    missing = np.iinfo(tail.dtype).max
    filled = np.full((len(span), *tail.shape[1:]), missing, tail.dtype)
    filled[len(span) - len(tail) :] = tail
    if name in span.extras:
        own = span.extras[name]
        if own.shape != filled.shape or own.dtype != filled.dtype:
            raise EngineError(
                f"engines returned {name} of one trajectory as {own.dtype}{list(own.shape[1:])} and as "
                f"{filled.dtype}{list(filled.shape[1:])}; do they serve the same model?"
            )
        unknown = (own == missing).reshape(len(own), -1).all(1)
        filled = np.where(unknown.reshape(-1, *(1,) * (own.ndim - 1)), filled, own)
    return replace(span, extras={**span.extras, name: filled})
