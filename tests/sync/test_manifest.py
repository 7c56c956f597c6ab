"""A digest sees every bit, and sees only bits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.core.types import Version
from miles.kernels.runtime import checksum
from miles.sync.manifest import build_manifest, compute_digest


@settings(deadline=None, max_examples=examples(100))
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
    size=st.integers(1, 300),
    data=st.data(),
)
def test_flipping_any_bit_changes_the_digest(dtype, size, data):
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    before = compute_digest(tensor)
    where = data.draw(st.integers(0, len(raw) - 1))
    raw[where] ^= 1 << data.draw(st.integers(0, 7))
    assert compute_digest(tensor) != before


def test_swapping_two_rows_changes_the_digest():
    tensor = torch.randn(4, 8)
    assert compute_digest(tensor) != compute_digest(tensor[[1, 0, 2, 3]])


def test_the_digest_does_not_depend_on_how_the_tensor_lies_in_memory():
    tensor = torch.randn(6, 10)
    spread = torch.empty(10, 6).t()
    spread.copy_(tensor)
    assert not spread.is_contiguous() and compute_digest(spread) == compute_digest(tensor)


def test_the_digest_does_not_depend_on_the_size_of_its_pieces(monkeypatch):
    tensor = torch.randn(1000)
    whole = compute_digest(tensor)
    monkeypatch.setattr(checksum, "_COLUMNS", 7)
    monkeypatch.setattr(checksum, "_ROWS", 3)
    assert compute_digest(tensor) == whole


def test_an_empty_tensor_and_a_negative_zero_have_digests():
    assert compute_digest(torch.empty(0)) == 0
    assert compute_digest(torch.tensor([0.0])) != compute_digest(torch.tensor([-0.0]))


def test_a_manifest_says_what_the_tensors_are():
    made = build_manifest(Version(number=3), {"w": torch.ones(2, 3, dtype=torch.bfloat16)})
    (entry,) = made.entries
    assert (made.version.number, entry.name, entry.shape, entry.dtype) == (3, "w", (2, 3), "torch.bfloat16")
    with pytest.raises(AttributeError):
        entry.digest = 0
