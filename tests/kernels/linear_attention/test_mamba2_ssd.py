"""Mamba-2's recurrence against its own loop over tokens in float64, and against transformers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.recurrences import LENGTHS, apart, copies
from tests.tiers import examples
from torch.nn import functional as F
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan, mamba2_selective_state_update

from miles.kernels.linear_attention.mamba2_ssd import mamba2_ssd

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def inputs(lengths, seed=0, heads=(2, 4), dims=(5, 6), dtype=torch.float64, decay=1.0):
    """x, dt, a, b, c, d and a state."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    total, (groups, count), (p, n) = sum(lengths), heads, dims
    steps = F.softplus(random(total, count)), -decay * random(count).exp()
    both = random(total, groups, n), random(total, groups, n)
    made = random(total, count, p), *steps, *both, random(count), random(len(lengths), count, p, n)
    return [t.to(dtype) for t in made]


def by_hand(x_THp, dt_TH, a_H, b_TGn, c_TGn, d_H, lengths, state_BHpn):
    share = x_THp.shape[1] // b_TGn.shape[1]
    b_THn, c_THn = b_TGn.repeat_interleave(share, 1), c_TGn.repeat_interleave(share, 1)
    outs, states, start = [], [], 0
    for row, n in enumerate(lengths):
        state = state_BHpn[row]
        for t in range(start, start + n):
            state = state * (dt_TH[t] * a_H).exp()[:, None, None]
            state = state + torch.einsum("h,hp,hn->hpn", dt_TH[t], x_THp[t], b_THn[t])
            outs.append(torch.einsum("hpn,hn->hp", state, c_THn[t]) + d_H[:, None] * x_THp[t])
        states.append(state)
        start += n
    return torch.stack(outs) if outs else torch.zeros_like(x_THp), torch.stack(states)


