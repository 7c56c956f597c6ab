"""Kernels with a gradient, against torch autograd in float64 of the formula each stands for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.kernels import interpreter  # noqa: F401  loops over numbers read from memory
from tests.kernels.device import CARD, DEVICE, DTYPES, ROUNDING, apart, needs_triton, random

from miles.kernels.activation_kinds import limited_swiglu
from miles.kernels.attention.gather_rows import RowGather, sum_copies
from miles.kernels.attention.varlen import VarlenAttentionBackend
from miles.kernels.fused import activation as activation_module
from miles.kernels.fused import rms_norm as norm
from miles.kernels.fused.activation import apply_activation, gated_activation_training
from miles.kernels.fused.adamw import AdamwParams, fused_adamw
from miles.kernels.fused.fused_logprob import LogitTransform, compute_logit_grads, reduce_logits
from miles.kernels.fused.grad_sum import launch_add_grad
from miles.kernels.fused.qk_norm_rope import QKVShape
from miles.kernels.fused.qk_norm_rope_autograd import qk_norm_rope_training
from miles.kernels.fused.rms_norm_autograd import add_rms_norm_training, rms_norm_training
from miles.kernels.moe.grouped_gemm import sort_rows_by_group
from miles.kernels.moe.token_permutation import CombineFunction, sum_choices
from miles.kernels.numerics import FAST
from miles.models.accounting.known_models import load_known_models
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.layers import attention as attention_module
from miles.models.layers.rope import apply_rotary

LIMITED = [limited_swiglu(2.5), limited_swiglu(2.5, behind=True)]

ROWS = [(1, 8), (3, 24), (70, 64), (5, 2560)] + ([(8192, 2560), (16384, 1024), (333, 5120)] if CARD else [])


def doubled(*tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def near(found, wanted, dtype):
    """A few roundings apart, each gradient on its own."""
    return all(apart(a, b) < 2 * ROUNDING[dtype] for a, b in zip(found, wanted, strict=True))


def plain_norm(x, weight, eps, offset):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + offset)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_and_its_gradients_are_the_formulas(poisoned, shape, dtype, offset):
    x, weight, grad = 3 * random(*shape, dtype=dtype), random(shape[1], dtype=dtype), random(*shape, dtype=dtype)
    x.requires_grad_(), weight.requires_grad_()
    out = rms_norm_training(x, weight, 1e-6, offset=offset)
    wide = doubled(x, weight)
    wanted = plain_norm(*wide, 1e-6, offset)
    assert out.dtype == dtype and apart(out, wanted) < ROUNDING[dtype]
    assert near(torch.autograd.grad(out, (x, weight), grad), torch.autograd.grad(wanted, wide, grad.double()), dtype)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("used", ["both", "stream", "norm"])
def test_a_sum_and_its_norm_take_both_gradients(poisoned, shape, dtype, used):
    x, delta, g1, g2 = (random(*shape, dtype=dtype) for _ in range(4))
    weight = random(shape[1], dtype=dtype).requires_grad_()
    x.requires_grad_(), delta.requires_grad_()
    total, out = add_rms_norm_training(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    a, w = doubled(total, weight)
    wanted = plain_norm(a, w, 1e-5, 0.0)
    assert apart(out, wanted) < ROUNDING[dtype]
    pairs = [(total, a, g1)] if used != "norm" else []
    pairs += [(out, wanted, g2)] if used != "stream" else []
    mine, theirs = (sum((p[i] * p[2].to(p[i].dtype)).sum() for p in pairs) for i in (0, 1))
    found = torch.autograd.grad(mine, (x, delta, weight), allow_unused=True)
    exact, of_weight = torch.autograd.grad(theirs, (a, w), allow_unused=True)
    assert torch.equal(found[0], found[1]) and apart(found[0], exact) < 2 * ROUNDING[dtype]
    assert (of_weight is None) == (found[2] is None)
    assert of_weight is None or apart(found[2], of_weight) < 2 * ROUNDING[dtype]


@needs_triton
def test_rows_may_lie_apart_have_more_dimensions_and_be_none(poisoned):
    wide, weight = random(6, 3, 48).requires_grad_(), random(16).requires_grad_()
    part = wide[:, 1:, 16:32]
    out = rms_norm_training(part, weight, 1e-6)
    grads = torch.autograd.grad(out.square().sum(), (wide, weight))
    a, w = doubled(wide, weight)
    wanted = torch.autograd.grad(plain_norm(a[:, 1:, 16:32], w, 1e-6, 0.0).square().sum(), (a, w))
    assert near(grads, wanted, torch.float32)
    none = rms_norm_training(wide[:0, 0, :16], weight, 1e-6)
    assert none.shape == (0, 16) and not torch.autograd.grad(none.sum(), weight)[0].any()


@needs_triton
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2", "swiglu_clamped", *LIMITED])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 24), (2, 1100)] + ([(16384, 3072), (8192, 9728)] if CARD else []))
def test_a_gate_and_its_gradients_are_the_formulas(poisoned, kind, interleaved, dtype, shape):
    rows, size = shape
    inner = (4 * random(rows, 2 * size, dtype=dtype)).requires_grad_()
    grad = random(rows, size, dtype=dtype)
    out = gated_activation_training(inner, kind, interleaved=interleaved)
    (wide,) = doubled(inner)
    halves = wide.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else wide.chunk(2, -1)
    wanted = apply_activation(*halves, kind)
    assert out.shape == shape and apart(out, wanted) < 2 * ROUNDING[dtype]
    assert near(torch.autograd.grad(out, inner, grad), torch.autograd.grad(wanted, wide, grad.double()), dtype)


@needs_triton
def test_gates_of_no_rows_and_of_more_dimensions(poisoned):
    none = random(0, 8).requires_grad_()
    gated_activation_training(none, "silu").sum().backward()
    inner = random(3, 2, 8)
    assert torch.equal(
        gated_activation_training(inner, "silu").flatten(0, 1), gated_activation_training(inner.flatten(0, 1), "silu")
    )


# -- heads ------------------------------------------------------------------------------------

HEADS = [(1, 1, 8, 8), (4, 2, 16, 16), (3, 1, 24, 8), (2, 2, 32, 0)]
HEADS += [(16, 8, 128, 128), (32, 8, 128, 128), (14, 2, 64, 64), (32, 4, 80, 40)] if CARD else []


def rotations(tokens, turned, interleaved, dtype):
    angles = random(tokens, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return torch.stack((cos, sin), 1).to(dtype)


def plain_heads(qkv, rotation, q_weight, k_weight, shape):
    q, k, v = qkv.unflatten(-1, (-1, shape.head_dim)).split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
    if q_weight is not None:
        q, k = (plain_norm(x, w, shape.eps, shape.offset) for x, w in ((q, q_weight), (k, k_weight)))
    if rotation is not None:
        q, k = (apply_rotary(x, rotation.to(x.dtype), interleaved=shape.interleaved, numerics=FAST) for x in (q, k))
    return q, k, v


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("case", "variant"), [*((case, "halves") for case in HEADS), (HEADS[2], "interleaved"), (HEADS[1], "offset")]
)
@pytest.mark.parametrize("norm", [False, True])
def test_heads_and_their_gradients_are_the_chains(poisoned, dtype, case, norm, variant):
    heads, kv_heads, dim, turned = case
    tokens = 700 if CARD else 3
    shape = QKVShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        interleaved=variant == "interleaved",
        offset=1.0 if variant == "offset" else 0.0,
    )
    qkv = (2 * random(tokens, shape.rows * dim, dtype=dtype)).requires_grad_()
    weights = [random(dim, dtype=dtype).requires_grad_() for _ in range(2)] if norm else []
    rotation = rotations(tokens, turned, shape.interleaved, dtype) if turned else None
    outs = qk_norm_rope_training(qkv, rotation, *(weights or (None, None)), shape)
    wide = doubled(qkv, *weights)
    wanted = plain_heads(wide[0], rotation, *(wide[1:] or (None, None)), shape)
    assert near(outs, wanted, dtype)
    grads = [random(*x.shape, dtype=dtype) for x in outs]
    found = torch.autograd.grad(outs, (qkv, *weights), grads)
    assert near(found, torch.autograd.grad(wanted, wide, [g.double() for g in grads]), dtype)


@needs_triton
def test_gradients_of_heads_may_lie_apart(poisoned):
    shape = QKVShape(heads=4, kv_heads=2, head_dim=8)
    qkv = random(6, shape.rows * 8).requires_grad_()
    outs = qk_norm_rope_training(qkv, None, None, None, shape)
    grads = [random(x.shape[1], x.shape[0], 8).transpose(0, 1) for x in outs]
    (found,) = torch.autograd.grad(outs, qkv, grads)
    assert torch.equal(found, torch.cat([g.flatten(1) for g in grads], 1))


# -- the head ---------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("columns", [1, 37, 5000] + ([151936] if CARD else []))
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 4.0)])
def test_log_probs_and_entropies_follow_from_the_sums_and_their_gradients_from_the_slopes(
    poisoned, columns, padding, temperature, softcap
):
    rows = 6
    logits = 6 * random(rows, columns + padding)
    logits[:, columns:] = 1e6
    target = torch.randint(0, columns, (rows,), device=DEVICE)
    target[0] = -1
    scale = LogitTransform(temperature=temperature, softcap=softcap, size=columns)
    sums = reduce_logits(logits, target, scale)
    (wide,) = doubled(logits[:, :columns])
    bounded = wide if softcap is None else softcap * torch.tanh(wide / softcap)
    logp = torch.log_softmax(bounded / temperature, -1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(1, target.clamp(min=0)[:, None])[:, 0]
    log = sums.total_C.log()
    assert (
        torch.allclose((sums.target_logit_C - log)[1:].double(), chosen[1:], atol=2e-5) and sums.target_logit_C[0] == 0
    )
    assert torch.allclose((log - sums.mean_C / sums.total_C).double(), entropy, atol=2e-5)
    for used in ((True, False), (False, True), (True, True)):
        grads = [random(rows) if there else None for there in used]
        lse = sums.max_C + log
        found = compute_logit_grads(logits, target, lse, entropy.float(), *grads, scale, torch.float32)
        # A target elsewhere has its own logit there, and the sum it is divided by has these.
        said = torch.where(target >= 0, chosen, -(bounded / temperature).logsumexp(-1))
        loss = sum((g.double() * x).sum() for g, x in zip(grads, (said, entropy), strict=True) if g is not None)
        (exact,) = torch.autograd.grad(loss, wide, retain_graph=True)
        assert torch.allclose(found[:, :columns].double(), exact, atol=2e-5) and not found[:, columns:].any()


@needs_triton
def test_ranks_of_padding_alone_and_no_rows_are_no_trouble(poisoned):
    scale = LogitTransform(temperature=1.0, softcap=None, size=0)
    sums = reduce_logits(random(2, 8), torch.full((2,), -1, device=DEVICE), scale)
    assert not sums.total_C.any() and not sums.mean_C.any() and (sums.max_C <= -1e29).all()
    assert reduce_logits(random(0, 8), torch.zeros(0, dtype=torch.int64, device=DEVICE), scale).total_C.shape == (0,)


# -- all of them ------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("gated", [False, True])
def test_a_decoder_learns_the_same_with_them(monkeypatch, poisoned, gated):
    spec = spec_from_config(load_known_models()["Qwen3-0.6B"])
    attention = replace(spec.layers[0].mixer, num_heads=4, num_kv_heads=2, head_dim=16, head_gate=gated)
    activation = limited_swiglu(0.5, behind=True) if gated else "silu"
    layer = replace(spec.layers[0], mixer=attention, ffn=replace(spec.layers[0].ffn, size=24, activation=activation))
    spec = replace(spec, layers=(layer, layer), hidden_size=32, vocab_size=50, max_positions=64)
    decoder = Decoder(spec, device=DEVICE, dtype=torch.float32)
    for number, parameter in enumerate(decoder.parameters()):
        parameter.data.copy_(0.3 * random(*parameter.shape, seed=number))
    tokens, positions = torch.arange(7, device=DEVICE) % 50, torch.tensor([0, 1, 2, 0, 1, 2, 3], device=DEVICE)
    found = []
    for fast in (False, True):
        for module in (norm, activation_module, attention_module):
            monkeypatch.setattr(module, "use_triton_training", lambda x, fast=fast: fast)
        hidden = decoder(tokens, positions, VarlenAttentionBackend([3, 4], DEVICE))
        grads = torch.autograd.grad((hidden * random(7, 32, seed=9)).sum(), list(decoder.parameters()))
        found.append((hidden, *grads))
    for plain, fused in zip(*found, strict=True):
        assert apart(fused, plain) < 1e-5


# -- gathered rows ----------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3,), (2, 40), (8, 130)])
def test_the_gradient_of_a_gathered_row_is_the_sum_over_its_copies(poisoned, shape, dtype):
    taken = np.array([2, 0, 2, 2, 4, 0, 2, 1], np.int64)
    gather = RowGather(taken, 5, DEVICE, real_P=np.arange(8) != 6)
    grad = random(8, *shape, dtype=dtype)
    found = sum_copies(grad, gather)
    wanted = torch.zeros(5, *shape, dtype=torch.float64, device=DEVICE)
    for copy, row in enumerate(taken):
        if copy != 6:
            wanted[row] += grad[copy].double()
    assert found.dtype == dtype and apart(found, wanted) < ROUNDING[dtype]
    assert not found[3].any()
    assert torch.equal(found[4], grad[4]) and torch.equal(sum_copies(grad, gather), found)


# -- gradient sums ----------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("size", [1, 4096, 9001])
def test_gradients_are_added_with_the_bits_of_torch(poisoned, size):
    grads = [random(size, dtype=DTYPES[1]) for _ in range(3)]
    total, wanted = launch_add_grad(None, grads[0]), grads[0].float()
    assert torch.equal(total, wanted)
    for grad in grads[1:]:
        assert launch_add_grad(total, grad) is total
        assert torch.equal(total, wanted.add_(grad))


# -- optimizer --------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("size", "decay", "scale"), [(1, 0.1, None), (4096, 0.0, 0.25), (9001, 0.1, 0.5)])
def test_the_fused_adamw_step_is_that_of_torch_in_float64(dtype, size, decay, scale, poisoned):
    master = random(size)
    weight, first, second = master.to(dtype), torch.zeros_like(master), torch.zeros_like(master)
    reference = master.double().requires_grad_()
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.98), eps=1e-8, weight_decay=decay)
    factor = None if scale is None else torch.tensor(scale, device=DEVICE)
    for step in range(1, 5):
        grad = random(size)
        kept = grad.clone()
        params = AdamwParams(lr=1e-2, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=decay, step=step)
        fused_adamw(weight, master, grad, (first, second), params, scale=factor)
        reference.grad = grad.double() * (scale or 1.0)
        optimizer.step()
        assert torch.equal(grad, kept)
    state = optimizer.state[reference]
    assert apart(master, reference.detach()) < 1e-6
    assert apart(first, state["exp_avg"]) < 1e-6 and apart(second, state["exp_avg_sq"]) < 1e-6
    assert torch.equal(weight, master.to(dtype))


# -- token permutation ------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "choices", "size"), [(1, 1, 8), (5, 3, 40), (7, 2, 2100)])
def test_rows_of_experts_are_combined_as_the_gathers_do(poisoned, tokens, choices, size, dtype):
    rows = sort_rows_by_group(torch.randint(0, 4, (tokens, choices), device=DEVICE), 4)
    x = random(tokens * choices, size, dtype=dtype).requires_grad_()
    weights = random(tokens, choices, dtype=dtype).requires_grad_()
    out = CombineFunction.apply(x, weights, rows.order_R, rows.place_R)
    wide = doubled(x, weights)
    wanted = (wide[0][rows.place_R].unflatten(0, (tokens, choices)) * wide[1].unsqueeze(-1)).sum(1)
    grad = random(tokens, size, dtype=dtype)
    assert apart(out, wanted) < ROUNDING[dtype]
    assert near(torch.autograd.grad(out, (x, weights), grad), torch.autograd.grad(wanted, wide, grad.double()), dtype)
    summed = sum_choices(x.detach(), None, rows.place_R, choices)
    assert apart(summed, wide[0][rows.place_R].unflatten(0, (tokens, choices)).sum(1)) < ROUNDING[dtype]
