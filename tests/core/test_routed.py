"""Experts as they are stored and as they travel."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import EngineError
from miles.core.routed import as_choices, expert_dtype, from_sglang, to_sglang, unrecorded


@given(st.integers(1, 70_000), st.integers(0, 5), st.integers(1, 3), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_what_was_recorded_comes_back_from_sglangs_form(experts, tokens, layers, chosen, seed):
    rng, dtype = np.random.default_rng(seed), expert_dtype(experts)
    routed = rng.integers(0, experts, (tokens, layers, chosen)).astype(dtype)
    routed[::2] = unrecorded(dtype)
    assert not (routed[1::2] == unrecorded(dtype)).any(), "no expert has the number of none"
    told = to_sglang(routed)
    assert np.frombuffer(base64.b64decode(told), np.int32).reshape(routed.shape).tolist() == as_choices(routed).tolist()
    back = from_sglang(told, tokens=tokens, layers=layers, chosen=chosen, experts=experts)
    assert back.dtype == dtype and np.array_equal(back, routed)


def test_experts_take_one_byte_as_long_as_they_can():
    assert [expert_dtype(n).itemsize for n in (8, 255, 256, 65_535, 65_536)] == [1, 1, 2, 2, 4]
    choices = as_choices(np.array([[[254, 255]]], np.uint8))
    assert choices.dtype == np.int16 and choices.tolist() == [[[254, -1]]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no base64!", "is not base64"),
        (base64.b64encode(bytes(12)).decode(), r"has 12 bytes, and 2 tokens of 1 layers with 2 experts each are 16"),
        (to_sglang(np.array([[[0, 1]], [[2, 7]]], np.uint8)), r"names expert 7, and the model has 4"),
    ],
)
def test_what_cannot_be_this_models_is_refused_in_a_sentence(text, complaint):
    with pytest.raises(EngineError, match=complaint):
        from_sglang(text, tokens=2, layers=1, chosen=2, experts=4)
