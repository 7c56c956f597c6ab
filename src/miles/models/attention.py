"""Grouped-query attention without a memory of its own: whoever remembers keys and values is handed in.

Shapes: T tokens, D hidden, H query heads, G key-value heads, N = H + 2G, d head_dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.models.linear import Linear
from miles.models.norm import RMSNorm
from miles.models.rope import rotate
from miles.models.spec import DecoderSpec


class Attend(Protocol):
    """Who remembers keys and values: a packed batch, or a paged cache. The scale is ``head_dim ** -0.5``."""

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor: ...


class Attention(nn.Module):
    """Project, normalise queries and keys where the family does, rotate, attend, project back."""

    def __init__(self, spec: DecoderSpec, layer: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = spec.head_dim
        self.heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        made = {"device": device, "dtype": dtype}
        width = sum(self.heads) * spec.head_dim
        self.qkv = Linear(spec.hidden_size, width, bias=spec.qkv_bias, **made)
        self.output = Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias, **made)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, device=device, dtype=dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, device=device, dtype=dtype) if spec.qk_norm else None

    def forward(self, x_TD: Tensor, rotation_T2d: Tensor, attend: Attend) -> Tensor:
        num_q, num_k, _ = self.heads
        qkv_TNd = self.qkv(x_TD).unflatten(-1, (-1, self.head_dim))
        qk_TNd, v_TGd = qkv_TNd.split((num_q + num_k, num_k), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            # Queries and keys in one pass: on small models the number of operations is the cost.
            scale_Nd = torch.cat((self.q_norm.weight.expand(num_q, -1), self.k_norm.weight.expand(num_k, -1)))
            qk_TNd = F.rms_norm(qk_TNd, self.q_norm.shape, None, self.q_norm.eps) * scale_Nd
        q_THd, k_TGd = rotate(qk_TNd, rotation_T2d).split((num_q, num_k), dim=1)
        return self.output(attend(self.layer, q_THd, k_TGd, v_TGd).flatten(1))
