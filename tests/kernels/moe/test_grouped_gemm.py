"""Grouped products and the moving of rows, against autograd on the plain formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.moe.fused_moe import moe_forward
from miles.kernels.moe.grouped_gemm import combine_rows, dispatch, grouped_linear, scale_rows, sort_rows_by_group
from miles.kernels.numerics import FAST

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def groups(tokens, choices, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator)[:choices] for _ in range(tokens)])


def made(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


def plain(x_TD, weight_END, groups_Tk, weights_Tk, bias_EN=None):
    rows_TkN = torch.einsum("td,tknd->tkn", x_TD, weight_END[groups_Tk])
    return torch.einsum("tk,tkn->tn", weights_Tk, rows_TkN if bias_EN is None else rows_TkN + bias_EN[groups_Tk])


def same_gradients(ours, theirs, leaves, others, bound):
    weight = made(*ours.shape, seed=9).detach().to(ours.device)
    grads = torch.autograd.grad((ours * weight).sum(), leaves)
    for a, b in zip(grads, torch.autograd.grad((theirs * weight).sum(), others), strict=True):
        assert (a - b).abs().max() <= bound * b.abs().max().clamp(min=1.0)


SIZES = {
    "tokens": st.integers(1, 12),
    "choices": st.integers(1, 3),
    "more": st.integers(0, 4),
    "seed": st.integers(0, 100),
}


@settings(max_examples=examples(30), deadline=None)
@given(**SIZES, biased=st.booleans())
def test_dispatch_product_and_collect_are_the_plain_sum_and_so_are_their_gradients(tokens, choices, more, seed, biased):
    count = choices + more
    groups_Tk = groups(tokens, choices, count, seed)
    leaves = [made(tokens, 5, seed=1), made(count, 4, 5, seed=2), made(tokens, choices, seed=3)]
    leaves += [made(count, 4, seed=4)] * biased
    rows = sort_rows_by_group(groups_Tk, count)
    ours = combine_rows(grouped_linear(dispatch(leaves[0], rows), leaves[1], rows, *leaves[3:]), leaves[2], rows)
    theirs = plain(leaves[0], leaves[1], groups_Tk, *leaves[2:])
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)
    same_gradients(ours, theirs, leaves, leaves, 1e-12)


@settings(max_examples=examples(30), deadline=None)
@given(**SIZES)
def test_weights_may_be_put_on_what_goes_in_instead(tokens, choices, more, seed):
    count = choices + more
    groups_Tk = groups(tokens, choices, count, seed)
    leaves = [made(tokens, 5, seed=1), made(count, 4, 5, seed=2), made(tokens, choices, seed=3)]
    rows = sort_rows_by_group(groups_Tk, count)
    inner = grouped_linear(scale_rows(dispatch(leaves[0], rows), leaves[2], rows), leaves[1], rows)
    ours = combine_rows(inner.square(), None, rows)
    theirs = torch.einsum("tk,td,tknd->tkn", leaves[2], leaves[0], leaves[1][groups_Tk]).square().sum(1)
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-11)
    same_gradients(ours, theirs, leaves, leaves, 1e-11)


@given(tokens=st.integers(1, 20), choices=st.integers(1, 3), seed=st.integers(0, 100))
def test_rows_are_sorted_by_group_and_tokens_stay_in_order(tokens, choices, seed):
    groups_Tk = groups(tokens, choices, 5, seed)
    rows = sort_rows_by_group(groups_Tk, 5)
    flat = groups_Tk.flatten()
    assert flat[rows.order_R].tolist() == sorted(flat.tolist())
    assert rows.order_R[rows.place_R].tolist() == list(range(len(flat)))
    assert rows.ends_E.tolist() == [int((flat <= e).sum()) for e in range(5)]
    for e in range(5):
        chosen = rows.order_R[flat[rows.order_R] == e].tolist()
        assert chosen == sorted(chosen)


class Folded:
    """One of several ranks, alone: what the groups of the others would give is zeros."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world

    def open(self, rows):
        ends = [0, *rows.ends_E.tolist()]
        each = (len(ends) - 1) // self.world
        first, last = ends[self.rank * each], ends[(self.rank + 1) * each]

        def trip(x_RD, work):
            own = work(x_RD[first:last], sort_rows_by_group(rows.group_R[first:last, None] % each, each))
            return torch.cat([x_RD[:first] * 0, own, x_RD[last:] * 0])

        return trip


