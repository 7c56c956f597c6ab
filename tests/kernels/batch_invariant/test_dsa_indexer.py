"""Sparse attention, batch-invariant: one selection however a sequence is cut, and the gradients of a masked softmax."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.attention.params import AttentionParams, IndexerInputs
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, SpanBatch, build_packed_spans
from miles.kernels.batch_invariant.dsa_indexer import select_tokens


def random(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(total, heads=3, dim=10, topk=5, seed=0, dtype=torch.float32):
    q, k, weights = random(seed, total, heads, dim), random(seed + 1, total, dim), random(seed + 2, total, heads)
    return IndexerInputs(q_THd=q.to(dtype), k_Td=k.to(dtype), weights_TH=weights, topk=topk)


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
        whole = select_tokens(index, index.k_Td, build_packed_spans(lengths))
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
        alone = select_tokens(rows_of(index, slice(end - last, end)), cache, spans)
        wanted = whole[end - last : end, :length]
        if alone is None:
            assert torch.equal(wanted, torch.ones(length, length, dtype=torch.bool).tril()[-last:])
        else:
            assert torch.equal(alone[:, :length], wanted)


def test_the_highest_scores_are_selected_and_of_equal_ones_the_lowest_positions():
    index = inputs(90, topk=7)
    selected = select_tokens(index, index.k_Td, build_packed_spans([90]))
    scores = torch.einsum(
        "qh,qhk->qk", index.weights_TH.double(), (index.q_THd.double() @ index.k_Td.double().T).relu()
    )
    for q in range(90):
        best = sorted(range(q + 1), key=lambda position: (-float(scores[q, position]), position))[:7]
        assert selected[q].nonzero().flatten().tolist() == sorted(best)
    equal = IndexerInputs(
        q_THd=index.q_THd, k_Td=index.k_Td[:1].expand(90, -1), weights_TH=-index.weights_TH.abs(), topk=7
    )
    selected = select_tokens(equal, equal.k_Td, build_packed_spans([90]))
    assert selected[6:, :7].all() and not selected[:, 7:].any()


def test_attention_over_a_selection_is_a_masked_softmax_with_its_gradients():
    lengths, heads = [90, 3, 70], 4
    index = inputs(sum(lengths), topk=6)
    spans = build_packed_spans(lengths)
    selected = select_tokens(index, index.k_Td, spans)
    tensors = [random(i, sum(lengths), heads, n, dtype=torch.float64) for i, n in ((7, 8), (8, 8), (9, 5))]
    ours, theirs = ([x.clone().requires_grad_() for x in tensors] for _ in range(2))
    out = span_attention(*ours, SpanBatch(spans), AttentionParams(scale=0.3), None, selected)
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
