"""Attention of one new token a row gives what plain torch gives, whatever the lengths, trunks, shapes and params."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case, poisoned

from miles.kernels.attention.paged import PagedAttentionBackend, PagedKVCache, build_attention_metadata
from miles.kernels.attention.paged_decode import decode_attention, decode_reference
from miles.kernels.attention.params import AttentionInputs, AttentionParams, PagedAttentionParams
from miles.kernels.runtime.kv_cache import KvShape

pytestmark = needs_triton

SCALE = 0.3
WAYS = {
    "all": {},
    "a window": {"window": 30},
    "a window of one": {"window": 1},
    "chunks": {"chunk": 48},
    "bounded scores": {"softcap": 1.3},
    "a window, bounded scores": {"window": 70, "softcap": 2.0},
}


def asked(
    made: Case, heads: int, *, has_sinks: bool = False, trunks: bool = True, cut: dict | None = None, **limits
) -> float:
    """How far the kernel is from the reference; nothing it must write holds a number before."""
    rows, (_, groups, width), values = len(made.lengths), made.k_SGd.shape, made.v_SGe.shape[2]
    dtype = made.k_SGd.dtype
    q_BHd = random(rows, heads, width, dtype=dtype)
    sinks_H = random(heads, dtype=dtype) if has_sinks else None
    params = PagedAttentionParams(made.page_size, SCALE, sinks_H=sinks_H, **limits)
    work = made.work(heads // groups, trunks=trunks, **(cut or {}))
    for held in work.get_scratch(heads, values):
        held.fill_(torch.nan)
    read = (q_BHd, made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B)
    out = decode_attention(*read, work, params, out=poisoned(rows, heads, values, dtype=dtype))
    return apart(out, decode_reference(*read, torch.from_numpy(made.lengths).to(DEVICE), params))


@pytest.mark.parametrize("way", WAYS)
def test_rows_of_any_length_see_what_they_may(way):
    made = case([100, 40, 0, 130, 1, 16], page_size=16)
    assert asked(made, 4, has_sinks=way == "a window", **WAYS[way]) < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_read_what_they_share_together(dtype):
    made = case([200, 180, 150, 0, 300, 90, 77], [(0, 3, 96), (4, 6, 64)], heads=1, dtype=dtype)
    assert made.work(3).host_arrays().counts[0] >= 2 and not made.work(3, trunks=False).has_prefixes
    assert asked(made, 3) < ROUNDING[dtype]


@pytest.mark.parametrize("way", ["a window", "a window, bounded scores", "chunks"])
def test_trunks_hold_for_rows_that_do_not_see_all_of_them(way):
    made = case([130, 100, 101, 80], [(0, 3, 96)], heads=1, page_size=32)
    for cut in ({}, WAYS[way]):
        reach = {name: value for name, value in cut.items() if name != "softcap"}
        assert asked(made, 2, has_sinks=True, cut=reach, **WAYS[way]) < 1e-5


def test_more_rows_than_a_tile_has_queries_share_a_trunk():
    made = case([70, 80, 90, 70, 100], [(0, 5, 64)], heads=1, page_size=8)
    assert asked(made, 8, cut={"prefix_queries": 16}) < 1e-5


def test_a_row_in_many_pieces_is_joined_again():
    made = case([700, 3], [], heads=1, width=16, page_size=4)
    assert asked(made, 1, has_sinks=True, cut={"sms": 4}) < 1e-5


@pytest.mark.parametrize(
    ("heads", "groups", "width", "values", "page_size"),
    [(4, 2, 80, 80, 16), (2, 2, 24, 16, 1), (66, 1, 16, 16, 3), *([(32, 8, 96, 128, 16)] if CARD else [])],
)
def test_widths_and_pages_need_be_no_power_of_two(heads, groups, width, values, page_size):
    made = case([90, 20, 64], heads=groups, width=width, values=values, page_size=page_size)
    assert asked(made, heads, cut={"items": 16}) < 1e-5


def test_heads_of_512_channels_in_half_precision():
    made = case([90, 20, 64], [(0, 2, 16)], heads=1, width=512, dtype=torch.float16)
    assert asked(made, 4, cut={"items": 16}) < ROUNDING[torch.float16]


def test_padding_rows_give_zeros_and_no_work_gives_nothing_else():
    made = case([0, 0, 0])
    assert asked(made, 4) == 0.0


def test_queries_may_be_part_of_a_wider_row():
    made = case([50, 20], heads=1, width=16)
    wide = random(2, 6, 16)
    params = PagedAttentionParams(16, SCALE)
    read = (made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B)
    narrow = decode_attention(wide[:, :2].contiguous(), *read, made.work(2), params)
    assert torch.equal(decode_attention(wide[:, :2], *read, made.work(2), params), narrow)


def test_it_is_what_attention_over_a_paged_cache_has_always_given():
    starts, size = np.array([40, 9, 77]), 8
    cache = PagedKVCache([KvShape(2, 16, 16)], pages=40, page_size=size, device=DEVICE, dtype=torch.float32)
    held = cache.layers[0]
    assert held.values is not None
    held.keys.pages.copy_(random(40, size * 32))
    held.values.pages.copy_(random(40, size * 32))
    pages = np.random.default_rng(0).permutation(40)[:30].reshape(3, 10)
    ones = np.ones(3, np.int64)
    _, layout = build_attention_metadata(starts, ones, pages, size, device=DEVICE, dtype=torch.float32)
    q, k, v = random(3, 4, 16), random(3, 2, 16), random(3, 2, 16)
    theirs = PagedAttentionBackend(cache, layout)(0, AttentionInputs(q, k, v, AttentionParams(scale=SCALE)))
    made = case([1], heads=2, width=16)
    one = Case(starts + 1, ones.cumsum(), 0 * ones, made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B, size)
    table = torch.from_numpy(pages.astype(np.int32)).to(DEVICE)
    seats = torch.arange(3, dtype=torch.int32, device=DEVICE)
    ours = decode_attention(
        q, held.keys.slots, held.values.slots, table, seats, one.work(2), PagedAttentionParams(size, SCALE)
    )
    assert apart(ours, theirs) < 1e-5


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize("share", [1, 2, 4, 7, 16])
def test_shapes_of_published_models(dtype, width, share):
    if (width, dtype) == (512, torch.float32):
        pytest.skip("tiles of such heads do not fit in float32")
    lengths = np.random.default_rng(0).integers(1, 3000, 40).tolist()
    lengths[8:16] = [n + 512 for n in lengths[8:16]]
    made = case(lengths, [(8, 16, 512)], heads=4, width=width, dtype=dtype)
    for way in WAYS.values():
        assert asked(made, 4 * share, has_sinks=share == 2, cut={"items": 4096}, **way) < ROUNDING[dtype]


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
def test_a_captured_graph_serves_other_lengths():
    made = case([900, 300, 20, 4000, 77, 1000, 1001, 1002], [(5, 8, 512)], heads=8, width=128, dtype=torch.bfloat16)
    work, q = made.work(4, items=4096), random(8, 32, 128, dtype=torch.bfloat16)
    read = (q, made.k_SGd, made.v_SGe, made.block_table_SP, made.req_slots_B)
    params = PagedAttentionParams(16, SCALE)
    out = poisoned(8, 32, 128, dtype=torch.bfloat16)
    decode_attention(*read, work, params, out=out, has_prefixes=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode_attention(*read, work, params, out=out, has_prefixes=True)
    for shared in (made.shared, made.shared * 0):
        lengths = np.maximum(made.lengths - np.random.default_rng(1).integers(0, 400, 8), 0)
        lengths[5:] = made.lengths[5:]
        work.fill(lengths, made.group, shared, kv_heads=8, queries_per_kv=4, sms=132)
        work.copy_to_device()
        out.fill_(torch.nan)
        graph.replay()
        wanted = decode_reference(*read, torch.from_numpy(lengths).to(DEVICE), params)
        assert apart(out, wanted) < ROUNDING[torch.bfloat16]


def test_the_module_needs_no_compiler_to_be_imported():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'triton' else found(name, *rest)\n"
        "from miles.kernels.attention import mla, paged_decode, paged_prefill\n"
        "assert 'miles.kernels.attention.tiles_triton' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
