"""Replies of a server are believed only as far as they are right: whole or in pieces, and never half of a piece."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.sglang.reply import Denied, Reply, Unfit

VOCABULARY = 50


def event(tokens, logprobs, *, total=None, finish=None, **meta):
    lines = [[value, token, None] for token, value in zip(tokens, logprobs, strict=True)]
    told = {"completion_tokens": len(tokens) if total is None else total, "output_token_logprobs": lines}
    reason = None if finish is None else {"type": finish}
    return {"output_ids": tokens, "meta_info": {**told, "finish_reason": reason, "weight_version": "actor-1", **meta}}


def fresh(limit=64):
    return Reply(vocabulary=VOCABULARY, limit=limit)


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
        reply.take(event(tokens[since:end], logprobs[since:end], total=end, finish="stop" if last else None))
        done = end
    assert (reply.tokens, reply.logprobs, reply.reason, reply.label) == (tokens, logprobs, "stop", "actor-1")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, True, "x", 0.5])
def test_a_log_prob_that_is_none_is_refused_and_what_came_before_stays(value):
    reply = fresh()
    reply.take(event([1, 2], [-1.0, -2.0]))
    with pytest.raises(Unfit, match="log-prob"):
        reply.take(event([1, 2, 3], [-1.0, -2.0, value]))
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
        (event([1, 2], [-1.0, -1.0]) | {"output_ids": [1, 3]}, "where it drew token 3"),
        (event([1], [-1.0], output_token_logprobs=[]), "0 log-probs"),
        (event([1], [-1.0], weight_versions=[["actor-1", 2]]), "1 tokens, and weights that drew"),
        (event([1], [-1.0], weight_versions=[["actor-1", 1], ["actor-2", 0]]), "weights that drew"),
        (event([1], [-1.0], weight_versions=[["actor-1"]]), "for weight_versions"),
        (event([1], [-1.0], weight_versions={"actor-1": 1}), "for weight_versions"),
    ],
)
def test_what_cannot_be_an_answer_is_refused(wrong, why):
    with pytest.raises(Unfit, match=why):
        fresh().take(wrong)


def test_a_reply_that_shrinks_is_refused():
    reply = fresh()
    reply.take(event([1, 2], [-1.0, -2.0]))
    with pytest.raises(Unfit, match="after 2"):
        reply.take(event([1], [-1.0]))


def test_an_abort_with_a_status_is_a_failure_or_a_refusal_and_one_without_is_an_end():
    with pytest.raises(Denied, match="too long"):
        fresh().take(event([], [], finish_reason={"type": "abort", "status_code": 400, "message": "too long"}))
    with pytest.raises(Denied, match="too long"):
        fresh().take({"error": {"message": "too long", "code": 400}})
    with pytest.raises(Unfit, match="500: broke"):
        fresh().take(event([], [], finish_reason={"type": "abort", "status_code": 500, "message": "broke"}))
    reply = fresh()
    reply.take(event([4], [-1.0], finish_reason={"type": "abort", "message": "Aborted", "status_code": None}))
    assert reply.reason == "abort" and reply.tokens == [4]


def test_which_weights_drew_which_tokens_is_kept_as_far_as_tokens_came():
    reply = fresh()
    assert reply.runs is None
    reply.take(event([1, 2], [-1.0, -2.0], weight_versions=[["actor-1", 2]]))
    reply.take(event([3], [-1.0], total=3, weight_versions=[["actor-1", 2], ["actor-2", 1]]))
    with pytest.raises(Unfit):
        reply.take(event([99], [-1.0], total=4, weight_versions=[["actor-1", 2], ["actor-2", 2]]))
    assert reply.runs == [("actor-1", 2), ("actor-2", 1)] and reply.tokens == [1, 2, 3]
