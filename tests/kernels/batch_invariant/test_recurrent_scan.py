"""Batch-invariant recurrences: the same bits in parts or among others, values and gradients of a float64 loop."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.device import DEVICE, needs_triton
from tests.kernels.linear_attention import test_gated_delta_rule as delta
from tests.kernels.linear_attention import test_kimi_delta_rule as kimi
from tests.kernels.linear_attention import test_mamba2_ssd as mamba
from tests.kernels.recurrences import apart, copies
from tests.tiers import examples

from miles.kernels.batch_invariant import recurrent_scan
from miles.kernels.batch_invariant.recurrent_scan import ScanInputs, launch_scan, scan_reference

# A rule, what makes its inputs, the loop over tokens, and which inputs have a row for each token.
RULES = {
    "gated delta": (recurrent_scan.gated_delta_rule, delta.inputs, delta.by_hand, (0, 1, 2, 3, 4)),
    "kimi delta": (recurrent_scan.kimi_delta_rule, kimi.inputs, kimi.by_hand, (0, 1, 2, 3, 4)),
    "mamba-2": (recurrent_scan.mamba2_ssd, mamba.inputs, mamba.by_hand, (0, 1, 3, 4)),
}
LENGTHS = st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any)


def rows_of(inputs, per_token, rows):
    return [x[rows] if i in per_token else x for i, x in enumerate(inputs)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    lengths=LENGTHS,
    dims=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cuts=st.lists(st.integers(1, 19), max_size=4),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_a_sequence_has_the_same_bits_whole_in_parts_alone_or_among_others(
    name, dtype, lengths, dims, cuts, threads, seed
):
    rule, make, _, per_token = RULES[name]
    *inputs, _ = make(lengths, seed, dims=dims, dtype=dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole, nothing = rule(*inputs, lengths, None)
    finally:
        torch.set_num_threads(before)
    assert nothing is None and whole.dtype == dtype
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    for (first, last), wanted in zip(pairwise(starts), whole.split(lengths), strict=True):
        edges = [first, *(first + cut for cut in sorted(set(cuts)) if first + cut < last), last]
        *_, state = make([1], seed, dims=dims, dtype=torch.float32)
        state, outs = torch.zeros_like(state), []
        with torch.no_grad():
            for lo, hi in pairwise(edges):
                out, state = rule(*rows_of(inputs, per_token, slice(lo, hi)), [hi - lo], state)
                outs.append(out)
        assert torch.equal(torch.cat(outs), wanted)


@pytest.mark.parametrize("name", RULES)
def test_token_by_token_beside_a_prefill_is_the_sequence_at_once(name):
    rule, make, _, per_token = RULES[name]
    *inputs, state = make([9, 9], dtype=torch.float32)
    with torch.no_grad():
        whole, end = rule(*inputs, [9, 9], state)
        outs = []
        for t in range(9):  # the second sequence is computed at once, in the step of the first one's last token
            rows = torch.tensor([t] if t < 8 else [8, *range(9, 18)])
            lengths = [1, len(rows) - 1]
            out, state = rule(*rows_of(inputs, per_token, rows), lengths, state)
            outs.append(out)
    assert torch.equal(torch.cat(outs), whole)
    assert torch.equal(state, end)


@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients_are_those_of_the_loop_in_float64(name):
    rule, make, by_hand, _ = RULES[name]
    lengths = [1, 70, 0, 3, 16, 130]
    *inputs, state = make(lengths)
    ours, theirs = copies(inputs)
    out, _ = rule(*ours, lengths, None)
    wanted, _ = by_hand(*theirs, lengths, torch.zeros_like(state))
    assert apart(out, wanted) <= 1e-12
    for each in (out, wanted):
        (each.sin() * each).sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        assert apart(mine.grad, other.grad) <= 1e-10
    with torch.no_grad():
        pairs = zip(rule(*inputs, lengths, state), by_hand(*inputs, lengths, state), strict=True)
    assert all(apart(mine, other) <= 1e-12 for mine, other in pairs)


def test_other_lengths_and_a_gradient_through_a_state_are_refused():
    *inputs, state = delta.inputs([5])
    with pytest.raises(AssertionError, match="5 tokens for sequences of 4"):
        recurrent_scan.gated_delta_rule(*inputs, [4], None)
    with pytest.raises(AssertionError, match="has no gradient"):
        recurrent_scan.gated_delta_rule(*inputs, [5], state)


@needs_triton
@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("has_channels", [True, False])
def test_the_kernel_computes_what_torch_does_and_the_same_bits_in_parts(has_beta, has_channels):
    lengths, heads, keys, values = [5, 0, 1, 3], 2, 6, 40
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, n) for n in (keys, keys, values))
    decay = torch.rand(total, heads, keys if has_channels else 1)
    inputs = ScanInputs(q, k / keys, v, decay, torch.rand(total, heads) if has_beta else None)
    there = ScanInputs(*(None if x is None else x.to(DEVICE) for x in inputs))
    state = torch.randn(len(lengths), heads, keys, values)
    out, end = launch_scan(there, lengths, state.to(DEVICE))
    wanted, wanted_end = scan_reference(inputs, lengths, state)
    assert apart(out.cpu(), wanted) <= 1e-5 and apart(end.cpu(), wanted_end) <= 1e-5
    state, outs = state[:1].to(DEVICE), []
    for lo, hi in ((0, 1), (1, 2), (2, 5)):
        part = ScanInputs(*(None if x is None else x[lo:hi] for x in there))
        each, state = launch_scan(part, [hi - lo], state)
        outs.append(each)
    assert torch.equal(torch.cat(outs), out[:5]) and torch.equal(state[0], end[0])
