"""Dense prefill of long chunks, with torch's attention in place of cuDNN's, against the paged reference."""

import numpy as np
import pytest
import torch
from tests.kernels.device import CARD, DEVICE, apart, needs_triton, random

from miles.kernels.attention import dense_prefill
from miles.kernels.attention.dense_prefill import (
    DenseChunk,
    attend_cudnn,
    can_attend_dense,
    dense_prefill_attention,
    drop_dense_tiles,
    find_dense_chunks,
    merge_partial_attention,
)
from miles.kernels.attention.paged_prefill import TILE, build_prefill_tiles, prefill_reference
from miles.kernels.attention.params import PagedAttentionParams

HEADS, GROUPS, WIDTH, PAGE = 4, 2, 16, 16


def attend_torch(q_1Hnd, k_1Gcd, v_1Gcd, causal, scale):
    k_1Hcd, v_1Hcd = (x.float().repeat_interleave(HEADS // GROUPS, 1) for x in (k_1Gcd, v_1Gcd))
    scores = scale * q_1Hnd.float() @ k_1Hcd.mT
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ v_1Hcd).to(q_1Hnd.dtype), scores.logsumexp(-1, keepdim=True)


def test_chunks_are_long_and_begin_and_end_at_units(monkeypatch):
    starts_B, counts_B = np.array([0, 4096, 8192, 8192, 100]), np.array([20000, 4096, 16384, 4095, 16384])
    found = find_dense_chunks(starts_B, counts_B, 7)
    assert [(c.sequence, c.row, c.length, c.start) for c in found] == [(0, 7, 16384, 0), (2, 24103, 16384, 8192)]
    # Little work is left to the paged kernel: 4,096 queries over 4,096 cached tokens.
    assert not find_dense_chunks(np.array([4096]), np.array([4096]), 0)


def test_dense_chunks_and_the_other_tiles_cover_every_token_once():
    starts_B, counts_B = np.array([4096, 0, 8192]), np.array([9000, 300, 12289])
    tiles_I4 = build_prefill_tiles(starts_B, counts_B, np.arange(3), 2)
    chunks = find_dense_chunks(starts_B, counts_B, 2)
    covered = np.zeros(2 + int(counts_B.sum()), np.int64)
    for _, row, count, _ in drop_dense_tiles(tiles_I4, chunks).tolist():
        covered[row : row + count] += 1
    for chunk in chunks:
        covered[chunk.row : chunk.row + chunk.length] += 1
    assert len(chunks) == 2 and covered[:2].sum() == 0 and (covered[2:] == 1).all()
    assert dense_prefill.UNIT % TILE == 0


@needs_triton
@pytest.mark.parametrize("start", [0, 64, 160])
def test_a_chunk_over_blocks_of_keys_is_paged_attention(start, monkeypatch):
    monkeypatch.setattr(dense_prefill, "_MAX_BLOCK", 64)
    count, row = 32, 3
    total, pages = start + count, (start + count) // PAGE
    k_SGd, v_SGd = (random(2 * pages * PAGE, GROUPS, WIDTH) for _ in range(2))
    q_THd = random(row + count + 1, HEADS, WIDTH)
    table_SP = torch.randperm(2 * pages, device=DEVICE)[None, :pages].int()
    slots = (table_SP[0].long()[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:total]
    tiles = build_prefill_tiles(np.array([start]), np.array([count]), np.array([0]), row)
    params = PagedAttentionParams(PAGE, 0.3)
    wanted = prefill_reference(q_THd, k_SGd, v_SGd, table_SP, torch.from_numpy(tiles), params)
    out = torch.full_like(q_THd, 7.0)
    chunk = DenseChunk(row, count, start, slots)
    dense_prefill_attention(q_THd, k_SGd, v_SGd, chunk, params.scale, out, attend_torch)
    assert apart(out[row : row + count], wanted[row : row + count]) < 1e-6
    assert (out[:row] == 7).all() and (out[row + count :] == 7).all()


@needs_triton
@pytest.mark.parametrize("width", [16, 24])
def test_merged_log_sum_exps_are_those_of_all_keys_even_far_apart(width):
    out, part = random(21, HEADS, width), random(21, HEADS, width)
    lse, more = 60 * random(1, HEADS, 21, 1), 60 * random(1, HEADS, 21, 1)
    weight = torch.sigmoid((lse - more).double())[0].transpose(0, 1)
    wanted = weight * out.double() + (1 - weight) * part.double()
    total = torch.logaddexp(lse.double(), more.double())
    merge_partial_attention(out, lse, part.transpose(0, 1)[None], more)
    assert apart(out, wanted) < 1e-6 and apart(lse, total) < 1e-6


def test_layers_with_anything_but_plain_attention_are_left_to_the_paged_kernel():
    q, k = torch.empty(8, HEADS, WIDTH, dtype=torch.bfloat16), torch.empty(32, GROUPS, WIDTH, dtype=torch.bfloat16)
    plain = PagedAttentionParams(PAGE, 0.3)
    assert can_attend_dense(q, k, k, plain)
    assert not any(
        can_attend_dense(q, k, k, plain._replace(**changed))
        for changed in ({"window": 5}, {"chunk": 5}, {"softcap": 5.0}, {"sinks_H": torch.zeros(HEADS)})
    )
    assert not can_attend_dense(q.float(), k.float(), k.float(), plain)
    assert not can_attend_dense(q, k, k[..., :8], plain)
    assert not can_attend_dense(
        q.expand(8, HEADS, WIDTH).repeat(1, 1, 16), k.repeat(1, 1, 16), k.repeat(1, 1, 16), plain
    )


@pytest.mark.skipif(not CARD, reason="needs a GPU with cuDNN")
@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_returns_attention_and_natural_log_sum_exps(causal):
    q, k, v = (
        torch.randn(1, heads, 4096, 64, device=DEVICE, dtype=torch.bfloat16) for heads in (HEADS, GROUPS, GROUPS)
    )
    out, lse = attend_cudnn(q, k, v, causal, 0.125)
    wanted, sums = attend_torch(q, k, v, causal, 0.125)
    assert apart(out, wanted) < 1e-2 and apart(lse, sums) < 1e-4
