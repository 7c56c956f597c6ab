"""Sparse attention, batch-invariant: one selection however a sequence is cut, and the gradients of a masked softmax."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.attention.block_selection import select_topk_blocks, unselected_tokens
from miles.kernels.attention.index_pools import GatedPool, expand_pools, select_topk_pools
from miles.kernels.attention.params import AttentionParams, BlockIndexerInputs, IndexerInputs
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.dsa_indexer import select_tokens


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(total, heads=3, dim=10, topk=5, seed=0, dtype=torch.float32):
    q, k, weights = random(seed, total, heads, dim), random(seed + 1, total, dim), random(seed + 2, total, heads)
    return IndexerInputs(q_THd=q.to(dtype), k_Td=k.to(dtype), weights_TH=weights, topk=topk)


def selected_tokens(selection):
    """Which tokens are selected, [T, P]."""
    return None if selection is None else selection.units_TXU[:, 0]


def rows_of(index, rows):
    return IndexerInputs(q_THd=index.q_THd[rows], k_Td=index.k_Td, weights_TH=index.weights_TH[rows], topk=index.topk)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=2),
    count=st.integers(1, 40),
    heads=st.integers(1, 20),
    topk=st.integers(1, 20),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_the_last_tokens_of_a_sequence_select_alone_what_they_select_among_others(
    dtype, lengths, count, heads, topk, threads, seed
):
    index = inputs(sum(lengths), heads, 33, topk, seed, dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = selected_tokens(select_tokens(index, index.k_Td, build_packed_spans(lengths)))
    finally:
        torch.set_num_threads(before)
    if whole is None:
        assert topk >= max(lengths)
        return
    end = 0
    for length in lengths:
        end += length
        last = min(count, length)
        # Rows of the cache in another order than positions.
        shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
        cache = index.k_Td[end - length : end][shuffled]
        spans = AttentionSpans(*(np.array([n]) for n in (0, last, 0, length)), row_K=shuffled.argsort().numpy())
        alone = selected_tokens(select_tokens(rows_of(index, slice(end - last, end)), cache, spans))
        wanted = whole[end - last : end, :length]
        if alone is None:
            assert torch.equal(wanted, torch.ones(length, length, dtype=torch.bool).tril()[-last:])
        else:
            assert torch.equal(alone[:, :length], wanted)


def test_the_highest_scores_are_selected_and_of_equal_ones_the_lowest_positions():
    index = inputs(90, topk=7)
    selected = selected_tokens(select_tokens(index, index.k_Td, build_packed_spans([90])))
    scores = torch.einsum(
        "qh,qhk->qk", index.weights_TH.double(), (index.q_THd.double() @ index.k_Td.double().T).relu()
    )
    for q in range(90):
        best = sorted(range(q + 1), key=lambda position: (-float(scores[q, position]), position))[:7]
        assert selected[q].nonzero().flatten().tolist() == sorted(best)
    equal = IndexerInputs(
        q_THd=index.q_THd, k_Td=index.k_Td[:1].expand(90, -1), weights_TH=-index.weights_TH.abs(), topk=7
    )
    selected = selected_tokens(select_tokens(equal, equal.k_Td, build_packed_spans([90])))
    assert selected[6:, :7].all() and not selected[:, 7:].any()


def test_attention_over_a_selection_is_a_masked_softmax_with_its_gradients():
    lengths, heads = [90, 3, 70], 4
    index = inputs(sum(lengths), topk=6)
    spans = build_packed_spans(lengths)
    selection = select_tokens(index, index.k_Td, spans)
    selected = selected_tokens(selection)
    tensors = [random(i, sum(lengths), heads, n, dtype=torch.float64) for i, n in ((7, 8), (8, 8), (9, 5))]
    ours, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    out = span_attention(*ours, SpanBatch(spans), AttentionParams(scale=0.3), None, selection)
    parts = []
    for q, k, v, chosen in zip(*(x.split(lengths) for x in (*theirs, selected)), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        weights = scores.masked_fill(~chosen[:, : len(k)], -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khe->qhe", weights, v))
    wanted = torch.cat(parts)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    for each in (out, wanted):
        (each.sin() * each).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=1e-11)


def pools_of(total, size=4, dim=10, topk=12, seed=0, dtype=torch.float32):
    plain = inputs(total, dim=dim, topk=topk, seed=seed, dtype=dtype)
    keys = torch.cat((plain.k_Td, random(seed + 3, total, dim).to(dtype)), -1)
    return replace(plain, k_Td=keys, pool=GatedPool(random(seed + 4, size, dim)))


def blocks_of(total, size=4, dim=10, topk=3, local=1, seed=0, dtype=torch.float32):
    q, k = random(seed, total, 2, dim).to(dtype), random(seed + 1, total, dim).to(dtype)
    return BlockIndexerInputs(q_TGd=q, k_Td=k, block=size, topk=topk, local=local)


def last_rows(index, count):
    """The inputs of the last queries."""
    if isinstance(index, BlockIndexerInputs):
        return replace(index, q_TGd=index.q_TGd[-count:])
    return replace(index, q_THd=index.q_THd[-count:], weights_TH=index.weights_TH[-count:])


@pytest.mark.parametrize("make", [pools_of, blocks_of])
@settings(max_examples=examples(12), deadline=None, derandomize=True)
@given(length=st.integers(13, 150), before=st.integers(0, 40), count=st.integers(1, 30), seed=st.integers(0, 99))
def test_pools_and_blocks_are_selected_alike_whatever_is_in_the_batch(make, length, before, count, seed):
    index = make(length, seed=seed, dtype=torch.bfloat16)
    alone = select_tokens(index, index.k_Td, build_packed_spans([length]))
    other = make(before + length, seed=seed + 50, dtype=torch.bfloat16)
    names = ("q_TGd", "k_Td") if make is blocks_of else ("q_THd", "k_Td", "weights_TH")
    both = {name: torch.cat((getattr(other, name)[:before], getattr(index, name))) for name in names}
    packed = select_tokens(replace(index, **both), both["k_Td"], build_packed_spans([before, length]))
    units = alone.units_TXU.shape[-1]
    assert torch.equal(packed.units_TXU[before:, :, :units], alone.units_TXU)
    count = min(count, length)
    spans = AttentionSpans(*(np.array([n]) for n in (0, count, 0, length)))
    last = select_tokens(last_rows(index, count), index.k_Td, spans)
    assert torch.equal(last.units_TXU, alone.units_TXU[-count:])


def test_pools_and_blocks_are_those_that_fast_kernels_select():
    """In float64, where rounding decides nothing."""
    pools, blocks = pools_of(61, dtype=torch.float64), blocks_of(61, local=2, dtype=torch.float64)
    pools = replace(pools, weights_TH=pools.weights_TH.double())
    found = select_tokens(pools, pools.k_Td, build_packed_spans([61]))
    tensors = (pools.q_THd, pools.k_Td, pools.weights_TH, pools.topk, pools.pool)
    tokens = expand_pools(select_topk_pools(*tensors, max_scores=1 << 20), 4)
    wanted = torch.zeros(61, 64, dtype=torch.bool).scatter_(1, tokens, True)[:, :61].tril()
    assert torch.equal(found.units_TXU[:, 0].repeat_interleave(4, -1)[:, :61].tril(), wanted)
    found = select_tokens(blocks, blocks.k_Td, build_packed_spans([61]))
    wanted = ~unselected_tokens(select_topk_blocks(blocks.q_TGd, blocks.k_Td, blocks), 4, 61)
    assert torch.equal(found.units_TXU.transpose(0, 1).repeat_interleave(4, -1)[..., :61].tril(), wanted.tril())


def test_a_gpu_computes_short_contexts_as_it_does_beside_long_ones(monkeypatch):
    index = inputs(9, topk=16)
    assert select_tokens(index, index.k_Td, build_packed_spans([9])) is None
    monkeypatch.setattr("miles.kernels.batch_invariant.dsa_indexer.use_triton", lambda x: True)
    selection = selected_tokens(select_tokens(index, index.k_Td, build_packed_spans([9])))
    assert torch.equal(selection[:, :9].tril(), torch.ones(9, 9, dtype=torch.bool).tril())
