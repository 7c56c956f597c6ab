"""Attention with a relative position bias (Inkling), whose keys and values pass a short convolution.

Shapes: T tokens, D hidden, H query heads, G key-value heads, d head_dim, r profiles over E distances.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.attention.params import RelativeAttentionBackend, RelativeBias
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.residual_conv import ResidualConv
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, RelativeAttentionSpec
from miles.precision.kv_cache import round_kv
from miles.precision.quantized_tensor import QuantizedActivation


class RelativeAttention(nn.Module):
    """Project, convolve keys and values, normalize queries and keys, attend with a position bias, project back."""

    def __init__(
        self,
        spec: RelativeAttentionSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        width, queries = model.hidden_size, spec.num_heads * spec.head_dim
        # Normalized queries and keys have a product of head_dim, not of its root.
        self.params = AttentionParams(scale=1.0 / spec.head_dim, window=spec.window)
        self.qkv = Linear(width, queries + spec.kv_channels, bias=False, **factory)
        self.relative = Linear(width, spec.num_heads * spec.rank, bias=False, **factory)
        self.kv_conv = ResidualConv(spec.kv_channels, spec.kernel, layer, **factory)
        self.q_norm = RMSNorm(spec.head_dim, model.norm_eps, offset=model.norm_offset, **factory)
        self.k_norm = RMSNorm(spec.head_dim, model.norm_eps, offset=model.norm_offset, **factory)
        self.profiles = nn.Parameter(torch.empty(spec.rank, spec.extent, device=device, dtype=dtype))
        self.output = Linear(queries, width, bias=False, **factory)

    def forward(
        self, x_TD: Tensor | QuantizedActivation, positions: Positions, attn_backend: AttentionBackend
    ) -> Tensor:
        assert isinstance(x_TD, Tensor), "no norm quantizes the input of such a layer"
        assert isinstance(attn_backend, RelativeAttentionBackend), "the attention backend has no position bias"
        spec = self.spec
        q_TX, kv_TX = self.qkv(x_TD).split((spec.num_heads * spec.head_dim, spec.kv_channels), -1)
        k_TGd, v_TGd = self.kv_conv(kv_TX, attn_backend).unflatten(-1, (2, -1, spec.head_dim)).unbind(1)
        q_THd, k_TGd = self.q_norm(q_TX.unflatten(-1, (-1, spec.head_dim))), self.k_norm(k_TGd)
        weights_THr = self.relative(x_TD).unflatten(-1, (-1, spec.rank))
        if spec.temperature is not None:
            factor_T11 = positions.log_temperature(*spec.temperature)
            q_THd, weights_THr = ((x * factor_T11).to(x.dtype) for x in (q_THd, weights_THr))
        if self.numerics.fp8_kv_cache:
            k_TGd, v_TGd = round_kv(k_TGd), round_kv(v_TGd)
        inputs = AttentionInputs(q_THd, k_TGd, v_TGd, self.params)
        bias = RelativeBias(weights_THr, self.profiles)
        return self.output(attn_backend.attend_relative(self.layer, inputs, bias).flatten(1))
