"""What changed, sent and put together again, is what it was made of; whatever else comes is refused."""

import zlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.core.errors import SyncError
from miles.sync.delta import apply_delta, encode_delta

LIMIT = 1 << 20


@settings(deadline=None, max_examples=examples(60))
@given(
    kind=st.sampled_from([torch.float32, torch.bfloat16]),
    size=st.integers(0, 200),
    places=st.sets(st.integers(0, 199)),
)
def test_what_comes_out_is_what_was_meant(kind, size, places):
    before = {"a": torch.randn(size).to(kind), "gone": torch.ones(2)}
    now = {"a": before["a"].clone(), "new": torch.randn(3)}
    for place in places:
        if place < size:
            now["a"][place] = -now["a"][place] + 1
    found = apply_delta(encode_delta("v1", before, now), "v1", before.__getitem__, LIMIT)
    assert found.keys() == now.keys()
    assert all(torch.equal(found[name], now[name]) and found[name].dtype == now[name].dtype for name in now)


def test_few_changes_are_few_bytes_and_many_are_a_whole_tensor():
    before = {"a": torch.randn(20_000)}
    now = {"a": before["a"].clone()}
    now["a"][::1000] += 1
    few = len(encode_delta("v", before, now))
    assert few < now["a"].nbytes / 50
    now["a"][::2] += 1
    assert len(encode_delta("v", before, now)) > now["a"].nbytes / 2


def test_negative_zeros_and_numbers_that_are_none_are_changes_of_bits():
    before = {"a": torch.tensor([0.0, float("nan")] * 20)}
    now = {"a": before["a"].clone()}
    now["a"][0] = -0.0
    found = apply_delta(encode_delta("v", before, now), "v", before.__getitem__, LIMIT)["a"]
    assert torch.equal(found.view(torch.int32), now["a"].view(torch.int32))


def test_changes_against_another_version_or_of_another_tensor_are_refused():
    before, now = {"a": torch.zeros(100)}, {"a": torch.zeros(100)}
    now["a"][50] = 1
    body = encode_delta("v1", before, now)
    with pytest.raises(SyncError, match="against version 'v1', but this engine has 'v2'"):
        apply_delta(body, "v2", before.__getitem__, LIMIT)
    with pytest.raises(SyncError, match="does not fit"):
        apply_delta(body, "v1", lambda name: torch.zeros(10), LIMIT)
    with pytest.raises(SyncError, match="does not fit"):
        apply_delta(body, "v1", lambda name: torch.zeros(100, dtype=torch.float16), LIMIT)
    for wrong in (body[:-9], b"v1\nrubbish", b"v1\n" + zlib.compress(b"rubbish"), b"v1\n"):
        with pytest.raises(SyncError):
            apply_delta(wrong, "v1", before.__getitem__, LIMIT)
    with pytest.raises(SyncError, match="larger than 64 bytes"):
        apply_delta(body, "v1", before.__getitem__, 64)
