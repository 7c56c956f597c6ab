"""Multi-step attention against scaled_dot_product_attention over the keys that each query sees, one query at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.numerics import FAST
from miles.models.draft import multi_step_attention
from miles.models.draft.multi_step_attention import MultiStepAttention
from miles.models.layers.attention_backend import AttentionInputs, AttentionParams
from miles.train.prefix_sharing import build_attention

LENGTHS = (7, 1, 12, 5, 0, 11, 3)
HEADS, GROUPS, CHANNELS, STEPS = 4, 2, 8, 3


def attend(inputs: list[AttentionInputs]) -> Tensor:
    attention = MultiStepAttention(build_attention(LENGTHS, (), torch.device("cpu"), numerics=FAST), LENGTHS)
    return torch.cat([attention(0, each) for each in inputs])


def attend_one_by_one(inputs: list[AttentionInputs]) -> Tensor:
    out = []
    for step in range(STEPS):
        start = 0
        for length in LENGTHS:
            for row in range(start, start + length):
                seen = [(inputs[0].k_TGd[start : row + 1], inputs[0].v_TGe[start : row + 1])]
                seen += [(each.k_TGd[row : row + 1], each.v_TGe[row : row + 1]) for each in inputs[1 : step + 1]]
                k, v = (torch.cat(part).transpose(0, 1) for part in zip(*seen, strict=True))
                q = inputs[step].q_THd[row].unsqueeze(1)
                attended = F.scaled_dot_product_attention(q, k, v, scale=inputs[0].params.scale, enable_gqa=True)
                out.append(attended.squeeze(1))
            start += length
    return torch.stack(out)


@pytest.mark.parametrize("scores", [1 << 26, 600, 100])  # all at once, some together, long ones in parts
def test_every_query_sees_its_past_and_its_own_steps(scores: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(multi_step_attention, "_CHUNK_SCORES", scores)
    torch.manual_seed(0)
    shapes = [(sum(LENGTHS), heads, CHANNELS) for heads in (HEADS, GROUPS, GROUPS)]
    leaves = [[torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes] for _ in range(STEPS)]
    inputs = [AttentionInputs(*each, AttentionParams(scale=CHANNELS**-0.5)) for each in leaves]
    flat = [leaf for each in leaves for leaf in each]
    found, expected = attend(inputs), attend_one_by_one(inputs)
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    grads = (torch.autograd.grad((each * weight).sum(), flat) for each in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
