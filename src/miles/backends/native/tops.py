"""The engine's door with the likeliest tokens beside each drawn one, for those who look at more than what was drawn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from miles.backends.native.engine import NativeEngine
from miles.backends.native.request import Ask
from miles.core.extras import TOP_TOKENS
from miles.core.protocols import Completion, Sampling
from miles.core.types import Span, Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A core.protocols.Engine whose spans carry, as an extra, the ``k`` tokens that were likeliest at each place.

    A vocabulary of fewer tokens gives as many as it has; the others are -1.
    """

    engine: NativeEngine
    k: int

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion:
        answer = self.engine.open(Ask(tokens=tokens, sampling=sampling, tops=self.k))
        completion = await answer.completion()
        top_nk = np.full((len(answer.tops), self.k), -1, np.int32)
        for row, tops in zip(top_nk, answer.tops, strict=True):
            row[: len(tops)] = [token for token, _ in tops[: self.k]]
        assert len(top_nk) == sum(map(len, completion.spans)), "every drawn token has its likeliest ones"
        spans: list[Span] = []
        done = 0
        for span in completion.spans:
            spans.append(replace(span, extras={**span.extras, TOP_TOKENS: top_nk[done : done + len(span)]}))
            done += len(span)
        return replace(completion, spans=tuple(spans))
