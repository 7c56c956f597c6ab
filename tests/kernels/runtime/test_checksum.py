"""Sums over bits are those of their definition, on a host and as device code, and what is copied is what is counted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import CARD, DEVICE, needs_triton
from tests.tiers import examples

from miles.kernels.runtime import checksum
from miles.kernels.runtime.checksum import compute_checksums

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = [torch.int8, torch.bfloat16, torch.float32, torch.float64]


def drawn(count, kind):
    return torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8).view(kind)


def defined(tensor):
    """In Python's own integers."""
    numbers = tensor.cpu().contiguous().view(-1).view(BITS[tensor.element_size()]).tolist()
    wrap = (1 << 64) - 1
    return sum(numbers) & wrap, sum(n * place for place, n in enumerate(numbers, 1)) & wrap


@settings(deadline=None, max_examples=examples(40))
@given(counts=st.lists(st.integers(0, 70), max_size=4), kind=st.sampled_from(KINDS))
def test_sums_on_a_host_are_those_of_their_definition(counts, kind):
    tensors = [drawn(count, kind) for count in counts]
    assert compute_checksums(tensors) == [defined(tensor) for tensor in tensors]


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_bits_in_many_blocks_lose_nothing(kind, monkeypatch):
    monkeypatch.setattr(checksum, "_COLUMNS", 64)
    monkeypatch.setattr(checksum, "_ROWS", 4)
    for fill in (0x80, 0xFF, 0x7F):
        tensor = torch.full((1000 * kind.itemsize,), fill, dtype=torch.uint8).view(kind)
        assert compute_checksums([tensor]) == [defined(tensor)]


def test_what_is_copied_is_what_is_counted():
    tensors = [drawn(300, torch.bfloat16).view(3, 100), drawn(200, torch.float32).view(10, 20).t()]
    into = [torch.zeros(300, dtype=torch.bfloat16), torch.zeros(200)]
    assert (
        compute_checksums(tensors, into)
        == [defined(tensor) for tensor in into]
        == [defined(tensor) for tensor in tensors]
    )


@needs_triton
@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("copy", [False, True])
def test_device_code_gives_the_same_sums(kind, copy, monkeypatch):
    if not CARD:
        monkeypatch.setattr(checksum, "_LANES", 64)
        monkeypatch.setattr(checksum, "_STEPS", 4)
    tile = checksum._LANES * checksum._STEPS
    flat = [drawn(count, kind).to(DEVICE) for count in (1, tile - 1, tile, tile + 1, 3 * tile + 5)]
    flat.append(drawn(tile + 40, kind).to(DEVICE)[1:])  # begins where lanes cannot be read together
    bits = [tensor.view(BITS[kind.itemsize]) for tensor in flat]
    into = [torch.zeros_like(tensor) for tensor in bits] if copy else None
    found = checksum._checksum_gpu(bits, into)
    assert [(plain % 2**64, placed % 2**64) for plain, placed in found] == [defined(tensor) for tensor in flat]
    assert into is None or all(torch.equal(a, b) for a, b in zip(into, bits, strict=True))
