"""Selections of indexers on the wire: what is decoded is what was encoded, and nothing else is taken."""

import base64

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import EngineError
from miles.core.indexer_topk import decode_indexer_topk, encode_indexer_topk


@given(st.integers(0, 6), st.sampled_from(["uint16", "uint32"]), st.randoms(use_true_random=False))
def test_selections_travel_unchanged(tokens, dtype, random):
    seen = [
        [[random.choice([*range(t + 1), np.iinfo(dtype).max]) for _ in range(3)] for _ in "ab"] for t in range(tokens)
    ]
    selected_TLk = np.array(seen, dtype).reshape(tokens, 2, 3)
    text = encode_indexer_topk(selected_TLk)
    assert (np.frombuffer(base64.b64decode(text), "<i4") >= -1).all()
    found = decode_indexer_topk(text, tokens=tokens, layers=2, count=3, dtype=dtype)
    assert found.dtype == selected_TLk.dtype and np.array_equal(found, selected_TLk)


def encode(*values):
    return base64.b64encode(np.array(values, "<i4").tobytes()).decode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no indexer_topk, which --use-rollout-indexer-replay needs"),
        (["a"], "has no indexer_topk"),
        ("not base64", "is not base64"),
        (encode(0, 0, 0), "has 12 bytes instead of 16 for 2 tokens, 1 layers and 2 entries"),
        (encode(0, -1, 0, 2), "selects positions that a token does not see"),
        (encode(0, -2, 0, 1), "selects positions that a token does not see"),
    ],
)
def test_malformed_selections_are_refused_in_a_sentence(text, said):
    with pytest.raises(EngineError, match=said):
        decode_indexer_topk(text, tokens=2, layers=1, count=2, dtype="uint16")
