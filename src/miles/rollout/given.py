"""What an engine found out of tokens it was given, written into the spans those tokens are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from miles.core.errors import EngineError
from miles.core.types import Array, Span


def stamped(spans: Sequence[Span], given: Mapping[str, Array]) -> list[Span]:
    """The same spans; ``given`` is of their last tokens, and fills in where a token has nothing of that name yet.

    A token has nothing where its entry is the greatest number of an integer type: it keeps what was found out first,
    which is what the tokens behind it were drawn from.
    """
    out = list(spans)
    for name, values in given.items():
        end = len(values)
        if end > sum(map(len, spans)):
            raise EngineError(f"an engine told the {name} of {end} tokens, and was given {sum(map(len, spans))}.")
        for at in range(len(out) - 1, -1, -1):
            size = min(len(out[at]), end)
            if size:
                out[at] = _filled(out[at], name, values[end - size : end])
            end -= size
    return out


def _filled(span: Span, name: str, tail: Array) -> Span:
    """``span`` with ``tail`` at its last tokens, where it knows nothing."""
    none = np.iinfo(tail.dtype).max
    whole = np.full((len(span), *tail.shape[1:]), none, tail.dtype)
    whole[len(span) - len(tail) :] = tail
    if name in span.extras:
        own = span.extras[name]
        if own.shape != whole.shape or own.dtype != whole.dtype:
            raise EngineError(
                f"engines told the {name} of one attempt as {own.dtype}{list(own.shape[1:])} and as "
                f"{whole.dtype}{list(whole.shape[1:])}; do they serve the same model?"
            )
        unknown = (own == none).reshape(len(own), -1).all(1)
        whole = np.where(unknown.reshape(-1, *(1,) * (own.ndim - 1)), whole, own)
    return replace(span, extras={**span.extras, name: whole})
