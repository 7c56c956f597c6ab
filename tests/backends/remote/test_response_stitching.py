"""A completion stitched from several responses equals that of one response, and versions are exact."""

import base64
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.remote.response import GenerateResponse
from miles.backends.remote.response_stitching import ResponseStitcher, RoutedExpertsShape
from miles.core.errors import EngineError
from miles.core.indexer_topk import encode_indexer_topk
from miles.core.protocols import SamplingParams, SpeculationCounts
from miles.core.token_fields import INDEXER_TOPK, ROUTED_EXPERTS
from miles.core.types import Status, Version
from miles.models.indexer_layout import IndexerLayout

PROMPT, END = [7, 8, 9], 2
EXPERTS = RoutedExpertsShape(num_layers=2, experts_per_token=2, num_experts=8)


def parts(sampling=None, *, decode=None, experts=None, indexer=None):
    return ResponseStitcher(
        PROMPT,
        sampling or SamplingParams(max_new_tokens=40),
        eos_token_ids=frozenset([END]),
        decode=decode,
        experts=experts,
        indexer=indexer,
    )


def reply(tokens, reason=None, experts=None, indexer=None):
    tokens = list(tokens)
    return GenerateResponse(
        vocab_size=300,
        limit=100,
        tokens=tokens,
        logprobs=[-float(token) / 100 for token in tokens],
        finish_reason=reason,
        experts=experts,
        indexer=indexer,
    )


def add(answer, written, number=0):
    answer.add(written, [(Version(number=number), len(written.tokens))])


@given(
    st.lists(
        st.tuples(st.lists(st.integers(3, 200), max_size=6), st.integers(0, 3)),
        min_size=1,
        max_size=6,
    )
)
def test_every_token_keeps_its_version_and_neighbours_of_one_version_are_one_span(trajectories):
    trajectories.sort(key=lambda trajectory: trajectory[1])
    answer = parts()
    for tokens, number in trajectories:
        add(answer, reply(tokens, "abort"), number)
    done = answer.completion("abort")
    written = [(token, number) for tokens, number in trajectories for token in tokens]
    reported = [(int(t), span.version.number) for span in done.spans for t in span.tokens if span.version is not None]
    assert reported == written
    versions = [span.version for span in done.spans]
    assert all(a != b for a, b in itertools.pairwise(versions)) and all(len(span) for span in done.spans)
    assert answer.remaining.max_new_tokens == 40 - len(written) and answer.input_ids == [
        *PROMPT,
        *(t for t, _ in written),
    ]


@given(st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), max_size=4), max_size=4))
def test_a_trajectory_that_was_kept_while_weights_came_has_a_span_for_each_version_that_wrote_in_it(trajectories):
    answer, written = parts(SamplingParams(max_new_tokens=200, ignore_eos=True)), []
    for runs in trajectories:
        numbers = [number for number, count in sorted(runs) for _ in range(count)]
        answer.add(reply(range(10, 10 + len(numbers)), "abort"), [(Version(number=n), c) for n, c in sorted(runs)])
        written += zip(range(10, 10 + len(numbers)), numbers, strict=True)
    spans = answer.completion("abort").spans
    assert [(int(t), span.version.number) for span in spans for t in span.tokens if span.version is not None] == written
    assert all(a.version != b.version for a, b in itertools.pairwise(spans)) and all(len(span) for span in spans)


@pytest.mark.parametrize(("last", "reason"), [(END, "stop"), (5, "stop"), (6, None)])
def test_a_server_lost_behind_the_last_token_has_ended_the_answer(last, reason):
    answer = parts(SamplingParams(max_new_tokens=40, stop_token_ids=(5,)))
    add(answer, reply([10, last]))
    assert answer.finish_reason == reason


def test_a_server_lost_at_the_limit_has_ended_the_answer():
    answer = parts(SamplingParams(max_new_tokens=2))
    add(answer, reply([10, 11]))
    assert answer.finish_reason == "length" and answer.completion("length").status is Status.TRUNCATED


