"""Metrics of speculative decoding: acceptance length and rate, counted over the completions that engines return.

Engines of every kind report their drafts in ``Completion.speculation``, so the counts are taken where completions
arrive: in this process, from one server or from several.
"""

from __future__ import annotations

from miles.core.media import Images
from miles.core.protocols import (
    Completion,
    Engine,
    OnTokens,
    SamplingParams,
    SpeculationCounts,
    stream_or_generate,
)
from miles.core.types import Tokens

_SHOWN_POSITIONS = 4


class SpeculationMeter:
    """Sums the drafts of all completions of the engines it wraps, until ``take_metrics``."""

    def __init__(self) -> None:
        self._counts: SpeculationCounts | None = None
        self._tokens = 0

    def wrap(self, engine: Engine) -> MeteredEngine:
        """Return an engine whose completions are counted."""
        return MeteredEngine(engine, self)

    def record(self, completion: Completion) -> None:
        """Count a completion; without speculative decoding there is nothing to count."""
        if completion.speculation is not None:
            self._counts = completion.speculation + (self._counts or SpeculationCounts())
            self._tokens += sum(len(span) for span in completion.spans)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the completions since the last call; none without speculative decoding."""
        counts, tokens = self._counts, self._tokens
        self._counts, self._tokens = None, 0
        return {} if counts is None else _compute_metrics(counts, tokens)


class MeteredEngine:
    """An engine wrapper (see core.protocols.Engine) that counts the drafts of completions."""

    def __init__(self, engine: Engine, meter: SpeculationMeter) -> None:
        self._engine = engine
        self._meter = meter

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion:
        completion = await self._engine.generate(tokens, sampling, images)
        self._meter.record(completion)
        return completion

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion:
        completion = await stream_or_generate(self._engine, tokens, sampling, on_tokens, images)
        self._meter.record(completion)
        return completion


def _compute_metrics(counts: SpeculationCounts, tokens: int) -> dict[str, float]:
    """Return the metrics of ``counts``, in a step that sampled ``tokens`` tokens."""
    metrics = {"speculative/token_share": counts.tokens / tokens if tokens else 0.0}
    if counts.verifications:
        metrics["speculative/accept_length"] = counts.accept_length
        metrics["speculative/accept_rate"] = counts.accept_rate
    if total := sum(counts.histogram):
        for number in range(1, _SHOWN_POSITIONS + 1):
            metrics[f"speculative/accepted_{number}"] = sum(counts.histogram[number:]) / total
    return metrics
