"""Kernels of vision blocks in Triton's interpreter, against the chain of torch operations that they replace."""

import pytest
import torch
from tests.kernels.device import DTYPES, ROUNDING, apart, needs_triton, random
from torch.nn import functional as F

from miles.kernels.fused import layer_norm, vision_rope
from miles.kernels.fused.layer_norm import add_layer_norm
from miles.kernels.fused.vision_rope import rotate_queries_keys
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.layers.rope import apply_rotary

ROPES = {"split": (False, False), "interleaved": (True, False), "halves": (False, True)}


def rotate(x, cos_sin, interleaved, halves):
    """Queries or keys, as a tower without fused kernels rotates them."""
    wide = x.to(cos_sin.dtype)
    if halves:
        wide = wide.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
    return apply_rotary(wide, cos_sin, interleaved=interleaved, numerics=FAST).to(x.dtype)


def rotation(patches, dim, interleaved):
    angles = random(patches, dim // 2)
    if interleaved:
        sines = torch.stack((-angles.sin(), angles.sin()), -1).flatten(1)
        return torch.stack((angles.cos().repeat_interleave(2, 1), sines), 1)
    return torch.stack((angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), 1)), 1)


@needs_triton
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("patches", "heads", "dim"), [(1, 1, 8), (5, 3, 72), (7, 2, 80), (3, 16, 64)])
def test_queries_and_keys_are_rotated_as_one_by_one(poisoned, kind, dtype, patches, heads, dim):
    qkv, cos_sin = random(patches, 3, heads, dim, dtype=dtype), rotation(patches, dim, kind == "interleaved")
    interleaved, halves = ROPES[kind]
    out = rotate_queries_keys(qkv, cos_sin, interleaved=interleaved, halves=halves)
    for found, source in zip(out, (qkv[:, 0], qkv[:, 1]), strict=True):
        wanted = rotate(source, cos_sin, interleaved, halves)
        assert found.dtype == dtype and found.shape == wanted.shape
        assert apart(found, wanted) < (1e-6 if dtype == torch.float32 else 2e-4)


@needs_triton
@pytest.mark.parametrize("kind", ROPES)
def test_the_gradient_of_a_rotation_is_autograds(poisoned, kind):
    interleaved, halves = ROPES[kind]
    cos_sin, grads = rotation(6, 24, interleaved), (random(6, 2, 24), random(6, 2, 24))
    found, wanted = (random(6, 3, 2, 24, seed=3).requires_grad_() for _ in range(2))
    out = rotate_queries_keys(found, cos_sin, interleaved=interleaved, halves=halves)
    (out[0] * grads[0] + out[1] * grads[1] + found[:, 2] * 3).sum().backward()
    out = [rotate(wanted[:, part], cos_sin, interleaved, halves) for part in (0, 1)]
    (out[0] * grads[0] + out[1] * grads[1] + wanted[:, 2] * 3).sum().backward()
    assert found.grad is not None and wanted.grad is not None
    assert apart(found.grad, wanted.grad) < 1e-6


@needs_triton
def test_rows_of_a_projection_may_be_apart(poisoned):
    wide = random(4, 4, 2, 8)
    cos_sin = rotation(4, 8, False)
    found = rotate_queries_keys(wide[:, :3], cos_sin, interleaved=False, halves=False)
    assert apart(found[1], rotate(wide[:, 1], cos_sin, False, False)) < 1e-6


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 24), (5, 1152), (2, 3, 40)])
def test_a_sum_is_rounded_and_its_layer_norm_is_torchs(monkeypatch, poisoned, dtype, shape):
    monkeypatch.setattr(layer_norm, "use_triton_inference", lambda x: True)
    x, delta = 3 * random(*shape, dtype=dtype) + 2, random(*shape, dtype=dtype)
    weight, bias = random(shape[-1], dtype=dtype), random(shape[-1], dtype=dtype)
    total, out = add_layer_norm(x, delta, weight, bias, 1e-6, numerics=FAST)
    assert torch.equal(total, x + delta)
    wanted = F.layer_norm(total.double(), weight.shape, weight.double(), bias.double(), 1e-6)
    assert out.dtype == dtype and apart(out, wanted) < ROUNDING[dtype] / 2


def test_exact_numerics_and_training_use_torchs_layer_norm(monkeypatch):
    x, delta, weight, bias = random(4, 16).requires_grad_(), random(4, 16), random(16), random(16)
    wanted = F.layer_norm(x + delta, (16,), weight, bias, 1e-6)
    assert torch.equal(add_layer_norm(x, delta, weight, bias, 1e-6, numerics=FAST)[1], wanted)
    monkeypatch.setattr(layer_norm, "use_triton_inference", lambda x: True)
    out = add_layer_norm(x, delta, weight, bias, 1e-6, numerics=BATCH_INVARIANT)[1]
    assert torch.equal(out, wanted) and out.requires_grad


def test_the_fused_rotation_is_for_gpus():
    assert not vision_rope.can_rotate_fused(torch.zeros(1, 3, 1, 8))
