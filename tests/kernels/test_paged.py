"""Paged attention gives what plain attention over each whole sequence gives."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from miles.kernels.paged import PagedAttend, PagedCache, _split, lay_out


def whole(q_CHd, k_CGd, v_CGd):
    q, k, v = (x.transpose(0, 1) for x in (q_CHd, k_CGd, v_CGd))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_new_tokens_see_exactly_their_own_sequence(heads, page_size):
    torch.manual_seed(0)
    kv_heads, dim, layers, total = 2, 8, 2, 200
    lengths = [(0, 1), (5, 1), (17, 1), (40, 1), (0, 6), (13, 6), (30, 9), (0, 33)]
    cache = PagedCache(
        layers=layers,
        pages=total,
        page_size=page_size,
        heads=kv_heads,
        head_dim=dim,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    free = np.random.default_rng(0).permutation(total).tolist()
    width = max(-(-(s + n) // page_size) for s, n in lengths)
    pages = np.zeros((len(lengths), width), np.int64)
    for row, (start, new) in enumerate(lengths):
        for column in range(-(-(start + new) // page_size)):
            pages[row, column] = free.pop()
    parts = [[torch.randn(s + n, h, dim) for h in (heads, kv_heads, kv_heads)] for s, n in lengths]
    for layer in range(layers):
        for row, (start, _) in enumerate(lengths):
            for position in range(start):
                slot = int(pages[row, position // page_size]) * page_size + position % page_size
                for stored, part in zip(cache.slots[layer], parts[row][1:], strict=True):
                    stored[slot] = part[position]
    starts, counts = (np.array(column) for column in zip(*lengths, strict=True))
    positions, layout = lay_out(starts, counts, pages, page_size, device=torch.device("cpu"), dtype=torch.float32)
    assert positions.tolist() == [p for s, n in lengths for p in range(s, s + n)]
    attend = PagedAttend(cache, layout)
    new = [torch.cat([part[i][s:] for part, (s, _) in zip(parts, lengths, strict=True)]) for i in range(3)]
    expected = torch.cat([whole(*part)[s:] for part, (s, _) in zip(parts, lengths, strict=True)])
    for layer in range(layers):
        torch.testing.assert_close(attend(layer, *new), expected, atol=2e-6, rtol=1e-5)


def test_a_page_may_be_copied_while_it_is_overwritten():
    cache = PagedCache(
        layers=1, pages=3, page_size=2, heads=1, head_dim=1, device=torch.device("cpu"), dtype=torch.float32
    )
    for page in range(3):
        cache.pages[0][0][page] = page
    cache.copy(np.array([0, 1]), np.array([1, 2]))
    assert cache.pages[0][0].tolist() == [[0, 0], [0, 0], [1, 1]]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=40))
@settings(max_examples=80, deadline=None)
def test_blocks_are_neighbours_that_cover_everyone_once(rows):
    queries, pages = (np.array(column) for column in zip(*rows, strict=True))
    blocks = _split(queries, pages)
    assert [row for lo, hi in blocks for row in range(lo, hi)] == list(range(len(rows)))
    assert all(lo < hi for lo, hi in blocks)


def test_samples_of_one_prompt_share_a_trunk_and_still_see_exactly_their_own_sequence():
    """The same queries over the same tokens, once with common pages and once with pages of their own."""
    torch.manual_seed(0)
    size, heads, kv_heads, dim = 4, 4, 2, 8
    rng = np.random.default_rng(0)
    families = [(19, 7), (14, 5), (0, 4), (11, 1), (2, 2)]  # common full pages, samples
    rows: list[list[int]] = []
    starts: list[int] = []
    free = iter(rng.permutation(1000).tolist())
    for depth, samples in families:
        trunk = [next(free) for _ in range(depth)]
        for _ in range(samples):
            start = depth * size + int(rng.integers(0, 30))
            rows.append(trunk + [next(free) for _ in range(start // size + 1 - depth)])
            starts.append(start)
    pages = np.zeros((len(rows), max(map(len, rows))), np.int64)
    for row, line in enumerate(rows):
        pages[row, : len(line)] = line
    own = np.arange(pages.size).reshape(pages.shape) + 1000
    cache = PagedCache(
        layers=1,
        pages=1000 + pages.size,
        page_size=size,
        heads=kv_heads,
        head_dim=dim,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for stored in cache.pages[0]:
        stored[:1000] = torch.randn(1000, size * kv_heads * dim)
        stored[torch.from_numpy(own.ravel())] = stored[torch.from_numpy(pages.ravel())]
    new = [torch.randn(len(rows), h, dim) for h in (heads, kv_heads, kv_heads)]
    results = []
    for table in (pages, own):
        _, layout = lay_out(
            np.array(starts), np.ones(len(rows), np.int64), table, size, device=torch.device("cpu"), dtype=torch.float32
        )
        results.append((layout, PagedAttend(cache, layout)(0, *new)))
    assert [len(layout.trunks) > 0 for layout, _ in results] == [True, False]
    assert results[0][0].trunk_tokens is not None
    assert len(results[0][0].trunk_tokens) == 14  # families of one, and those with no page in common, have no trunk
    torch.testing.assert_close(results[0][1], results[1][1], atol=2e-6, rtol=1e-5)
