"""Responses of a server are validated event by event."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.remote.response import GenerateResponse, InvalidResponse, RequestDenied
from miles.core.protocols import SpeculationCounts

VOCABULARY = 50


def event(tokens, logprobs, *, total=None, finish=None, **meta):
    lines = [[value, token, None] for token, value in zip(tokens, logprobs, strict=True)]
    reported = {"completion_tokens": len(tokens) if total is None else total, "output_token_logprobs": lines}
    reason = None if finish is None else {"type": finish}
    return {
        "output_ids": tokens,
        "meta_info": {**reported, "finish_reason": reason, "weight_version": "actor-1", **meta},
    }


def fresh(limit=64):
    return GenerateResponse(vocab_size=VOCABULARY, limit=limit)


@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    whole=st.booleans(),
)
def test_streams_of_all_there_is_and_streams_of_what_is_new_say_the_same(tokens, cuts, whole):
    logprobs = [-0.1 * (i + 1) for i in range(len(tokens))]
    reply, done = fresh(), 0
    for end in sorted({*(cut for cut in cuts if cut <= len(tokens)), len(tokens)}):
        since = 0 if whole else done
        last = end == len(tokens)
        reply.add_event(event(tokens[since:end], logprobs[since:end], total=end, finish="stop" if last else None))
        done = end
    assert (reply.tokens, reply.logprobs, reply.finish_reason, reply.weight_version) == (
        tokens,
        logprobs,
        "stop",
        "actor-1",
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, True, "x", 0.5])
def test_a_log_prob_that_is_none_is_refused_and_what_came_before_stays(value):
    reply = fresh()
    reply.add_event(event([1, 2], [-1.0, -2.0]))
    with pytest.raises(InvalidResponse, match="log-prob"):
        reply.add_event(event([1, 2, 3], [-1.0, -2.0, value]))
    assert reply.tokens == [1, 2] and reply.logprobs == [-1.0, -2.0]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"output_ids": [1]}, "no meta_info"),
        ([], "no meta_info"),
        ({"error": {"message": "boom"}}, "boom"),
        (event([VOCABULARY], [-1.0]), "vocabulary"),
        (event([-1], [-1.0]), "vocabulary"),
        (event([1], [-1.0], total=2), "no output_ids"),
        (event([1], [-1.0], total=True), "completion_tokens"),
        (event([1] * 65, [-1.0] * 65), "limit"),
        (event([1], [-1.0], finish="tired"), "reason"),
        (event([1, 2], [-1.0, -1.0]) | {"output_ids": [1, 3]}, "where it sampled token 3"),
        (event([1], [-1.0], output_token_logprobs=[]), "0 log-probs"),
        (event([1], [-1.0], weight_versions=[["actor-1", 2]]), "1 tokens, but weight_versions"),
        (event([1], [-1.0], weight_versions=[["actor-1", 1], ["actor-2", 0]]), "but weight_versions"),
        (event([1], [-1.0], weight_versions=[["actor-1"]]), "for weight_versions"),
        (event([1], [-1.0], weight_versions={"actor-1": 1}), "for weight_versions"),
    ],
)
def test_what_cannot_be_an_answer_is_refused(wrong, why):
    with pytest.raises(InvalidResponse, match=why):
        fresh().add_event(wrong)


def test_a_reply_that_shrinks_is_refused():
    reply = fresh()
    reply.add_event(event([1, 2], [-1.0, -2.0]))
    with pytest.raises(InvalidResponse, match="after 2"):
        reply.add_event(event([1], [-1.0]))


def test_an_abort_with_a_status_is_a_failure_or_a_refusal_and_one_without_is_an_end():
    with pytest.raises(RequestDenied, match="too long"):
        fresh().add_event(event([], [], finish_reason={"type": "abort", "status_code": 400, "message": "too long"}))
    with pytest.raises(RequestDenied, match="too long"):
        fresh().add_event({"error": {"message": "too long", "code": 400}})
    with pytest.raises(InvalidResponse, match="500: broke"):
        fresh().add_event(event([], [], finish_reason={"type": "abort", "status_code": 500, "message": "broke"}))
    reply = fresh()
    reply.add_event(event([4], [-1.0], finish_reason={"type": "abort", "message": "Aborted", "status_code": None}))
    assert reply.finish_reason == "abort" and reply.tokens == [4]


def test_which_weights_drew_which_tokens_is_kept_as_far_as_tokens_came():
    reply = fresh()
    assert reply.version_runs is None
    reply.add_event(event([1, 2], [-1.0, -2.0], weight_versions=[["actor-1", 2]]))
    reply.add_event(event([3], [-1.0], total=3, weight_versions=[["actor-1", 2], ["actor-2", 1]]))
    with pytest.raises(InvalidResponse):
        reply.add_event(event([99], [-1.0], total=4, weight_versions=[["actor-1", 2], ["actor-2", 2]]))
    assert reply.version_runs == [("actor-1", 2), ("actor-2", 1)] and reply.tokens == [1, 2, 3]


ODD = st.sampled_from([True, None, -1, 50, 7.0, "7", [], math.nan, math.inf, 0.5, 0, -3])
LINE = st.one_of(st.tuples(st.floats(-9, 0), st.integers(0, 49), st.none()).map(list), st.lists(ODD, max_size=3), ODD)


@given(st.lists(st.tuples(st.one_of(st.integers(0, 49), ODD), LINE), min_size=1, max_size=6))
def test_a_glance_at_all_tokens_believes_what_a_look_at_each_does(pairs):
    tokens, lines = [token for token, _ in pairs], [line for _, line in pairs]
    reply = GenerateResponse(vocab_size=50, limit=64)
    try:
        each = [reply._parse_logprob(token, line) for token, line in pairs]
    except InvalidResponse:
        each = None
    glance = reply._parse_logprobs_fast(tokens, lines)
    assert glance is None or glance == each


def test_what_is_right_is_seen_at_a_glance():
    reply = GenerateResponse(vocab_size=50, limit=64)
    assert reply._parse_logprobs_fast([1, 2], [[-0.5, 1, None], [-0.25, 2, None]]) == [-0.5, -0.25]


FORMER = {"spec_verify_ct": 4, "spec_accept_token_num": 5, "spec_draft_token_num": 12}
PRESENT = {"spec_verify_ct": 4, "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 12}


@pytest.mark.parametrize("fields", [FORMER, PRESENT, FORMER | {"spec_accept_histogram": [1, 2, 0, 1]}])
def test_counts_of_speculative_decoding_are_read_under_all_names_that_sglang_gave_them(fields):
    reply = fresh()
    reply.add_event(event([1], [-1.0], finish="stop", **fields))
    assert reply.speculation == SpeculationCounts(
        verifications=4, drafted=12, accepted=5, histogram=tuple(fields.get("spec_accept_histogram", ()))
    )
    assert reply.speculation is not None
    assert (reply.speculation.accept_length, reply.speculation.accept_rate) == (2.25, 5 / 12)


@pytest.mark.parametrize(
    "wrong",
    [{}, {"spec_verify_ct": 3}, FORMER | {"spec_verify_ct": -1}, FORMER | PRESENT | {"spec_num_correct_drafts": "5"}],
)
def test_a_response_without_usable_counts_of_drafts_is_valid_and_has_none(wrong):
    reply = fresh()
    reply.add_event(event([1], [-1.0], finish="stop", **wrong))
    assert reply.tokens == [1] and reply.speculation is None
