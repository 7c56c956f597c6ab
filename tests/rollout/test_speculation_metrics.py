"""Metrics of speculative decoding are those of the completions of a step, whichever engines returned them."""

import asyncio

import numpy as np
import pytest

from miles.core.protocols import Completion, SamplingParams, SpeculationCounts, stream_or_generate
from miles.core.types import Author, Span, Status, Version
from miles.observe.metric import SPECULATION
from miles.rollout.speculation_metrics import SpeculationMeter

PROMPT = np.array([1, 2], np.int32)


class Scripted:
    """An engine that returns ``length`` tokens with these counts of drafts."""

    def __init__(self, length: int, counts: SpeculationCounts | None) -> None:
        tokens, logprobs = np.arange(length, dtype=np.int32), np.zeros(length, np.float32)
        span = Span(author=Author.POLICY, tokens=tokens, logprobs=logprobs, version=Version())
        self._completion = Completion(spans=(span,), status=Status.COMPLETED, finish_reason="stop", speculation=counts)

    async def generate(self, tokens, sampling, images=()):
        return self._completion


def sample(*engines, stream=False):
    async def generate():
        for engine in engines:
            if stream:
                await stream_or_generate(engine, PROMPT, SamplingParams(), lambda tokens: None)
            else:
                await engine.generate(PROMPT, SamplingParams())

    asyncio.run(generate())


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_engines_add_up(stream):
    meter = SpeculationMeter()
    one = Scripted(10, SpeculationCounts(verifications=2, drafted=8, accepted=5, histogram=(0, 1, 0, 0, 1)))
    two = Scripted(6, SpeculationCounts(verifications=2, drafted=4, accepted=1, histogram=(1, 1)))
    sample(meter.wrap(one), meter.wrap(two), stream=stream)
    metrics = meter.take_metrics()
    assert metrics == {
        "speculative/token_share": 10 / 16,
        "speculative/accept_length": 2.5,
        "speculative/accept_rate": 0.5,
        "speculative/accepted_1": 0.75,
        "speculative/accepted_2": 0.25,
        "speculative/accepted_3": 0.25,
        "speculative/accepted_4": 0.25,
    }
    # Each verification samples one token more than it accepts, and no draft had more than four tokens.
    by_position = [metrics[f"speculative/accepted_{n}"] for n in range(1, 5)]
    assert metrics["speculative/accept_length"] == 1 + sum(by_position)
    assert all(any(metric.matches(name) for metric in SPECULATION) for name in metrics)
    assert meter.take_metrics() == {}, "a step has its own completions only"


def test_an_engine_that_never_drafts_has_a_share_of_zero_and_one_without_speculation_has_no_metrics():
    meter = SpeculationMeter()
    sample(meter.wrap(Scripted(3, None)))
    assert meter.take_metrics() == {}
    sample(meter.wrap(Scripted(3, SpeculationCounts())))
    assert meter.take_metrics() == {"speculative/token_share": 0.0}


def test_a_server_that_reports_no_histogram_has_no_acceptance_by_position():
    meter = SpeculationMeter()
    sample(meter.wrap(Scripted(9, SpeculationCounts(verifications=3, drafted=9, accepted=6))))
    metrics = meter.take_metrics()
    assert metrics == {
        "speculative/token_share": 1.0,
        "speculative/accept_length": 3.0,
        "speculative/accept_rate": 6 / 9,
    }
