"""Causal attention of new tokens over pages gives what plain torch gives, and leaves other rows alone."""

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case, poisoned
from tests.tiers import examples

from miles.kernels.attention.paged import PagedAttentionBackend, PagedKVCache, build_attention_metadata
from miles.kernels.attention.paged_prefill import TILE, build_prefill_tiles, prefill_attention, prefill_reference
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.runtime.kv_cache import KvShape

SCALE = 0.3
WAYS = {
    "all": {},
    "a window": {"window": 30},
    "a window longer than a tile": {"window": 170},
    "chunks": {"chunk": 48},
    "a window within chunks": {"window": 150, "chunk": 200},
    "bounded scores": {"softcap": 1.3},
}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=6), st.integers(0, 9))
@settings(max_examples=examples(60), deadline=None)
def test_tiles_hold_every_new_token_once_and_those_that_see_most_come_first(rows, first):
    starts, counts = (np.array(column) for column in zip(*rows, strict=True))
    seats = np.arange(len(rows))[::-1]
    tiles = build_prefill_tiles(starts, counts, seats, first)
    found = {row + i: (slot, position + i) for slot, row, count, position in tiles.tolist() for i in range(count)}
    wanted = [(slot, s + i) for slot, s, n in zip(seats.tolist(), starts, counts, strict=True) for i in range(n)]
    assert [found[first + i] for i in range(len(wanted))] == wanted
    assert len(found) == tiles[:, 2].sum() == counts.sum()
    assert tiles[:, 2].min() > 0 and tiles[:, 2].max() <= TILE
    ends = tiles[:, 2] + tiles[:, 3]
    assert (ends[1:] <= ends[:-1]).all()


def asked(made: Case, counts: list[int], heads: int, *, has_sinks: bool = False, **limits) -> float:
    """How far the kernel is from the reference; the rows of two single tokens before stay as they were."""
    dtype = made.k_SGd.dtype
    width, values, new = made.k_SGd.shape[2], made.v_SGe.shape[2], np.array(counts)
    q_THd = random(2 + sum(counts), heads, width, dtype=dtype)
    tiles = torch.from_numpy(build_prefill_tiles(made.lengths - new, new, made.req_slots_B.cpu().numpy(), 2)).to(DEVICE)
    read = (q_THd, made.k_SGd, made.v_SGe, made.block_table_SP, tiles)
    sinks_H = random(heads, dtype=dtype) if has_sinks else None
    params = PagedAttentionParams(made.page_size, SCALE, sinks_H=sinks_H, **limits)
    out = prefill_attention(*read, params, out=poisoned(len(q_THd), heads, values, dtype=dtype))
    assert out[:2].isnan().all()
    return apart(out[2:], prefill_reference(*read, params)[2:])


@needs_triton
@pytest.mark.parametrize("way", WAYS)
def test_new_tokens_see_what_they_may(way):
    made = case([300, 33, 5], heads=1, width=16, dtype=torch.float16)
    assert asked(made, [150, 33, 2], 2, has_sinks="window" in way, **WAYS[way]) < ROUNDING[torch.float16]


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
def test_in_every_precision(dtype):
    assert asked(case([140, 20], heads=2, width=64, dtype=dtype), [35, 7], 2) < ROUNDING[dtype]


@needs_triton
def test_what_is_rounded_does_not_come_again_with_every_tile():
    made = case([20_000 if CARD else 500], heads=1, width=64)
    tiles = torch.from_numpy(
        build_prefill_tiles(made.lengths - 20, np.array([20]), made.req_slots_B.cpu().numpy(), 0)
    ).to(DEVICE)
    read = (random(20, 2, 64), made.k_SGd, made.v_SGe, made.block_table_SP, tiles)
    params = PagedAttentionParams(made.page_size, SCALE)
    wide = (x.double() if x.is_floating_point() else x for x in read)
    assert apart(prefill_attention(*read, params), prefill_reference(*wide, params)) < 1e-5


@needs_triton
@pytest.mark.parametrize(
    ("heads", "groups", "width", "values", "page_size"),
    [(2, 1, 80, 80, 16), (3, 3, 24, 16, 5), (2, 1, 256, 256, 16), (2, 1, 512, 512, 16)],
)
def test_widths_and_pages_need_be_no_power_of_two(heads, groups, width, values, page_size):
    made = case([70, 20], heads=groups, width=width, values=values, page_size=page_size, dtype=torch.float16)
    assert asked(made, [40, 20], heads) < ROUNDING[torch.float16]


@needs_triton
def test_it_is_what_attention_over_a_paged_cache_has_always_given():
    starts, counts, size = np.array([40, 0]), np.array([20, 20]), 8
    cache = PagedKVCache([KvShape(2, 16, 16)], pages=30, page_size=size, device=DEVICE, dtype=torch.float32)
    held = cache.layers[0]
    assert held.values is not None
    held.keys.pages.copy_(random(30, size * 32))
    held.values.pages.copy_(random(30, size * 32))
    pages = np.random.default_rng(0).permutation(30)[:20].reshape(2, 10)
    _, layout = build_attention_metadata(starts, counts, pages, size, device=DEVICE, dtype=torch.float32)
    q, k, v = random(40, 4, 16), random(40, 2, 16), random(40, 2, 16)
    theirs = PagedAttentionBackend(cache, layout)(0, AttentionInputs(q, k, v, AttentionParams(scale=SCALE, window=15)))
    tiles = torch.from_numpy(build_prefill_tiles(starts, counts, np.arange(2), 0)).to(DEVICE)
    table = torch.from_numpy(pages.astype(np.int32)).to(DEVICE)
    ours = prefill_attention(
        q, held.keys.slots, held.values.slots, table, tiles, PagedAttentionParams(size, SCALE, window=15)
    )
    assert apart(ours, theirs) < 1e-5


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 512])
def test_shapes_of_published_models(dtype, width):
    if (width, dtype) == (512, torch.float32):
        pytest.skip("tiles of such heads do not fit in float32")
    made = case([1500, 700, 2000, 129, 128, 64, 1], heads=4, width=width, dtype=dtype)
    counts = [1500, 100, 777, 129, 1, 64, 1]
    for way in WAYS.values():
        for share in (1, 4, 7):
            assert asked(made, counts, 4 * share, has_sinks=share == 4, **way) < ROUNDING[dtype]
