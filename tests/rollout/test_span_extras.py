"""What an engine found out of tokens it was given goes to the spans they are of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import EngineError
from miles.core.types import Author, Span, Version
from miles.rollout.span_extras import fill_span_extras

NONE = 255


def span(tokens, author=Author.ENV, routed=None):
    own = {"logprobs": np.zeros(tokens, np.float32), "version": Version()} if author is Author.POLICY else {}
    extras = {} if routed is None else {"routed_experts": np.array(routed, np.uint8).reshape(tokens, 1, 2)}
    return Span(author=author, tokens=np.arange(tokens, dtype=np.int32), extras=extras, **own)


def experts(spans):
    return np.concatenate([s.extras["routed_experts"] for s in spans])[:, 0].tolist()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_the_last_tokens_are_told_whichever_spans_they_are_of(sizes, data):
    reported = data.draw(st.integers(0, sum(sizes)))
    values = np.arange(reported, dtype=np.uint8).repeat(2).reshape(reported, 1, 2)
    spans = fill_span_extras([span(n) for n in sizes], {"routed_experts": values})
    found = [s.extras.get("routed_experts", np.full((len(s), 1, 2), NONE)) for s in spans]
    missing = sum(sizes) - reported
    assert [len(s) for s in spans] == sizes
    assert np.concatenate(found)[:, 0, 0].tolist() == [NONE] * missing + list(range(reported))


def test_a_token_keeps_what_was_found_out_first():
    reply = span(3, Author.POLICY, [[1, 2], [3, 4], [NONE, NONE]])
    spans = fill_span_extras([span(1), reply, span(1)], {"routed_experts": np.full((5, 1, 2), 7, np.uint8)})
    assert experts(spans) == [[7, 7], [1, 2], [3, 4], [7, 7], [7, 7]]
    assert reply.extras["routed_experts"][2].tolist() == [[NONE, NONE]], "what was given stays as it is"


def test_what_does_not_fit_is_refused_in_a_sentence():
    with pytest.raises(EngineError, match="returned routed_experts for 3 tokens, but was sent 2"):
        fill_span_extras([span(2)], {"routed_experts": np.zeros((3, 1, 2), np.uint8)})
    with pytest.raises(EngineError, match=r"as uint8\[1, 2\] and as uint16\[1, 2\]; do they serve the same model"):
        fill_span_extras([span(1, routed=[[1, 2]])], {"routed_experts": np.zeros((1, 1, 2), np.uint16)})