def test_the_end_of_a_sequence_that_is_ignored_ends_nothing():
    answer = parts(SamplingParams(max_new_tokens=9, ignore_eos=True))
    add(answer, reply([10, END]))
    assert answer.finish_reason is None


def decoded(tokens):
    return "".join(chr(token) for token in tokens)


def test_a_stop_text_that_lies_across_two_trajectories_stops_and_what_is_behind_it_is_left_out():
    answer = parts(SamplingParams(max_new_tokens=40, stop=("abc",)), decode=decoded)
    add(answer, reply(map(ord, "xxa"), "abort"), 1)
    add(answer, reply(map(ord, "bcdd"), "length"), 2)
    done = answer.completion(answer.finish_reason or "")
    assert answer.finish_reason == "stop" and decoded(t for span in done.spans for t in span.tokens) == "xxabc"
    assert [len(span) for span in done.spans] == [3, 2]


def routed(rows):
    return base64.b64encode(np.array(rows, np.int32).tobytes()).decode()


def rows(first, count):
    return [[[(first + i) % 8, 1], [2, 3]] for i in range(count)]


def test_experts_are_those_of_the_trajectory_that_computed_a_token_first():
    answer = parts(experts=EXPERTS)
    add(answer, reply([10, 11], "abort", routed(rows(0, 4))), 1)  # all but the last token
    add(answer, reply([12, END], "stop", routed(rows(4, 6))), 2)
    done = answer.completion("stop")
    reported = np.concatenate(
        [done.prompt_extras[ROUTED_EXPERTS], *(span.extras[ROUTED_EXPERTS] for span in done.spans)]
    )
    assert reported[:, 0, 0].tolist() == [0, 1, 2, 3, 0, 1, 255] and reported.dtype == np.uint8


def test_experts_that_never_came_are_told_as_unknown():
    answer = parts(experts=EXPERTS)
    add(answer, reply([10, END]))
    done = answer.completion("stop")
    assert (done.spans[0].extras[ROUTED_EXPERTS] == 255).all() and len(done.prompt_extras[ROUTED_EXPERTS]) == len(
        PROMPT
    )


def test_drafts_of_all_parts_are_counted():
    answer = parts()
    for tokens, counts in (
        ([3, 4, 5], SpeculationCounts(verifications=1, drafted=4, accepted=2, histogram=(0, 0, 1))),
        ([6], None),
        ([7, 8], SpeculationCounts(verifications=2, drafted=8, accepted=0, histogram=(2,))),
    ):
        part = reply(tokens, "abort")
        part.speculation = counts
        add(answer, part)
    expected = SpeculationCounts(verifications=3, drafted=12, accepted=2, histogram=(2, 0, 1))
    assert answer.completion("abort").speculation == expected
    plain = parts()
    add(plain, reply([3], "stop"))
    assert plain.completion("stop").speculation is None


SELECTED = IndexerLayout(layers=(0, 1), count=2, groups=1, dtype="uint16")


def selections(count):
    """Every token selects itself and the token before it, or has no record."""
    rows = [[[t, t - 1 if t else 65535], [65535, t]] for t in range(count)]
    return np.array(rows, np.uint16).reshape(count, 2, 2)


def test_selections_of_indexers_are_those_of_the_response_that_computed_a_token():
    answer = parts(indexer=SELECTED)
    first, then = selections(4), selections(6)
    then[:4] = 0
    add(answer, reply([3, 4], "abort", indexer=encode_indexer_topk(first)))
    add(answer, reply([5, 6], "length", indexer=encode_indexer_topk(then)), 1)
    done = answer.completion("length")
    found = np.concatenate([done.prompt_extras[INDEXER_TOPK], *(span.extras[INDEXER_TOPK] for span in done.spans)])
    assert np.array_equal(found[:4], first) and np.array_equal(found[4:6], then[4:])
    assert (found[6:] == 65535).all() and len(found) == 7


@pytest.mark.parametrize("indexer", [None, "", encode_indexer_topk(selections(3))])
def test_a_finished_response_without_its_selections_is_refused(indexer):
    with pytest.raises(EngineError, match="indexer_topk"):
        add(parts(indexer=SELECTED), reply([3, 4], "stop", indexer=indexer))
