"""Operations on rows: a row's result is the same to the bit wherever it stands, and the gradients are right."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import DEVICE, needs_triton
from tests.tiers import examples
from torch.nn import functional as F

from miles.kernels.activation_kinds import limited_swiglu
from miles.kernels.batch_invariant import activation, expert_sort, qk_norm_rope, rms_norm, topk_router
from miles.kernels.batch_invariant.elementwise import softmax, sum_in_rank_order, tree_sum
from miles.kernels.fused.activation import apply_activation, gated_activation_inference
from miles.kernels.fused.qk_norm_rope import QKVShape
from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.layers import recurrent_ops, rope
from miles.models.layers.recurrent_ops import normalize_heads
from miles.models.spec import RopeSpec

LIMITED = [limited_swiglu(2.5), limited_swiglu(2.5, behind=True)]

DTYPES = [torch.float32, torch.bfloat16]


def numbers(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul_(3).to(dtype)


def there(*given):
    """Where device code runs; what it is held against stays on the CPU."""
    return [each if each is None else each.to(DEVICE) for each in given]


def norm(x, size):
    return rms_norm.rms_norm(x, numbers(size, seed=9, dtype=x.dtype), 1e-6, offset=1.0)


def add_norm(x, size):
    return torch.cat(rms_norm.add_rms_norm(x, x.flip(-1), numbers(size, seed=9, dtype=x.dtype), 1e-5), -1)


def turned(x, size):
    return qk_norm_rope.apply_rope(
        x.view(len(x), 1, size), numbers(1, 2, size - size % 4, seed=3, dtype=x.dtype)
    ).flatten(1)


def routed(x, size):
    scores = topk_router.compute_scores(x, "softmax")
    experts = topk_router.stable_topk(scores, min(3, size))
    weights = topk_router.compute_weights(scores, experts, normalise=True, scale=1.5, dtype=x.dtype)
    return torch.cat((weights, experts.to(x.dtype)), -1)


OPERATIONS = {
    "norm": norm,
    "norm of a sum": add_norm,
    "unit norm": lambda x, size: rms_norm.rms_norm(x, None, 1e-6),
    "rotation": turned,
    "router": routed,
    "sigmoid router": lambda x, size: topk_router.compute_scores(x, "sigmoid"),
    "sigmoid": lambda x, size: activation.sigmoid(x),
    "softplus": lambda x, size: activation.softplus(x),
    "unit length": lambda x, size: normalize_heads(x[:, None], BATCH_INVARIANT).flatten(1),
    "silu": lambda x, size: activation.gated_activation(torch.cat((x, x.flip(-1)), -1), "silu"),
    "gelu": lambda x, size: activation.gated_activation(torch.cat((x, x.flip(-1)), -1), "gelu_tanh"),
    "gelu alone": lambda x, size: activation.ungated_activation(x, "gelu_tanh"),
    "relu2": lambda x, size: activation.gated_activation(torch.cat((x, x.flip(-1)), -1), "relu2"),
    "clamped": lambda x, size: activation.gated_activation(
        torch.cat((x, x.flip(-1)), -1), "swiglu_clamped", interleaved=True
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=examples(15), deadline=None, derandomize=True)
@given(count=st.integers(1, 70), size=st.integers(4, 130), seed=st.integers(0, 99), threads=st.sampled_from([1, 2]))
def test_a_row_is_computed_alike_wherever_it_stands(name, dtype, count, size, seed, threads):
    operation = partial(OPERATIONS[name], size=size)
    x = numbers(count, size, seed=seed, dtype=dtype)
    alone = torch.cat([operation(row[None]) for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        many = operation(torch.cat((x[:3], x, x)))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(many[min(3, count) :][:count], alone)
    assert torch.equal(many[min(3, count) + count :], alone)


def test_large_tensors_that_several_threads_share_out_are_computed_alike_too():
    x = numbers(301, 517)
    alone = torch.cat([activation.ungated_activation(row[None], "silu") for row in x])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert torch.equal(activation.ungated_activation(x, "silu"), alone)
        assert torch.equal(
            rms_norm.rms_norm(x, None, 1e-6), torch.cat([rms_norm.rms_norm(r[None], None, 1e-6) for r in x])
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100])
def test_sums_and_shares_are_sums_and_shares(size):
    x = numbers(5, size, dtype=torch.float64)
    assert torch.allclose(tree_sum(x).squeeze(-1), x.sum(-1))
    assert torch.allclose(softmax(x), x.softmax(-1))
    parts = [numbers(3, size, seed=i, dtype=torch.bfloat16) for i in range(3)]
    whole = (parts[0].float() + parts[1].float() + parts[2].float()).to(torch.bfloat16)
    assert torch.equal(sum_in_rank_order(parts), whole)


def gradients(operation, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = operation(*leaves)
    out = out if isinstance(out, tuple) else (out,)
    sum((o * numbers(*o.shape, seed=5, dtype=o.dtype).to(o.device)).sum() for o in out).backward()
    return [each.cpu() for each in (*out, *(leaf.grad for leaf in leaves))]


def assert_same(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-9)


def test_norms_have_the_values_and_gradients_of_torchs():
    x, y, w = numbers(6, 10, dtype=torch.float64), numbers(6, 10, seed=1, dtype=torch.float64), numbers(10).double()

    def wanted(x, w):
        return F.rms_norm(x, (10,), w + 1, 1e-5)

    assert_same(gradients(lambda x, w: rms_norm.rms_norm(x, w, 1e-5, offset=1.0), x, w), gradients(wanted, x, w))
    assert_same(
        gradients(lambda x, y, w: rms_norm.add_rms_norm(x, y, w, 1e-5, offset=1.0), x, y, w),
        gradients(lambda x, y, w: (x + y, wanted(x + y, w)), x, y, w),
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", "swiglu_clamped", *LIMITED])
def test_gates_have_the_values_and_gradients_of_the_fast_ones(kind):
    x = numbers(7, 12, dtype=torch.float64)
    assert_same(
        gradients(lambda x: activation.gated_activation(x, kind), x),
        gradients(lambda x: gated_activation_inference(x, kind), x),
    )
    if kind in ("silu", "gelu_tanh", "relu2"):
        mine = gradients(lambda x: activation.ungated_activation(x, kind), x)
        assert_same(mine, gradients(lambda x: apply_activation(x, None, kind), x))


@pytest.mark.parametrize("name", ["silu", "sigmoid", "softplus", "normalize_heads"])
def test_operations_of_recurrent_layers_have_the_values_and_gradients_of_the_fast_ones(name):
    function, x = getattr(recurrent_ops, name), numbers(7, 12, dtype=torch.float64) * 8
    mine, theirs = (gradients(partial(function, numerics=each), x) for each in (BATCH_INVARIANT, FAST))
    assert_same(mine, theirs)


def test_a_rotation_is_the_fast_one_up_to_rounding():
    spec = RopeSpec(theta=100.0)
    rotation = rope.compute_cos_sin(spec, 8, 32, torch.arange(5), torch.float64, numerics=FAST)
    x = numbers(5, 3, 10, dtype=torch.float64)
    assert_same(
        gradients(lambda x: qk_norm_rope.apply_rope(x, rotation), x),
        gradients(lambda x: rope.apply_rotary(x, rotation, numerics=FAST), x),
    )


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_router_has_the_values_and_gradients_of_torchs(kind):
    logits = numbers(6, 9, dtype=torch.float64)

    def mine(x):
        scores = topk_router.compute_scores(x, kind)
        return topk_router.compute_weights(
            scores, topk_router.stable_topk(scores, 3), normalise=True, scale=2.0, dtype=x.dtype
        )

    def theirs(x):
        scores = x.softmax(-1) if kind == "softmax" else x.sigmoid()
        top = scores.topk(3, -1).values
        return top / top.sum(-1, keepdim=True) * 2.0

    assert_same(gradients(mine, logits), gradients(theirs, logits))
    ties = torch.zeros(2, 5)
    assert topk_router.stable_topk(ties, 2).tolist() == [[0, 1], [0, 1]]


@needs_triton
def test_the_device_code_computes_what_torch_does():
    x, y, w = numbers(5, 48), numbers(5, 48, seed=1), numbers(48, seed=2)
    plain = rms_norm._forward(x, y, w, 1e-6, 1.0)
    device = rms_norm._launch(*there(x, y, w), 1e-6, 1.0)
    for one, other in zip(device, plain, strict=True):
        assert torch.allclose(one.cpu(), other, atol=1e-5)
    whole, scales = there(plain[0], w)
    assert torch.equal(rms_norm._launch(whole, None, scales, 1e-6, 1.0)[1], device[1]), (
        "of a sum as of one that was made"
    )
    logits = numbers(6, 9)
    scores = topk_router.compute_scores(logits, "softmax")
    chosen = topk_router.stable_topk(scores, 3)
    wanted = topk_router.compute_weights(scores, chosen, normalise=True, scale=2.0, dtype=torch.float32)
    how = (3, True, 2.0, torch.float32)
    logits, chosen, wanted = there(logits, chosen, wanted)
    weights, experts = topk_router._launch(logits, None, how)
    assert torch.equal(experts, chosen) and torch.allclose(weights, wanted, atol=1e-6)
    again, reported = topk_router._launch(logits, chosen.flip(-1), how)
    assert torch.equal(reported, chosen.flip(-1)) and torch.allclose(again, weights.flip(-1), atol=1e-6)


@needs_triton
@pytest.mark.parametrize(("tokens", "chosen", "groups"), [(1, 2, 5), (7, 3, 4), (40, 4, 16)])
def test_rows_sorted_on_the_device_are_those_of_a_sort(tokens, chosen, groups):
    given = torch.rand(tokens, groups, generator=torch.Generator().manual_seed(0)).topk(chosen, -1).indices
    mine, wanted = expert_sort.launch_sort(given.to(DEVICE), groups), sort_rows_by_group(given, groups)
    for name in ("order_R", "place_R", "group_R", "ends_E"):
        assert torch.equal(getattr(mine, name).cpu(), getattr(wanted, name)), name
    assert mine.per_token == wanted.per_token


@needs_triton
def test_the_gradient_of_device_routing_is_torchs():
    logits = numbers(6, 9)
    how = {"normalise": True, "scale": 2.0, "dtype": torch.float32}

    def plain(x):
        scores = topk_router.compute_scores(x, "softmax")
        return topk_router.compute_weights(scores, topk_router.stable_topk(scores, 3), **how)

    mine = gradients(lambda x: topk_router.route_topk(x, 3, **how)[0], *there(logits))
    for one, other in zip(mine, gradients(plain, logits), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("normed", [True, False])
def test_device_heads_are_those_of_the_plain_steps(normed):
    shape = QKVShape(heads=3, kv_heads=1, head_dim=8, eps=1e-6, offset=1.0)
    table = rope.compute_cos_sin(RopeSpec(theta=100.0), 8, 32, torch.arange(32), torch.float32, numerics=FAST)
    at = torch.tensor([3, 1, 4, 1])
    weights = (numbers(8, seed=3), numbers(8, seed=4)) if normed else (None, None)

    def plain(qkv):
        q, k, v = qkv.view(4, 5, 8).split((3, 1, 1), 1)
        if normed:
            q, k = (rms_norm.rms_norm(x, w, 1e-6, offset=1.0) for x, w in zip((q, k), weights, strict=True))
        return qk_norm_rope.apply_rope(q, table[at]), qk_norm_rope.apply_rope(k, table[at]), v.clone()

    qkv = numbers(4, 40)
    given = there(table, at, *weights)
    mine = gradients(lambda x: qk_norm_rope.qk_norm_rope(x, *given, shape), *there(qkv))
    for one, other in zip(mine, gradients(plain, qkv), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
