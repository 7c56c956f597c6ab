"""Attention written out, against autograd through the formula and against transformers' own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.formula import by_hand, gradients, index_of, off, seen, tensors
from tests.tiers import examples
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from miles.kernels.attention import eager
from miles.kernels.attention.eager import eager_attention, select_topk_tokens
from miles.kernels.attention.params import AttentionParams, IndexerInputs


def batch(batch, length, heads=4, kv_heads=2, dim=4, value_dim=4, seed=0, dtype=torch.float64):
    shapes = ((batch, length, heads, dim), (batch, length, kv_heads, dim), (batch, length, kv_heads, value_dim))
    return tensors(*shapes, seed=seed, dtype=dtype)


def formula(q, k, v, params, sinks=None, index=None):
    lengths = [q.shape[1]] * q.shape[0]
    return by_hand(*(x.flatten(0, 1) for x in (q, k, v)), lengths, params, sinks, index).unflatten(0, q.shape[:2])


@settings(max_examples=examples(60), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 40)),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    dims=st.sampled_from([(4, 4), (6, 4), (2, 3)]),
    window=st.none() | st.integers(1, 45),
    softcap=st.none() | st.just(0.8),
    has_sinks=st.booleans(),
    slices=st.sampled_from([(1, 1), (300, 4), (5000, 8), (1 << 26, 128)]),
    seed=st.integers(0, 100),
)
def test_values_and_gradients_are_the_formulas_however_it_is_sliced(
    shape, heads, dims, window, softcap, has_sinks, slices, seed
):
    inputs, params = batch(*shape, *heads, *dims, seed=seed), AttentionParams(scale=0.7, window=window, softcap=softcap)
    sinks = tensors((heads[0],), seed=seed + 1) if has_sinks else []
    wanted = formula(*inputs, params, *sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "_MAX_SCORES", slices[0])
        patch.setattr(eager, "_MIN_QUERIES", slices[1])
        out = eager_attention(*inputs, params, sinks_H=sinks[0] if has_sinks else None)
        found = gradients(out, inputs + sinks)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    for a, b in zip(found, gradients(wanted, inputs + sinks), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@settings(max_examples=examples(30), deadline=None)
@given(
    length=st.integers(2, 40),
    top=st.integers(1, 39),
    softcap=st.none() | st.just(0.8),
    has_sinks=st.booleans(),
    most=st.sampled_from([1, 500, 1 << 26]),
    seed=st.integers(0, 100),
)
def test_only_chosen_tokens_are_seen_however_they_are_sliced(length, top, softcap, has_sinks, most, seed):
    top = min(top, length - 1)
    inputs, index, params = (
        batch(1, length, seed=seed),
        index_of(length, top, seed=seed),
        AttentionParams(scale=1.0, softcap=softcap),
    )
    sinks = tensors((4,), seed=seed + 1) if has_sinks else []
    wanted = formula(*inputs, params, *(sinks or [None]), index)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "_MAX_SCORES", most)
        chosen = select_topk_tokens(index.q_THd, index.k_Td, index.weights_TH, top)[None]
        out = eager_attention(*inputs, params, sinks_H=sinks[0] if has_sinks else None, selected_BSt=chosen)
        found = gradients(out, inputs + sinks)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    for a, b in zip(found, gradients(wanted, inputs + sinks), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


def test_gradients_are_the_slopes_of_the_values():
    inputs, (sinks,) = batch(2, 5, 4, 2, 3, 2), tensors((4,))
    params = AttentionParams(scale=0.7, window=3, softcap=1.1)
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: eager_attention(q, k, v, params, sinks_H=sinks), (*inputs, sinks)
    )


@settings(max_examples=examples(50), deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 4), st.integers(1, 400)),
    window=st.none() | st.integers(1, 500),
    past=st.integers(0, 50),
    most=st.sampled_from([3000, 100_000, 1 << 26]),
)
def test_slices_hold_every_query_once_with_all_it_sees_and_never_too_many_scores(shape, window, past, most):
    batch, groups, share, length = shape
    taken = np.zeros((batch, length), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "_MAX_SCORES", most)
        for at in eager._iter_slices(torch.empty(*shape, 0), past + length, window):
            taken[at.rows, at.lo : at.hi] += 1
            assert at.first <= max(0, past + at.lo - (window or past + length) + 1) and at.last == past + at.hi
            queries, sequences = at.hi - at.lo, at.rows.stop - at.rows.start
            one = groups * share * (past + length)
            assert sequences * queries * groups * share * (at.last - at.first) <= max(most, one)
    assert (taken == 1).all()


def causal(length, window=None):
    visible = seen(length, AttentionParams(scale=1.0, window=window))
    return torch.zeros(length, length).masked_fill(~visible, torch.finfo(torch.float32).min)[None, None]


@pytest.mark.parametrize("window", [None, 9])
def test_sinks_are_those_of_gpt_oss(window):
    inputs, (sinks,) = batch(2, 30, 8, 2, 16, 16, dtype=torch.float32), tensors((8,), dtype=torch.float32)
    module = SimpleNamespace(num_key_value_groups=4, sinks=sinks, training=False)
    ours = eager_attention(*inputs, AttentionParams(scale=0.25, window=window), sinks_H=sinks)
    turned = [x.transpose(1, 2) for x in inputs]
    theirs, _ = modeling_gpt_oss.eager_attention_forward(module, *turned, causal(30, window), scaling=0.25)
    assert off(ours, theirs) < 1e-6
    for a, b in zip(gradients(ours, [*inputs, sinks]), gradients(theirs, [*inputs, sinks]), strict=True):
        assert off(a, b) < 1e-5


@pytest.mark.parametrize("window", [None, 9])
def test_bounded_scores_are_those_of_gemma_2(window):
    inputs = batch(2, 30, 8, 2, 16, 16, dtype=torch.float32)
    module = SimpleNamespace(num_key_value_groups=4, training=False)
    ours = eager_attention(*inputs, AttentionParams(scale=0.4, window=window, softcap=3.0))
    turned = [x.transpose(1, 2) for x in inputs]
    theirs, _ = modeling_gemma2.eager_attention_forward(module, *turned, causal(30, window), scaling=0.4, softcap=3.0)
    assert off(ours, theirs) < 1e-6
    for a, b in zip(gradients(ours, inputs), gradients(theirs, inputs), strict=True):
        assert off(a, b) < 1e-5


def test_huge_scores_overflow_nowhere():
    inputs, (sinks,) = batch(1, 20, dtype=torch.float32), tensors((4,), dtype=torch.float32)
    large = [(x * 300).detach().requires_grad_() for x in inputs]
    for params in (AttentionParams(scale=1.0), AttentionParams(scale=1.0, softcap=5.0)):
        out = eager_attention(*large, params, sinks_H=sinks)
        assert all(x.isfinite().all() for x in (out, *gradients(out, [*large, sinks])))


def test_of_equal_scores_those_are_chosen_that_topk_takes_from_the_whole_row():
    length, top = 30, 7
    drawn = index_of(length, top, heads=2)
    index = IndexerInputs(
        q_THd=drawn.q_THd.sign(), k_Td=drawn.k_Td.sign(), weights_TH=drawn.weights_TH.sign(), topk=top
    )
    chosen = select_topk_tokens(index.q_THd, index.k_Td, index.weights_TH, top).long()
    found = torch.zeros(length, length, dtype=torch.bool).scatter_(1, chosen, True) & seen(
        length, AttentionParams(scale=1.0)
    )
    assert torch.equal(found, seen(length, AttentionParams(scale=1.0), index))


@pytest.mark.parametrize("last", [1, 7, 39])
def test_the_last_queries_alone_choose_and_attend_as_among_all(last):
    index, inputs, params = index_of(40, 6), batch(1, 40), AttentionParams(scale=0.6)
    chosen = select_topk_tokens(index.q_THd, index.k_Td, index.weights_TH, 6)
    tail = select_topk_tokens(index.q_THd[-last:], index.k_Td, index.weights_TH[-last:], 6)
    assert torch.equal(tail.sort(-1).values[6:], chosen[-last:].sort(-1).values[6:])
    q, k, v = inputs
    whole = eager_attention(q, k, v, params, selected_BSt=chosen[None])
    alone = eager_attention(q[:, -last:], k, v, params, selected_BSt=tail[None])
    assert torch.allclose(alone, whole[:, -last:], rtol=0, atol=1e-12)


def test_choosing_in_bfloat16_sums_in_float32():
    index = index_of(60, 10, heads=16, dim=64, dtype=torch.bfloat16)
    wide = (x.float() for x in (index.q_THd, index.k_Td, index.weights_TH))
    assert torch.equal(select_topk_tokens(index.q_THd, index.k_Td, index.weights_TH, 10), select_topk_tokens(*wide, 10))


def test_nothing_is_kept_that_grows_with_the_square_of_the_length():
    kept = []
    inputs = batch(1, 600, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        eager_attention(*inputs, AttentionParams(scale=0.5, softcap=2.0))
    assert max(kept) <= 600 * 4 * 4