@settings(max_examples=examples(25), deadline=None)
@given(lengths=LENGTHS, heads=st.sampled_from([(1, 1), (2, 2), (2, 4), (1, 3)]), seed=st.integers(0, 99))
def test_values_states_and_gradients_are_those_of_the_loop(lengths, heads, seed):
    ours, theirs = copies(inputs(lengths, seed, heads))
    weight = torch.randn(sum(lengths), heads[1], 5, generator=torch.Generator().manual_seed(seed)).double()
    results = [function(*given[:6], lengths, given[6]) for function, given in ((mamba2_ssd, ours), (by_hand, theirs))]
    for ours_, theirs_ in zip(*results, strict=True):
        assert apart(ours_, theirs_) <= 1e-11
    for out, state in results:
        ((out * weight).sum() + state.sin().sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        if sum(lengths):
            assert apart(a.grad, b.grad) <= 1e-10


def test_without_a_state_sequences_begin_at_zero_and_nothing_is_returned():
    lengths = [1, 70, 3, 1, 16, 130]
    *given, state = inputs(lengths)
    out, last = mamba2_ssd(*given, lengths, None)
    assert last is None
    assert apart(out, by_hand(*given, lengths, torch.zeros_like(state))[0]) <= 1e-11


@pytest.mark.parametrize("where", [1, 2, 16, 17, 63, 64, 65, 128, 149])
def test_going_on_from_a_state_equals_going_through_at_once(where):
    x, dt, a, b, c, d, state = inputs([150])
    whole, end = mamba2_ssd(x, dt, a, b, c, d, [150], state)
    first, middle = mamba2_ssd(x[:where], dt[:where], a, b[:where], c[:where], d, [where], state)
    second, last = mamba2_ssd(x[where:], dt[where:], a, b[where:], c[where:], d, [150 - where], middle)
    assert apart(torch.cat((first, second)), whole) <= 1e-11
    assert apart(last, end) <= 1e-11


def test_single_tokens_before_chunks_are_what_each_is_alone():
    lengths = [1, 1, 1, 20, 90]
    x, dt, a, b, c, d, state = inputs(lengths, dtype=torch.float32)
    out, last = mamba2_ssd(x, dt, a, b, c, d, lengths, state)
    parts = [t.split(lengths) for t in (x, dt, b, c, out)]
    for row, n in enumerate(lengths):
        x_, dt_, b_, c_, wanted = (part[row] for part in parts)
        own, own_last = mamba2_ssd(x_, dt_, a, b_, c_, d, [n], state[row : row + 1])
        assert torch.equal(own, wanted)
        assert torch.equal(own_last[0], last[row])


@pytest.mark.parametrize("length", [1, 5, 64, 100, 200])
def test_transformers_agrees(length):
    x, dt, a, b, c, d, state = inputs([length], dtype=torch.float32)
    ours, ours_last = mamba2_ssd(x, dt, a, b, c, d, [length], state)
    out, last = mamba2_chunk_scan(
        x[None], dt[None], a, b[None], c[None], chunk_size=32, D=d, initial_states=state, return_final_states=True
    )
    assert apart(ours, out[0]) <= 1e-5
    assert apart(ours_last, last) <= 1e-5


def test_transformers_agrees_token_by_token():
    lengths = [1, 1, 1]
    x, dt, a, b, c, d, state = inputs(lengths, dtype=torch.float32)
    ours, ours_last = mamba2_ssd(x, dt, a, b, c, d, lengths, state)
    wide = (*x.shape[1:], b.shape[-1])
    theirs = mamba2_selective_state_update(
        state, x, dt[..., None].expand_as(x), a[:, None, None].expand(wide), b, c, d[:, None].expand(wide[:2])
    )
    assert apart(ours, theirs) <= 1e-5
    assert apart(ours_last, state) <= 1e-5


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0, 3000.0])
def test_long_sequences_neither_overflow_nor_lose_digits_whatever_the_decay(decay):
    lengths = [1000]
    exact = inputs(lengths, heads=(1, 2), dims=(4, 8), decay=decay)
    # Long steps at first and short ones later within one chunk, where sums are long and their differences short.
    exact[1][10:30] *= 1e-4
    (ours,) = copies([t.float() for t in exact], 1)
    out, last = mamba2_ssd(*ours[:6], lengths, ours[6])
    wanted, wanted_last = by_hand(*(t.float().double() for t in exact[:6]), lengths, exact[6].float().double())
    assert apart(out, wanted) <= 2e-5
    assert apart(last, wanted_last) <= 2e-5
    out.sum().backward()
    assert all(t.grad.isfinite().all() for t in ours)


def test_bfloat16_goes_in_and_out_and_the_state_stays_float32():
    lengths = [1, 40]
    *given, state = inputs(lengths, dtype=torch.bfloat16)
    out, last = mamba2_ssd(*given, lengths, state.float())
    wanted, wanted_last = mamba2_ssd(*(t.float() for t in given), lengths, state.float())
    assert (out.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, wanted.bfloat16())
    assert torch.equal(last, wanted_last)


def test_a_batch_of_other_lengths_is_refused():
    with pytest.raises(AssertionError):
        mamba2_ssd(*inputs([8])[:6], [3, 4], None)


@needs_cuda
def test_on_cuda_values_and_gradients_are_those_of_the_loop():
    lengths = [1, 1, 200, 64, 17]
    theirs = [t.requires_grad_() for t in inputs(lengths, heads=(2, 4), dims=(64, 128))]
    ours = [t.detach().cuda().float().requires_grad_() for t in theirs]
    results = [mamba2_ssd(*ours[:6], lengths, ours[6]), by_hand(*theirs[:6], lengths, theirs[6])]
    for ours_, theirs_ in zip(*results, strict=True):
        assert apart(ours_.cpu(), theirs_) <= 1e-4
    for out, state in results:
        (out.square().sum() + state.sum()).backward()
    for a, b in zip(ours, theirs, strict=True):
        assert apart(a.grad.cpu(), b.grad) <= 1e-3
