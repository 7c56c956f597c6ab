"""Segments against attention with a mask written out by who descends from whom, in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.formula import gradients, off, qkv, tensors
from tests.tiers import examples

from miles.kernels.attention import tree as segments
from miles.kernels.attention import varlen
from miles.kernels.attention.gather_rows import RowGather, gather_rows, index_rows
from miles.kernels.attention.params import AttentionInputs, AttentionParams, IndexerInputs
from miles.kernels.attention.tree import Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.batch_invariant.attention import span_attention

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = AttentionParams(scale=0.5)

# (length, which earlier stretch it continues, -1 for none)
trees_of = st.lists(st.tuples(st.integers(0, 12), st.integers(-1, 6)), min_size=1, max_size=7).map(
    lambda found: [(n, min(after, i - 1)) for i, (n, after) in enumerate(found)]
)
terms_of = st.builds(
    AttentionParams,
    scale=st.sampled_from([0.5, 0.31]),
    window=st.none() | st.integers(1, 40),
    chunk=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(1.5),
)


def laid_out(tree):
    """The segments of a tree whose stretches lie one after the other."""
    starts = np.cumsum([0, *(n for n, _ in tree)])
    runs: list[tuple[tuple[int, int], ...]] = []
    for i, (n, after) in enumerate(tree):
        runs.append((*(runs[after] if after >= 0 else ()), (int(starts[i]), n)))
    return [Segment(n, runs[i]) for i, (n, _) in enumerate(tree)]


def visible(found, total, params: AttentionParams):
    """[T, M]: token by token, from what the segments say alone."""
    out = torch.zeros(sum(s.length for s in found), total, dtype=torch.bool)
    row = 0
    for segment in found:
        keys = [first + i for first, n in segment.runs for i in range(n)]
        for i in range(segment.length):
            at = len(keys) - segment.length + i
            for j in range(at + 1):
                near = params.window is None or at - j < params.window
                if near and (params.chunk is None or at // params.chunk == j // params.chunk):
                    out[row, keys[j]] = True
            row += 1
    return out


def by_mask(q, k, v, seen, params, sinks=None):
    share = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * params.scale
    if params.softcap is not None:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


@settings(max_examples=examples(80), deadline=None)
@given(
    tree=trees_of,
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (6, 4), (4, 6)]),
    params=terms_of,
    has_sinks=st.booleans(),
    limits=st.sampled_from([(1 << 22, 256, 0), (1 << 22, 256, 1 << 22), (4, 2, 1 << 22)]),
    seed=st.integers(0, 100),
)
def test_values_and_gradients_of_any_tree_are_those_of_its_mask(tree, heads, dims, params, has_sinks, limits, seed):
    """Whether the CPU computes it in blocks of segments (the first limits) or of whole trees."""
    found, total = laid_out(tree), sum(n for n, _ in tree)
    inputs, sinks = qkv(total, *heads, *dims, seed), tensors((heads[0],), seed=seed + 1) if has_sinks else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "_MAX_MASKED_SCORES", limits[0])
        patch.setattr(segments, "_MAX_MASKED_LENGTH", limits[1])
        patch.setattr(segments, "_ROW_SCORES", limits[2])
        out = TreeAttentionBackend(found, "cpu")(
            0, AttentionInputs(*inputs, params, sinks_H=sinks[0] if has_sinks else None)
        )
    if not total:
        assert out.shape == (0, heads[0], dims[1])
        return
    wanted = by_mask(*inputs, visible(found, total, params), params, *sinks)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    for a, b in zip(gradients(out, inputs + sinks), gradients(wanted, inputs + sinks), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5),
    terms_of,
    st.integers(0, 100),
)
def test_queries_may_be_fewer_than_keys_which_lie_in_any_order(wanted, params, seed):
    """Each segment: some queries, a past before them, and keys that nobody sees between its runs."""
    found, at = [], 0
    for length, past, unseen in wanted:
        runs = ((at + unseen + length, past), (at + unseen, length)) if past else ((at + unseen, length),)
        found.append(Segment(length, runs))
        at += unseen + length + past
    q, k, v = qkv(sum(s.length for s in found), 4, 2, 6, 4, seed)[:1] + qkv(at, 4, 2, 6, 4, seed)[1:]
    out = TreeAttentionBackend(found, "cpu", keys=at)(0, AttentionInputs(q, k, v, params))
    expected = by_mask(q, k, v, visible(found, at, params), params)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    for a, b in zip(gradients(out, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_sequences_without_a_past_are_a_packed_batch():
    lengths = [7, 3, 12]
    inputs = qkv(sum(lengths), 4, 2, 8)
    found = laid_out([(n, -1) for n in lengths])
    for params in (PLAIN, AttentionParams(scale=0.5, window=4), AttentionParams(scale=0.5, softcap=2.0)):
        ours, theirs = (
            TreeAttentionBackend(found, "cpu")(0, AttentionInputs(*inputs, params)),
            VarlenAttentionBackend(lengths, "cpu")(0, AttentionInputs(*inputs, params)),
        )
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-13)


def test_small_trees_are_computed_whole_and_long_branches_are_not():
    small = [(8, -1), *[(4, 0)] * 7, (8, -1), *[(4, 8)] * 6]
    large = [(800, -1), *[(400, 0)] * 7]
    trees = [
        segments._SegmentView(laid_out(tree), sum(n for n, _ in tree), torch.device("cpu")).masked_trees
        for tree in (small, large)
    ]
    assert trees[0] is not None and trees[0].shapes == [(2, 36)]
    assert trees[1] is None


TREE = [(40, -1), (17, 0), (17, 0), (300, 0), (5, 2), (30, -1), (9, 5)]


@pytest.mark.parametrize(
    "params", [PLAIN, AttentionParams(scale=0.5, window=20), AttentionParams(scale=0.5, softcap=2.0)]
)
def test_the_same_inputs_give_the_same_bits(params):
    found = laid_out(TREE)
    inputs = qkv(sum(n for n, _ in TREE), 4, 2, 8, dtype=torch.float32)

    def once():
        out = TreeAttentionBackend(found, "cpu")(0, AttentionInputs(*inputs, params))
        return [out, *gradients(out, inputs)]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize(
    "params", [PLAIN, AttentionParams(scale=0.5, window=20), AttentionParams(scale=0.5, softcap=2.0)]
)
def test_bfloat16_is_close(params):
    found, total = laid_out(TREE), sum(n for n, _ in TREE)
    inputs = qkv(total, 4, 2, 16, 8, dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, wanted = (
        TreeAttentionBackend(found, "cpu")(0, AttentionInputs(*inputs, params)),
        by_mask(*exact, visible(found, total, params), params),
    )
    assert out.dtype == torch.bfloat16 and off(out, wanted) < 1e-2
    for a, b in zip(gradients(out, inputs), gradients(wanted, exact), strict=True):
        assert a.dtype == torch.bfloat16 and off(a, b) < 2e-2


@pytest.mark.parametrize("lengths", [[5, 3, 9], [1]])
def test_short_segments_and_sequences_take_the_span_kernels_with_the_same_result(monkeypatch, lengths):
    """Only on a GPU with heads of 128 channels; here of 6, and computed by torch."""
    total, params = sum(lengths), AttentionParams(scale=0.3)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    whole = [Segment(n, ((first, n),)) for first, n in zip(starts, lengths, strict=True)]
    forked = [Segment(n, ((0, lengths[0]),) * (i > 0) + ((starts[i], n),)) for i, n in enumerate(lengths)]
    for build, found in (
        (lambda: VarlenAttentionBackend(lengths, "cpu"), whole),
        (lambda: TreeAttentionBackend(forked, "cpu"), forked),
    ):
        inputs, used = qkv(total, 4, 2, 6, 6, 0), []
        wanted = by_mask(*inputs, visible(found, total, params), params)
        for module in (segments, varlen):
            monkeypatch.setattr(module, "can_fuse", lambda q, v: True)
            monkeypatch.setattr(
                module, "span_attention", lambda *each, used=used: used.append(1) or span_attention(*each)
            )
        monkeypatch.setattr(varlen, "use_triton_training", lambda x: True)
        monkeypatch.setattr(varlen, "_SHORT_HEAD_DIM", 6)
        out = build()(0, AttentionInputs(*inputs, params))
        assert used and torch.allclose(out, wanted, rtol=0, atol=1e-12)
        for a, b in zip(gradients(out, inputs), gradients(wanted, inputs), strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_only_plain_attention_over_short_sequences_takes_the_span_kernels(monkeypatch):
    monkeypatch.setattr(varlen, "use_triton_training", lambda x: True)
    q, k, v = (torch.zeros(2, 1, 128) for _ in range(3))
    plain = AttentionParams(scale=1.0)

    def prefers(params=plain, sinks=None, v=v, max_keys=1023):
        return varlen.prefers_span_kernels(AttentionInputs(q, k, v, params, sinks), max_keys)

    assert prefers()
    assert not prefers(max_keys=1024) and not prefers(v=torch.zeros(2, 1, 64)) and not prefers(sinks=torch.zeros(1))
    assert not prefers(AttentionParams(scale=1.0, window=8)) and not prefers(AttentionParams(scale=1.0, softcap=3.0))


def test_a_choice_is_that_of_each_sequence_in_one_piece():
    attend, inputs = TreeAttentionBackend([Segment(3, ((0, 3),)), Segment(5, ((0, 8),))], "cpu"), qkv(8, 2, 2, 4)
    index = IndexerInputs(q_THd=inputs[0], k_Td=inputs[1][:, 0], weights_TH=inputs[0][..., 0], topk=2)
    given = AttentionInputs(*inputs, AttentionParams(scale=0.5), indexer=index)
    wanted = VarlenAttentionBackend([8], "cpu")(0, given)
    assert torch.allclose(attend(0, given), wanted, rtol=0, atol=1e-6)
    assert not torch.allclose(attend(1, given._replace(indexer=None)), wanted, rtol=0, atol=1e-3)
    with pytest.raises(AssertionError, match="which has not run yet"):
        attend(3, given._replace(indexer=2))


def test_a_state_is_refused():
    with pytest.raises(AssertionError, match="recurrent"):
        TreeAttentionBackend([Segment(4, ((0, 4),))], "cpu").recurrent_state(0)


# -- rows that are taken many times ---------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 12), st.data())
def test_gradients_of_copies_add_up_and_padding_gives_none(rows, data):
    taken = data.draw(st.lists(st.integers(0, rows - 1), max_size=30))
    real = np.array(data.draw(st.lists(st.booleans(), min_size=len(taken), max_size=len(taken))), bool)
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(len(taken), 3, dtype=torch.float64)
    out = gather_rows(x, RowGather(np.array(taken, np.int64), rows, "cpu", real_P=real))
    wanted = x[taken]
    assert torch.equal(out, wanted)
    (found,) = torch.autograd.grad((out * weight).sum(), x)
    (expected,) = torch.autograd.grad((wanted * weight * torch.from_numpy(real)[:, None]).sum(), x)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    (picked,) = torch.autograd.grad((index_rows(x, torch.tensor(taken, dtype=torch.int64)) * weight).sum(), x)
    assert torch.allclose(picked, torch.autograd.grad((x[taken] * weight).sum(), x)[0], rtol=0, atol=1e-12)


def test_many_copies_in_half_precision_lose_nothing_on_the_way():
    taken = np.zeros(4096, np.int64)
    for row in (lambda x: gather_rows(x, RowGather(taken, 2, "cpu")), lambda x: index_rows(x, torch.from_numpy(taken))):
        x = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        row(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [[4096.0], [0.0]]


# -- on a GPU -------------------------------------------------------------------------------

CUDA = {
    "plain": (64, 64, AttentionParams(scale=0.125)),
    "window": (64, 64, AttentionParams(scale=0.125, window=37)),
    "chunk": (64, 64, AttentionParams(scale=0.125, chunk=48)),
    "softcap": (64, 64, AttentionParams(scale=0.125, softcap=2.0)),
    "latent": (192, 128, AttentionParams(scale=0.07)),
    "odd": (20, 12, AttentionParams(scale=0.2)),
    "wide": (320, 256, AttentionParams(scale=0.07)),
}


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize(("dim", "value_dim", "params"), CUDA.values(), ids=CUDA.keys())
def test_on_cuda_values_and_gradients_are_those_of_the_mask(dim, value_dim, params, has_sinks, dtype):
    found, total = laid_out(TREE), sum(n for n, _ in TREE)
    drawn = qkv(total, 8, 2, dim, value_dim, dtype=dtype) + (tensors((8,), dtype=dtype) if has_sinks else [])
    ours = [x.detach().cuda().requires_grad_() for x in drawn]
    exact = [x.detach().double().requires_grad_() for x in drawn]
    out = TreeAttentionBackend(found, "cuda")(
        0, AttentionInputs(*ours[:3], params, sinks_H=ours[3] if has_sinks else None)
    )
    wanted = by_mask(*exact[:3], visible(found, total, params), params, *exact[3:])
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert out.dtype == dtype and off(out, wanted) < bound
    for a, b in zip(gradients(out, ours), gradients(wanted, exact), strict=True):
        assert off(a, b) < bound
