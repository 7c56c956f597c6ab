"""The causal convolution against its formula, token by token, and against torch's own."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples
from torch.nn import functional as F

from miles.kernels.linear_attention import causal_conv1d as module
from miles.kernels.numerics import BATCH_INVARIANT, FAST

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any)


NUMERICS = [FAST, BATCH_INVARIANT]


def causal_conv1d(*inputs, numerics=FAST):
    return module.causal_conv1d(*inputs, numerics=numerics)


def random(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_torch(x_TC, weight_CK, bias_C, lengths, state_BCk):
    outs, states = [], []
    for row, x in enumerate(x_TC.split(list(lengths))):
        window = torch.cat((state_BCk[row], x.t()), -1)
        if len(x):
            outs.append(F.conv1d(window, weight_CK[:, None], bias_C, groups=len(weight_CK)).t())
        states.append(window[:, -state_BCk.shape[-1] :])
    return torch.cat(outs), torch.stack(states)


@settings(max_examples=examples(40), deadline=None)
@given(
    lengths=LENGTHS,
    taps=st.integers(2, 5),
    bias=st.booleans(),
    started=st.booleans(),
    seed=st.integers(0, 99),
    numerics=st.sampled_from(NUMERICS),
)
def test_values_states_and_gradients_are_torchs(lengths, taps, bias, started, seed, numerics):
    x, weight = random(seed, sum(lengths), 3), random(seed + 1, 3, taps)
    state = random(seed + 2, len(lengths), 3, taps - 1) if started else torch.zeros(len(lengths), 3, taps - 1).double()
    inputs = [x, weight, random(seed + 3, 3), state]
    ours, theirs = ([t.clone().requires_grad_() for t in inputs] for _ in range(2))
    results = [
        function(x, w, b if bias else None, lengths, s)
        for function, (x, w, b, s) in ((partial(causal_conv1d, numerics=numerics), ours), (by_torch, theirs))
    ]
    for (out, last), (wanted, wanted_last) in [results]:
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        assert torch.equal(last, wanted_last)
    for out, last in results:
        (out.sin().sum() + last.cos().sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        if a.grad is not None or b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-11)


def test_without_a_state_all_sequences_begin_and_none_is_returned():
    lengths = [3, 1, 5]
    x, weight = random(0, 9, 4), random(1, 4, 4)
    out, last = causal_conv1d(x, weight, None, lengths, None)
    begun, _ = causal_conv1d(x, weight, None, lengths, torch.zeros(3, 4, 3).double())
    assert last is None
    assert torch.equal(out, begun)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", range(1, 7))
def test_cutting_a_sequence_anywhere_changes_no_bit(dtype, where):
    x, weight = random(0, 7, 4, dtype=dtype), random(1, 4, 4, dtype=dtype)
    whole, end = causal_conv1d(x, weight, None, [7], torch.zeros(1, 4, 3, dtype=dtype))
    first, state = causal_conv1d(x[:where], weight, None, [where], torch.zeros(1, 4, 3, dtype=dtype))
    outs = [first]
    for t in range(where, 7):
        out, state = causal_conv1d(x[t : t + 1], weight, None, [1], state)
        outs.append(out)
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(state, end)
    assert whole.dtype == state.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(
    lengths=LENGTHS,
    channels=st.integers(1, 80),
    cuts=st.lists(st.integers(1, 11), max_size=3),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_batch_invariant_sums_are_the_same_bits_alone_in_parts_or_among_others(
    dtype, lengths, channels, cuts, threads, seed
):
    x, weight, bias = random(seed, sum(lengths), channels), random(seed + 1, channels, 4), random(seed + 2, channels)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, _ = causal_conv1d(x, weight, bias, lengths, None, numerics=BATCH_INVARIANT)
    finally:
        torch.set_num_threads(before)
    for alone, wanted in zip(x.split(lengths), whole.split(lengths), strict=True):
        state, outs = torch.zeros(1, channels, 3, dtype=dtype), []
        edges = [0, *sorted(cut for cut in cuts if cut < len(alone)), len(alone)]
        for first, last in pairwise(edges):
            out, state = causal_conv1d(alone[first:last], weight, bias, [last - first], state, numerics=BATCH_INVARIANT)
            outs.append(out)
        assert torch.equal(torch.cat(outs), wanted)


def test_a_batch_of_other_lengths_is_refused():
    with pytest.raises(AssertionError):
        causal_conv1d(random(0, 8, 2), random(1, 2, 4), None, [3, 4], None)
