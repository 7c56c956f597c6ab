"""Attention of long sequences among short ones, against each sequence by itself in float64."""

import pytest
import torch
from tests.kernels.device import CARD, DEVICE
from torch.nn import functional as F

from miles.kernels.attention import sdpa_dense
from miles.kernels.attention.sdpa_dense import dense_sdpa_attention, has_dense_batch


def attended(q, k, v, scale):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def each(q, k, v, lengths, scale):
    return torch.cat([attended(*x, scale) for x in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)])


@pytest.mark.parametrize("lengths", [[8], [3, 9, 2, 2, 8, 1], [9, 8], [2, 3], [4, 4, 1, 3, 3, 3, 2]])
def test_long_and_short_sequences_are_all_where_they_were(monkeypatch, lengths):
    monkeypatch.setattr(sdpa_dense, "MIN_BATCH_TOKENS", 8)
    monkeypatch.setattr(sdpa_dense, "MIN_SEQUENCE_TOKENS", 3)
    monkeypatch.setattr(sdpa_dense, "_BACKENDS", [sdpa_dense.SDPBackend.MATH])
    torch.manual_seed(0)
    total, asked = sum(lengths), []
    q, k, v = (torch.randn(total, heads, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))

    def packed(at, some):
        asked.append(some)
        return each(q[at], k[at], v[at], some, 0.3)

    out = dense_sdpa_attention(q, k, v, lengths, 0.3, packed)
    wanted = each(q, k, v, lengths, 0.3)
    assert torch.allclose(out, wanted, atol=1e-12)
    assert [n for some in asked for n in some] == [n for n in lengths if n < 3 or n * lengths.count(n) < 8]
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)]
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in zip(*grads, strict=True))
    assert has_dense_batch(lengths, 64) == (len(lengths) > sum(map(len, asked))) and not has_dense_batch(lengths, 256)


@pytest.mark.skipif(not CARD, reason="needs an accelerator")
def test_on_the_card_long_sequences_are_those_of_float32():
    from miles.kernels.attention.params import AttentionInputs, AttentionParams
    from miles.kernels.attention.varlen import VarlenAttentionBackend

    torch.manual_seed(0)
    lengths = [300, 2500, 2500, 40, 60, 4096]
    q, k, v = (torch.randn(sum(lengths), h, 128, device=DEVICE, dtype=torch.bfloat16) for h in (16, 8, 8))
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    narrow = [x.requires_grad_() for x in (q, k, v)]
    wanted = each(*wide, lengths, 128**-0.5)
    found = VarlenAttentionBackend(lengths, DEVICE)(0, AttentionInputs(*narrow, AttentionParams(scale=128**-0.5)))
    pull = torch.randn_like(wanted)
    (wanted * pull).sum().backward()
    (found.float() * pull).sum().backward()
    assert (found.float() - wanted).abs().max() < 0.03
    for a, b in zip(narrow, wide, strict=True):
        assert (a.grad.float() - b.grad).norm() < 0.02 * b.grad.norm()
