"""In exact arithmetic a token's attention has the same bits in a packed batch, in any chunks, pages and company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.formula import by_hand, gradients, off, qkv
from tests.tiers import examples

from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.attention.tree import Segment
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend, BatchInvariantVarlenBackend
from miles.kernels.batch_invariant.paged_attention import BatchInvariantPagedBackend
from miles.kernels.runtime.kv_cache import KvShape, PagedKVCache

WAYS = {
    "all": AttentionParams(scale=0.3),
    "a window": AttentionParams(scale=0.3, window=70),
    "a window of one": AttentionParams(scale=0.3, window=1),
    "chunks": AttentionParams(scale=0.3, chunk=90),
    "bounded scores in a long window": AttentionParams(scale=0.3, softcap=2.0, window=530),
}
# Query heads, key-value heads, channels of a key and of a value.
SHAPES = [
    (4, 2, 16, 16),
    (3, 1, 20, 20),
    (2, 2, 24, 17),
    (6, 2, 64, 64),
    (20, 1, 33, 33),
    (2, 1, 192, 128),
    (1, 1, 256, 256),
]


def packed_attention(q, k, v, lengths, params, sinks_H=None):
    return BatchInvariantVarlenBackend(lengths, q.device)(0, AttentionInputs(q, k, v, params, sinks_H))


def engine(q, k, v, params, sinks, cuts, *, page_size=16, mates=0, seed=0):
    """One sequence through pages that lie anywhere, some tokens at a time, beside mates that read its pages too."""
    rng = np.random.default_rng(seed)
    total, most = len(q), -(-len(q) // page_size)
    shape = KvShape(k.shape[1], k.shape[2], v.shape[2])
    cache = PagedKVCache([shape], pages=3 * most + 5, page_size=page_size, device=torch.device("cpu"), dtype=q.dtype)
    pages = rng.permutation(3 * most + 5)
    mine, spare = pages[:most], pages[most : 2 * most]
    outs, start = [], 0
    for n in [*cuts, total]:
        n = min(n, total - start)
        if not n:
            break
        new = slice(start, start + n)
        starts, counts, table, rows = [start], [n], [mine], [np.arange(start, start + n)]
        # A mate shares whole pages of the past, and goes on with a token of its own in a page of its own.
        common = start // page_size
        if mates and common and n == 1:
            starts, counts = [start, common * page_size], [1, 1]
            table.append(np.concatenate((mine[:common], spare[common:])))
            rows.append(np.array([0]))
        order = rng.permutation(len(starts)) if n == 1 else np.arange(len(starts))
        rows = np.concatenate([rows[i] for i in order])
        attend = BatchInvariantPagedBackend(
            cache, np.array(starts)[order], np.array(counts)[order], np.stack([table[i] for i in order]), page_size
        )
        out = attend(0, AttentionInputs(q[rows], k[rows], v[rows], params, sinks_H=sinks))
        outs.append(out[np.flatnonzero(order == 0)[0]][None] if n == 1 else out)
        start = new.stop
    return torch.cat(outs)


@st.composite
def cases(draw):
    heads, groups, d, e = draw(st.sampled_from(SHAPES))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    total, seed = draw(st.integers(1, 130)), draw(st.integers(0, 99))
    with torch.no_grad():
        q, k, v = (x.detach() for x in qkv(total, heads, groups, d, e, seed=seed, dtype=dtype))
    sinks = torch.randn(heads, generator=torch.Generator().manual_seed(seed)).to(dtype) if draw(st.booleans()) else None
    return q, k, v, draw(st.sampled_from(list(WAYS.values()))), sinks


@given(cases(), st.lists(st.integers(1, 40), max_size=4), st.sampled_from([1, 3, 16, 64]), st.integers(0, 5))
@settings(deadline=None, max_examples=examples(40))
def test_chunks_pages_and_packing_leave_a_token_its_bits(case, cuts, page_size, before):
    q, k, v, params, sinks = case
    alone = packed_attention(q, k, v, [len(q)], params, sinks_H=sinks)
    assert torch.equal(engine(q, k, v, params, sinks, cuts, page_size=page_size, seed=before), alone)
    lengths = [min(before, len(q)), len(q), len(q) - min(len(q), 7)]
    q3, k3, v3 = (torch.cat((x[: lengths[0]], x, x[: lengths[2]])) for x in (q, k, v))
    together = packed_attention(q3, k3, v3, lengths, params, sinks_H=sinks)
    assert torch.equal(together[lengths[0] : lengths[0] + len(q)], alone)
    assert torch.equal(together[lengths[0] + len(q) :], alone[: lengths[2]])


@given(cases(), st.integers(0, 9))
@settings(deadline=None, max_examples=examples(10))
def test_token_by_token_beside_a_mate_that_reads_the_same_pages_gives_the_same_bits(case, seed):
    q, k, v, params, sinks = case
    q, k, v = q[:60], k[:60], v[:60]
    alone = packed_attention(q, k, v, [len(q)], params, sinks_H=sinks)
    assert torch.equal(engine(q, k, v, params, sinks, [1] * len(q), page_size=8, mates=1, seed=seed), alone)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_past_of_several_chunks_is_joined_alike(way, dtype):
    q, k, v = (x.detach() for x in qkv(1300, 2, 1, 16, 16, dtype=dtype))
    alone = packed_attention(q, k, v, [1300], WAYS[way])
    assert torch.equal(engine(q, k, v, WAYS[way], None, [500, 13, 600, *[1] * 20, 100], page_size=16), alone)


@given(cases(), st.integers(0, 129), st.integers(0, 129))
@settings(deadline=None, max_examples=examples(20))
def test_a_tree_gives_the_bits_of_the_sequences_it_holds(case, fork, end):
    q, k, v, params, sinks = case
    fork, end = fork % len(q), end % len(q)
    fork, end = min(fork, end), max(fork, end)
    # Two sequences: all of it, and its first part followed by some of its tokens again.
    again = np.arange(fork, end)
    rows = np.concatenate((np.arange(len(q)), again))
    first = Segment(fork, ((0, fork),))
    rest = Segment(len(q) - fork, ((0, fork), (fork, len(q) - fork)))
    other = Segment(len(again), ((0, fork), (len(q), len(again))))
    attend = BatchInvariantTreeBackend([first, rest, other], "cpu")
    out = attend(0, AttentionInputs(q[rows], k[rows], v[rows], params, sinks_H=sinks))
    alone = packed_attention(q, k, v, [len(q)], params, sinks_H=sinks)
    assert torch.equal(out[: len(q)], alone) and torch.equal(out[len(q) :], alone[fork:end])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_values_and_gradients_are_those_of_the_formula(way, shape):
    lengths = [130, 5, 0, 600, 1]
    inputs = qkv(sum(lengths), *shape)
    sinks = torch.randn(shape[0], dtype=torch.float64).requires_grad_()
    ours = packed_attention(*inputs, lengths, WAYS[way], sinks_H=sinks)
    wanted = by_hand(*inputs, lengths, WAYS[way], sinks)
    found = zip(gradients(ours, [*inputs, sinks]), gradients(wanted, [*inputs, sinks]), strict=True)
    assert off(ours, wanted) < 1e-12 and all(off(mine, theirs) < 1e-12 for mine, theirs in found)


def test_gradients_of_a_tree_are_those_of_its_sequences():
    q, k, v = qkv(30, 4, 2, 8, 8)
    params, runs = AttentionParams(scale=0.4, window=9), ((0, 10), (20, 10))
    tree = BatchInvariantTreeBackend([Segment(20, ((0, 20),)), Segment(10, runs)], "cpu")(
        0, AttentionInputs(q, k, v, params)
    )
    rows = np.concatenate((np.arange(20), np.arange(10), np.arange(20, 30)))
    flat = by_hand(q[rows], k[rows], v[rows], [20, 20], params)
    flat = torch.cat((flat[:20], flat[30:]))
    found = zip(gradients(tree, [q, k, v]), gradients(flat, [q, k, v]), strict=True)
    assert off(tree, flat) < 1e-12 and all(off(mine, theirs) < 1e-12 for mine, theirs in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_backward_passes_give_the_same_bits(dtype):
    inputs = qkv(200, 4, 2, 32, dtype=dtype)
    ran = [gradients(packed_attention(*inputs, [150, 50], WAYS["a window"]), inputs) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*ran, strict=True))


def test_nobody_asking_is_no_mistake():
    q = torch.zeros(0, 4, 8)
    assert BatchInvariantVarlenBackend([0], "cpu")(
        0, AttentionInputs(q, q[:, :2], q[:, :2], AttentionParams(scale=1.0))
    ).shape == (0, 4, 8)
