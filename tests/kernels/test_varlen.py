"""Packed attention against the formula, sequence by sequence in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.kernels.varlen import PackedAttend, _blocks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def qkv(total, heads, kv_heads, dim, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = (total, heads, dim), (total, kv_heads, dim), (total, kv_heads, dim)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def by_hand(q_THd, k_TGd, v_TGd, lengths):
    share = q_THd.shape[1] // k_TGd.shape[1]
    outs, start = [], 0
    for n in lengths:
        q, k, v = (x[start : start + n] for x in (q_THd, k_TGd, v_TGd))
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        start += n
    return torch.cat(outs)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8).filter(any),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 100),
)
def test_values_and_gradients_are_the_formulas(lengths, heads, seed):
    ours, theirs = (qkv(sum(lengths), *heads, 4, seed) for _ in range(2))
    weight = torch.randn(sum(lengths), heads[0], 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out, wanted = PackedAttend(lengths, "cpu")(0, *ours), by_hand(*theirs, lengths)
    assert torch.allclose(out, wanted, rtol=0, atol=1e-12)
    (out * weight).sum().backward()
    (wanted * weight).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-11)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=40))
def test_every_sequence_is_in_one_block_and_padding_is_less_than_half(lengths):
    blocks = _blocks(lengths)
    assert sorted(i for block in blocks for i in block) == [i for i, n in enumerate(lengths) if n]
    for block in blocks:
        used = sum(lengths[i] for i in block)
        assert len(block) * max(lengths[i] for i in block) < 2 * used


def test_like_lengths_are_one_call_and_equal_lengths_move_no_row():
    assert len(_blocks([10, 12, 19, 15])) == 1
    shapes, token_P, slot_T = PackedAttend([6, 6, 6], "cpu")._layout()
    assert (shapes, token_P, slot_T) == ([(3, 6)], None, None)


def test_an_empty_batch_gives_an_empty_result():
    assert PackedAttend([], "cpu")(0, *qkv(0, 2, 1, 4)).shape == (0, 2, 4)


def test_a_batch_of_other_lengths_is_refused():
    with pytest.raises(AssertionError):
        PackedAttend([3, 4], "cpu")(0, *qkv(8, 2, 1, 4))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_values_and_gradients_are_the_formulas(dtype):
    lengths = [100, 1, 37, 513, 64]
    theirs = [x.detach().cuda().requires_grad_() for x in qkv(sum(lengths), 8, 2, 64, dtype=dtype)]
    ours = [x.detach().clone().requires_grad_() for x in theirs]
    exact = [x.detach().double().requires_grad_() for x in theirs]
    out, wanted = PackedAttend(lengths, "cuda")(0, *ours), by_hand(*exact, lengths)
    out.float().square().sum().backward()
    wanted.square().sum().backward()
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert (out - wanted).abs().max() < bound * wanted.abs().max()
    for a, b in zip(ours, exact, strict=True):
        assert (a.grad - b.grad).abs().max() < bound * b.grad.abs().max()
