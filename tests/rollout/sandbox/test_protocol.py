"""What goes over the wire between a run and its supervisor comes out as it went in."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.sandbox.protocol import (
    IsolationPlan,
    RunRequest,
    SandboxLimits,
    SandboxResult,
    decode_result,
    encode_request,
    encode_result,
    read_request,
)

names = st.text(min_size=1, max_size=10)


@given(
    st.lists(names, min_size=1).map(tuple),
    st.dictionaries(names, st.binary(max_size=50), max_size=4),
    st.binary(max_size=100),
)
def test_an_order_arrives_as_it_was_given(argv, files, stdin):
    bounds = SandboxLimits(1.5, 1.0, 2, 3, 4, 5, 6)
    order = RunRequest(argv, IsolationPlan("user", 7, True, False), bounds, ("/usr/lib",), "/tmp", files, stdin)
    assert read_request(io.BytesIO(encode_request(order)).read) == order


@given(st.binary(max_size=100), st.binary(max_size=100), st.sampled_from([None, "wall", "memory"]))
def test_an_answer_arrives_as_it_was_given_or_not_at_all(stdout, stderr, killed_by):
    answer = SandboxResult(0, None, killed_by, 0.25, "", stdout, stderr)
    data = encode_result(answer)
    assert decode_result(data) == answer
    assert all(decode_result(data[:cut]) is None for cut in range(len(data)))


def test_an_order_that_breaks_off_is_none():
    order = RunRequest(("x",), IsolationPlan(), SandboxLimits(1, 1, 1, 1, 1, 1, 1), (), "/tmp", {"a": b"123"}, b"45")
    with pytest.raises(EOFError):
        read_request(io.BytesIO(encode_request(order)[:-1]).read)
