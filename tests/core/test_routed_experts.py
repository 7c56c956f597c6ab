"""Experts as they are stored and as they travel."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import EngineError
from miles.core.routed_experts import decode_from_sglang, encode_for_sglang, expert_dtype, to_signed_ids, unrecorded_id


@given(st.integers(1, 70_000), st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_what_was_recorded_comes_back_from_sglangs_form(experts, tokens, layers, chosen, seed):
    rng, dtype = np.random.default_rng(seed), expert_dtype(experts)
    routed = rng.integers(0, experts, (tokens, layers, chosen)).astype(dtype)
    routed[::2] = unrecorded_id(dtype)
    assert not (routed[1::2] == unrecorded_id(dtype)).any(), "no expert has the number of none"
    reported = encode_for_sglang(routed)
    assert (
        np.frombuffer(base64.b64decode(reported), np.int32).reshape(routed.shape).tolist()
        == to_signed_ids(routed).tolist()
    )
    back = decode_from_sglang(reported, tokens=tokens, layers=layers, top_k=chosen, experts=experts)
    assert back.dtype == dtype and np.array_equal(back, routed)


def test_experts_take_one_byte_as_long_as_they_can():
    assert [expert_dtype(n).itemsize for n in (8, 255, 256, 65_535, 65_536)] == [1, 1, 2, 2, 4]
    choices = to_signed_ids(np.array([[[254, 255]]], np.uint8))
    assert choices.dtype == np.int16 and choices.tolist() == [[[254, -1]]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no base64!", "is not base64"),
        (base64.b64encode(bytes(12)).decode(), r"has 12 bytes instead of 16 for 2 tokens, 1 layers and top-2"),
        (encode_for_sglang(np.array([[[0, 1]], [[2, 7]]], np.uint8)), r"names expert 7, but the model has 4"),
    ],
)
def test_what_cannot_be_this_models_is_refused_in_a_sentence(text, complaint):
    with pytest.raises(EngineError, match=complaint):
        decode_from_sglang(text, tokens=2, layers=1, top_k=2, experts=4)