@settings(max_examples=examples(20), deadline=None)
@given(seed=st.integers(0, 100), weigh_input=st.booleans(), world=st.sampled_from([1, 2, 3]))
def test_rows_may_be_worked_on_where_their_group_is(seed, weigh_input, world):
    groups_Tk = groups(9, 2, 6, seed)
    x, first, down, weights = made(9, 5), made(6, 8, 5, seed=1), made(6, 5, 4, seed=2), made(9, 2, seed=3)
    how = {"activation": "silu", "weigh_input": weigh_input}
    whole = moe_forward(x, weights, groups_Tk, first, down, **how, numerics=FAST)
    total = torch.zeros_like(whole)
    for rank in range(world):
        own = slice(rank * 6 // world, (rank + 1) * 6 // world)
        part = moe_forward(
            x, weights, groups_Tk, first[own], down[own], **how, exchange=Folded(rank, world), numerics=FAST
        )
        total = total + part
    assert torch.allclose(total, whole, rtol=0, atol=1e-12)
    same_gradients(total, whole, [x, first, down, weights], [x, first, down, weights], 1e-11)


def test_a_sum_of_rows_is_no_view_so_that_a_hook_may_be_put_on_it():
    rows = sort_rows_by_group(groups(6, 2, 4, 0), 4)
    assert not combine_rows(made(12, 5), made(6, 2), rows)._is_view()
    assert not combine_rows(made(12, 5), None, rows)._is_view()


def test_only_the_gradients_asked_for_are_made():
    rows = sort_rows_by_group(groups(6, 2, 4, 0), 4)
    x, weight = made(12, 5), made(4, 3, 5).detach()
    grouped_linear(x, weight, rows).sum().backward()
    assert x.grad is not None and weight.grad is None
    x, weight = made(12, 5).detach(), made(4, 3, 5)
    bias = made(4, 3).detach()
    grouped_linear(x, weight, rows, bias).sum().backward()
    assert x.grad is None and weight.grad is not None and bias.grad is None


@needs_cuda
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda_values_and_gradients_are_the_plain_sums(dtype, biased):
    groups_Tk = groups(200, 4, 16, 0).cuda()
    exact = [made(200, 64, seed=1), made(16, 48, 64, seed=2), made(200, 4, seed=3)] + [made(16, 48, seed=4)] * biased
    exact = [x.detach().to("cuda", dtype).double().requires_grad_() for x in exact]
    leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
    rows = sort_rows_by_group(groups_Tk, 16)
    ours = combine_rows(grouped_linear(dispatch(leaves[0], rows), leaves[1], rows, *leaves[3:]), leaves[2], rows)
    theirs = plain(exact[0], exact[1], groups_Tk, *exact[2:])
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    assert (ours - theirs).abs().max() < bound * theirs.abs().max()
    same_gradients(ours, theirs, leaves, exact, bound)


@needs_cuda
def test_on_cuda_gradients_repeat_to_the_bit():
    groups_Tk = groups(3000, 4, 16, 0).cuda()
    leaves = [made(3000, 64, seed=1), made(16, 48, 64, seed=2), made(3000, 4, seed=3), made(16, 48, seed=4)]
    leaves = [x.detach().to("cuda", torch.bfloat16).requires_grad_() for x in leaves]
    runs = []
    for _ in range(3):
        rows = sort_rows_by_group(groups_Tk, 16)
        inner = grouped_linear(scale_rows(dispatch(leaves[0], rows), leaves[2], rows), leaves[1], rows, leaves[3])
        runs.append(torch.autograd.grad(combine_rows(inner, leaves[2], rows).square().sum(), leaves))
    for again in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], again, strict=True))
