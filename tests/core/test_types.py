"""Core types reject misaligned data."""

import doctest
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core import types
from miles.core.types import Author, Batch, Sample, Span, Status, TokenStats, Trajectory, Version


def tokens(n: int) -> np.ndarray:
    return np.arange(n, dtype=np.int32)


def written(n: int, number: int = 0, **extras) -> Span:
    return Span(
        author=Author.POLICY,
        tokens=tokens(n),
        logprobs=np.zeros(n, np.float32),
        version=Version(number=number),
        extras=extras,
    )


def sample(n: int, **changed) -> Sample:
    made = {
        "prompt_id": 0,
        "trajectory": 0,
        "tokens": tokens(n),
        "mask": np.array([False] + [True] * (n - 1)),
        "logprobs": np.zeros(n, np.float32),
        "advantages": np.zeros(n, np.float32),
        "versions": np.array([-1] + [4] * (n - 1), np.int32),
    }
    return Sample(**(made | changed))


def test_the_examples_in_the_core_types_hold():
    assert doctest.testmod(types).failed == 0


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Span(author=Author.POLICY, tokens=tokens(2)), "logprobs and version must be set on POLICY spans"),
        (
            lambda: Span(author=Author.ENV, tokens=tokens(2), logprobs=np.zeros(2, np.float32)),
            "logprobs and version must be set on POLICY spans",
        ),
        (lambda: Span(author=Author.PROMPT, tokens=np.zeros(2, np.int64)), "tokens must be int32"),
        (
            lambda: Span(author=Author.POLICY, tokens=tokens(2), logprobs=np.zeros(3, np.float32), version=Version()),
            "logprobs has 3 entries for 2 tokens",
        ),
        (lambda: written(2, routed=np.zeros((3, 1))), "routed has 3 entries for 2 tokens"),
        (lambda: sample(3, advantages=np.zeros(2, np.float32)), "advantages has 2 entries for 3 tokens"),
        (lambda: sample(3, mask=np.array([True, True, True])), "the first token of a sample has no context"),
    ],
)
def test_misaligned_arrays_are_refused_where_they_are_made(made, says):
    with pytest.raises(ValueError, match=says):
        made()


def test_a_span_cannot_be_changed_after_it_is_made():
    span = written(3)
    with pytest.raises(FrozenInstanceError):
        span.author = Author.ENV
    with pytest.raises(ValueError, match="read-only"):
        span.tokens[0] = 9


@given(st.integers(0, 8), st.integers(0, 8))
def test_cutting_a_span_keeps_everything_aligned(n, at):
    cut = written(n, routed=np.arange(n * 2).reshape(n, 2)).truncate(at)
    assert len(cut) == min(n, at) == len(cut.extras["routed"]) == len(cut.logprobs)
    assert cut.version == Version() and cut.mask.all()


def test_a_trajectory_knows_its_stalest_version_over_all_branches():
    asked = Span(author=Author.PROMPT, tokens=tokens(2))
    made = Trajectory(branches=((asked, written(2, 7)), (asked, written(1, 5))), status=Status.COMPLETED)
    assert made.oldest_version == Version(number=5) and made.response_length == 3


def test_a_trajectory_the_policy_wrote_nothing_of_has_no_version():
    asked = Span(author=Author.PROMPT, tokens=tokens(2))
    assert Trajectory(branches=((asked,),), status=Status.FAILED).oldest_version is None


def test_staleness_is_the_distance_to_the_oldest_token():
    batch = Batch(step=1, samples=(sample(3), sample(4)), num_groups=1)
    assert batch.staleness(Version(number=6)) == 2 and batch.tokens == 7


def test_token_stats_are_split_by_sample_and_may_have_none():
    stats = TokenStats(
        sample_indices=np.array([4, 1, 2], np.int32),
        counts=np.array([2, 0, 1], np.int32),
        logprobs=np.array([-1.0, -2.0, -3.0], np.float32),
        entropies=np.array([0.1, 0.2, 0.3], np.float32),
    )
    found = {index: (logprobs.tolist(), len(entropies)) for index, (logprobs, entropies) in stats.split().items()}
    assert found == {4: ([-1.0, -2.0], 2), 1: ([], 0), 2: ([-3.0], 1)}
    assert TokenStats.merge(()).split() == {}
