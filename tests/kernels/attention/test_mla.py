"""Attention whose values are the first channels of its keys gives what plain torch gives."""

import numpy as np
import pytest
import tests.kernels.interpreter  # noqa: F401  (loops in the interpreter)
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random
from tests.kernels.paged_case import Case, case, poisoned

from miles.kernels.attention.mla import (
    count_head_tiles,
    mla_decode_attention,
    mla_decode_reference,
    mla_prefill_attention,
    mla_prefill_reference,
)
from miles.kernels.attention.paged_prefill import build_prefill_tiles
from miles.kernels.attention.params import PagedAttentionParams

pytestmark = needs_triton


def decoded(made: Case, heads: int, value_dim: int, **cut) -> float:
    dtype = made.k_SGd.dtype
    q_BHd = random(len(made.lengths), heads, made.k_SGd.shape[2], dtype=dtype)
    work = made.work(heads, kv_heads=count_head_tiles(heads), **cut)
    read = (q_BHd, made.k_SGd, made.block_table_SP, made.req_slots_B)
    params = PagedAttentionParams(made.page_size, 0.2)
    for held in work.get_scratch(heads, value_dim):
        held.fill_(torch.nan)
    out = mla_decode_attention(
        *read, work, params, value_dim=value_dim, out=poisoned(len(q_BHd), heads, value_dim, dtype=dtype)
    )
    return apart(
        out, mla_decode_reference(*read, torch.from_numpy(made.lengths).to(DEVICE), params, value_dim=value_dim)
    )


def prefilled(made: Case, counts: list[int], heads: int, value_dim: int) -> float:
    dtype, new = made.k_SGd.dtype, np.array(counts)
    q_THd = random(sum(counts), heads, made.k_SGd.shape[2], dtype=dtype)
    tiles = torch.from_numpy(build_prefill_tiles(made.lengths - new, new, made.req_slots_B.cpu().numpy(), 0)).to(DEVICE)
    read = (q_THd, made.k_SGd, made.block_table_SP, tiles)
    params = PagedAttentionParams(made.page_size, 0.2)
    out = mla_prefill_attention(
        *read, params, value_dim=value_dim, out=poisoned(len(q_THd), heads, value_dim, dtype=dtype)
    )
    return apart(out, mla_prefill_reference(*read, params, value_dim=value_dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [16, 3, 70])
def test_single_tokens_read_their_keys_once_for_both_products(heads, dtype):
    made = case([100, 0, 33, 1], heads=1, width=48, dtype=dtype)
    assert decoded(made, heads, 32) < ROUNDING[dtype]


def test_rows_that_share_a_beginning_read_it_together():
    made = case([100, 90, 80, 30], [(0, 3, 64)], heads=1, width=40, page_size=8, dtype=torch.float16)
    assert made.work(16).has_prefixes
    assert decoded(made, 16, 32, sms=4) < ROUNDING[torch.float16]


def test_new_tokens_see_what_came_before_them():
    for dtype in DTYPES:
        made = case([90, 20], heads=1, width=48, dtype=dtype)
        assert prefilled(made, [33, 20], 2, 32) < ROUNDING[dtype]


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
@pytest.mark.parametrize("heads", [16, 32, 64, 128])
def test_shapes_of_published_models(heads):
    lengths = np.random.default_rng(0).integers(1, 3000, 20).tolist()
    lengths[4:8] = [n + 512 for n in lengths[4:8]]
    made = case(lengths, [(4, 8, 512)], heads=1, width=576, dtype=torch.bfloat16)
    assert decoded(made, heads, 512, items=2048) < ROUNDING[torch.bfloat16]
    made = case([700, 300, 64], heads=1, width=576, dtype=torch.bfloat16)
    assert prefilled(made, [500, 300, 1], heads, 512) < ROUNDING[torch.bfloat16]
