"""Kimi Delta Attention against its own loop over tokens in float64, and against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.recurrences import LENGTHS, apart, copies
from tests.tiers import examples
from torch.nn import functional as F
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)

from miles.kernels.linear_attention.kimi_delta_rule import decayed_scores, kimi_delta_rule

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(lengths, seed=0, heads=2, dims=(6, 5), dtype=torch.float64, decay=1.0):
    """Queries, keys, values, decays of each channel, betas and a state."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total, (k, v) = sum(lengths), dims
    q_THk, k_THk = F.normalize(random(total, heads, k), dim=-1), F.normalize(random(total, heads, k), dim=-1)
    log_decay_THk = -decay * F.softplus(random(total, heads, k))
    made = q_THk, k_THk, random(total, heads, v), log_decay_THk, random(total, heads).sigmoid()
    return [t.to(dtype) for t in (*made, random(len(lengths), heads, k, v))]


def by_hand(q_THk, k_THk, v_THv, log_decay_THk, beta_TH, lengths, state_BHkv):
    outs, states, start = [], [], 0
    for row, n in enumerate(lengths):
        state = state_BHkv[row]
        for t in range(start, start + n):
            state = state * log_decay_THk[t].exp()[:, :, None]
            wrong_Hv = v_THv[t] - torch.einsum("hk,hkv->hv", k_THk[t], state)
            state = state + torch.einsum("hk,hv,h->hkv", k_THk[t], wrong_Hv, beta_TH[t])
            outs.append(torch.einsum("hk,hkv->hv", q_THk[t], state))
        states.append(state)
        start += n
    return torch.stack(outs) if outs else torch.zeros_like(v_THv), torch.stack(states)


@settings(max_examples=examples(25), deadline=None)
@given(lengths=LENGTHS, heads=st.sampled_from([1, 3]), seed=st.integers(0, 99))
def test_values_states_and_gradients_are_those_of_the_loop(lengths, heads, seed):
    ours, theirs = copies(inputs(lengths, seed, heads))
    weight = torch.randn(sum(lengths), heads, 5, generator=torch.Generator().manual_seed(seed)).double()
    results = [
        function(*given[:5], lengths, given[5]) for function, given in ((kimi_delta_rule, ours), (by_hand, theirs))
    ]
    for ours_, theirs_ in zip(*results, strict=True):
        assert apart(ours_, theirs_) <= 1e-10
    for out, state in results:
        ((out * weight).sum() + state.sin().sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        if sum(lengths):
            assert apart(a.grad, b.grad) <= 1e-9


@pytest.mark.parametrize("size", [5, 16, 40])
def test_the_gradients_of_decayed_scores_are_those_of_finite_differences(size):
    generator = torch.Generator().manual_seed(size)
    q, k, steps = (torch.randn(2, 1, size, 3, generator=generator, dtype=torch.float64) for _ in range(3))
    total = -steps.abs().cumsum(2)
    given = [t.requires_grad_() for t in (q, k, total)]
    assert torch.autograd.gradcheck(decayed_scores, given, fast_mode=True)


def test_without_a_state_sequences_begin_at_zero_and_nothing_is_returned():
    lengths = [1, 70, 3, 1, 16, 130]
    *given, state = inputs(lengths)
    out, last = kimi_delta_rule(*given, lengths, None)
    assert last is None
    assert apart(out, by_hand(*given, lengths, torch.zeros_like(state))[0]) <= 1e-10


@pytest.mark.parametrize("where", [1, 16, 17, 63, 65, 149])
def test_going_on_from_a_state_equals_going_through_at_once(where):
    *given, state = inputs([150])
    whole, end = kimi_delta_rule(*given, [150], state)
    first, middle = kimi_delta_rule(*(t[:where] for t in given), [where], state)
    second, last = kimi_delta_rule(*(t[where:] for t in given), [150 - where], middle)
    assert apart(torch.cat((first, second)), whole) <= 1e-11
    assert apart(last, end) <= 1e-11


def test_single_tokens_before_chunks_are_what_each_is_alone():
    lengths = [1, 1, 1, 20, 90]
    *given, state = inputs(lengths, dtype=torch.float32)
    out, last = kimi_delta_rule(*given, lengths, state)
    parts = [t.split(lengths) for t in given]
    for row, n in enumerate(lengths):
        own, own_last = kimi_delta_rule(*(part[row] for part in parts), [n], state[row : row + 1])
        assert torch.equal(own, out.split(lengths)[row])
        assert torch.equal(own_last[0], last[row])


@pytest.mark.parametrize("length", [1, 5, 64, 100])
def test_transformers_agrees(length):
    q, k, v, log_decay, beta, state = inputs([length], heads=4, dtype=torch.float32)
    ours, ours_last = kimi_delta_rule(q * q.shape[-1] ** -0.5, k, v, log_decay, beta, [length], state)
    for theirs in (recurrent_kimi_delta_attention, chunk_kimi_delta_attention):
        out, last = theirs(
            *(t[None] for t in (q, k, v)),
            g=log_decay[None],
            beta=beta[None],
            initial_state=state,
            output_final_state=True,
        )
        assert apart(ours, out[0]) <= 1e-5
        assert apart(ours_last, last) <= 1e-5


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 3000.0])
def test_long_sequences_neither_overflow_nor_lose_digits_whatever_the_decay(decay):
    lengths = [500]
    exact = inputs(lengths, dims=(8, 4), decay=decay)
    # Steep at first and flat later within one chunk, where sums are long and their differences short.
    exact[3][10:30] *= 1e-4
    (ours,) = copies([t.float() for t in exact], 1)
    out, last = kimi_delta_rule(*ours[:5], lengths, ours[5])
    wanted, wanted_last = by_hand(*(t.float().double() for t in exact[:5]), lengths, exact[5].float().double())
    assert apart(out, wanted) <= 2e-5
    assert apart(last, wanted_last) <= 2e-5
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in ours)


def test_bfloat16_goes_in_and_out_and_the_state_stays_float32():
    lengths = [1, 40]
    given = inputs(lengths, dtype=torch.bfloat16)
    state = given[5].float()
    out, last = kimi_delta_rule(*given[:5], lengths, state)
    wanted, wanted_last = kimi_delta_rule(*(t.float() for t in given[:5]), lengths, state)
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, wanted.bfloat16())
    assert torch.equal(last, wanted_last)


def test_a_batch_of_other_lengths_is_refused():
    with pytest.raises(AssertionError):
        kimi_delta_rule(*inputs([8])[:5], [3, 4], None)


@needs_cuda
def test_on_cuda_values_and_gradients_are_those_of_the_loop():
    lengths = [1, 1, 200, 64, 17]
    theirs = [t.requires_grad_() for t in inputs(lengths, dims=(64, 64))]
    ours = [t.detach().cuda().float().requires_grad_() for t in theirs]
    results = [kimi_delta_rule(*ours[:5], lengths, ours[5]), by_hand(*theirs[:5], lengths, theirs[5])]
    for ours_, theirs_ in zip(*results, strict=True):
        assert apart(ours_.cpu(), theirs_) <= 1e-4
    for out, state in results:
        (out.square().sum() + state.sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert apart(a.grad.cpu(), b.grad) <= 1e-3
