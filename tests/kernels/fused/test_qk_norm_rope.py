"""From projection to attention's inputs: device code against the chain of torch operations a trainer runs."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE, DTYPES, apart, needs_triton, random

from miles.kernels.fused import qk_norm_rope as module
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, qk_norm_rope_write_kv
from miles.kernels.numerics import FAST
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import apply_rotary, compute_cos_sin
from miles.models.spec import RopeSpec

# heads, kv_heads, head_dim, rotated channels
SHAPES = [(1, 1, 8, 8), (4, 2, 16, 16), (3, 1, 24, 8), (6, 2, 12, 12), (2, 2, 32, 0)]
if CARD:
    SHAPES += [
        (16, 8, 128, 128),
        (32, 8, 128, 128),
        (14, 2, 64, 64),
        (64, 8, 64, 64),
        (16, 16, 256, 64),
        (32, 4, 80, 40),
    ]
TOKENS = (1, 5) + ((256, 8192) if CARD else ())


def run(qkv, given, **cache):
    """The kernel or its reference, on parameters and other arguments in one dictionary."""
    given = {"interleaved": False, "offset": 0.0} | given
    rest = {name: given.pop(name) for name in ("slots_T", "gated") if name in given}
    return qk_norm_rope_write_kv(qkv, QKNormRopeParams(**given), **rest, **cache, numerics=FAST)


def case(tokens, shape, dtype, *, norm, gated=False, positions=50):
    heads, kv_heads, dim, turned = shape
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "eps": 1e-6, "gated": gated}
    qkv = random(tokens, (heads * (1 + gated) + 2 * kv_heads) * dim, dtype=dtype)
    weights = (random(dim, dtype=dtype), random(dim, dtype=dtype)) if norm else (None, None)
    given |= dict(zip(("q_weight_d", "k_weight_d"), weights, strict=True))
    angles = random(positions, turned // 2)
    table = torch.stack((torch.cat((angles.cos(),) * 2, -1), torch.cat((-angles.sin(), angles.sin()), -1)), 1)
    given["rotation"] = table.to(dtype).contiguous() if turned else None
    given["positions_T"] = torch.randint(0, positions, (tokens,), device=DEVICE)
    slots = torch.randperm(tokens + 7)[:tokens]
    slots[torch.rand(tokens) < 0.25] = -1
    given["slots_T"] = slots.to(DEVICE)
    return qkv, given


def both(monkeypatch, qkv, given):
    """Queries, keys and values of the chain, then of the kernel; slots nobody writes keep what they held."""
    tokens, shape = len(qkv), (len(qkv) + 7, given["kv_heads"], given["head_dim"])
    results = []
    held = [random(*shape, dtype=qkv.dtype) for _ in range(2)]
    for fast in (False, True):
        monkeypatch.setattr(module, "use_triton_inference", lambda x, fast=fast: fast)
        keys, values = (tensor.clone() for tensor in held)
        out = run(qkv.clone(), given, key_slots=keys, value_slots=values)
        assert out.shape == (tokens, given["heads"], given["head_dim"])
        results.append((out, keys, values))
    return zip(*results, strict=True)


def equal_to_rounding(wanted, out):
    """In float32 near; else rounded alike step by step, so nearly always the very same number."""
    if out.dtype == torch.float32:
        return apart(out, wanted) < 1e-6
    return apart(out, wanted) < 1e-3 and (out == wanted).double().mean() > 0.97


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("norm", [False, True])
def test_one_pass_is_the_chain(monkeypatch, poisoned, tokens, shape, dtype, norm):
    qkv, given = case(tokens, shape, dtype, norm=norm)
    for wanted, out in both(monkeypatch, qkv, given | {"interleaved": False, "offset": 0.0}):
        assert equal_to_rounding(wanted, out)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("choice", ["interleaved", "offset", "gated", "rows"])
def test_every_variant_is_the_chain(monkeypatch, poisoned, dtype, choice):
    qkv, given = case(6, (4, 2, 16, 8), dtype, norm=True, gated=choice == "gated")
    given |= {"interleaved": choice == "interleaved", "offset": 1.0 if choice == "offset" else 0.0}
    if choice == "rows":
        given |= {"rotation": given["rotation"][:6], "positions_T": None}
    for wanted, out in both(monkeypatch, qkv, given):
        assert equal_to_rounding(wanted, out)


@needs_triton
def test_projections_may_lie_apart_and_slots_in_a_larger_cache(monkeypatch, poisoned):
    monkeypatch.setattr(module, "use_triton_inference", lambda x: True)
    qkv, given = case(5, (2, 1, 8, 8), torch.float32, norm=True)
    given |= {"interleaved": False, "slots_T": torch.arange(5, device=DEVICE)}
    cache = torch.zeros(2, 3, 5, 1, 8, device=DEVICE)
    wide = torch.cat((qkv, qkv), 1)[:, qkv.shape[1] :]
    apart_ = run(wide, given, key_slots=cache[0, 1], value_slots=cache[1, 1])
    again = run(qkv, given, key_slots=cache[0, 2], value_slots=cache[1, 2])
    assert torch.equal(apart_, again) and torch.equal(cache[:, 1], cache[:, 2]) and not cache[:, 0].any()
    assert torch.equal(cache[1, 1], qkv[:, 24:].view(5, 1, 8))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_chain_is_what_a_models_layers_do(interleaved):
    rope, heads, kv_heads, dim = RopeSpec(theta=1e4, dim=8, interleaved=interleaved), 3, 2, 16
    tokens = torch.tensor([0, 7, 3, 30], device=DEVICE)
    table = compute_cos_sin(rope, 8, 40, torch.arange(40, device=DEVICE), torch.float32, numerics=FAST)
    q_norm, k_norm = (
        RMSNorm(dim, 1e-6, offset=1.0, device=DEVICE, dtype=torch.float32, numerics=FAST) for _ in range(2)
    )
    for each in (q_norm, k_norm):
        each.weight.data.copy_(random(dim))
    qkv, slots = random(4, (heads + 2 * kv_heads) * dim), torch.tensor([5, -1, 0, 2], device=DEVICE)
    keys, values = torch.zeros(2, 6, kv_heads, dim, device=DEVICE).unbind(0)
    with torch.no_grad():
        how = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "interleaved": interleaved, "eps": 1e-6}
        how |= {"q_weight_d": q_norm.weight, "k_weight_d": k_norm.weight, "offset": 1.0, "positions_T": tokens}
        q = run(qkv, how | {"rotation": table, "slots_T": slots}, key_slots=keys, value_slots=values)
        parts = qkv.view(4, -1, dim).split((heads, kv_heads, kv_heads), 1)
        wanted_q, wanted_k = (
            apply_rotary(norm(x), table[tokens], interleaved=interleaved, numerics=FAST)
            for norm, x in zip((q_norm, k_norm), parts, strict=False)
        )
    assert apart(q, wanted_q) < 1e-6
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert apart(keys[slot], wanted_k[token]) < 1e-6 and torch.equal(values[slot], parts[2][token])
    assert not keys[[1, 3, 4]].any() and not values[[1, 3, 4]].any()
