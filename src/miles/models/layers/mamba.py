"""Mamba-2 layer: its past is one state matrix per head, not a list of tokens.

Shapes: T tokens, D hidden, H heads, p channels of a head, I = Hp, G groups, n channels of the state, C = I + 2Gn
convolved channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant import recurrent_scan as invariant_scan
from miles.kernels.linear_attention.causal_conv1d import causal_conv1d
from miles.kernels.linear_attention.decode_step import conv_step, gated_group_norm, ssd_step, supports_decode_step
from miles.kernels.linear_attention.mamba2_ssd import mamba2_ssd
from miles.kernels.linear_attention.state_passing import split_mamba2_ssd
from miles.kernels.numerics import Numerics
from miles.kernels.runtime.kv_cache import DecodeState
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.recurrent_ops import silu, softplus, wide_rms_norm
from miles.models.layers.recurrent_scan import find_decode_state, scan_tokens
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, MambaSpec


class Mamba2(nn.Module):
    """Project, convolve, run the SSD scan, gate and normalize the output, project back."""

    def __init__(
        self,
        spec: MambaSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        self.numerics = numerics
        factory = {"device": device, "dtype": dtype}
        layer_factory: dict[str, Any] = {**factory, "numerics": numerics}
        inner, both = spec.num_heads * spec.head_dim, spec.groups * spec.state_dim
        self.sizes = (inner, both, both)
        channels = sum(self.sizes)
        self.input = Linear(model.hidden_size, inner + channels + spec.num_heads, bias=spec.bias, **layer_factory)
        self.conv = nn.Parameter(torch.empty(channels, 1, spec.kernel, **factory))
        self.conv_bias = nn.Parameter(torch.empty(channels, **factory)) if spec.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(spec.num_heads, **factory))
        self.A_log = nn.Parameter(torch.empty(spec.num_heads, **factory))
        self.skip = nn.Parameter(torch.empty(spec.num_heads, **factory))
        self.norm = RMSNorm(inner, model.norm_eps, **layer_factory)
        self.output = Linear(inner, model.hidden_size, bias=spec.bias, **layer_factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        sizes = (self.sizes[0], sum(self.sizes), self.spec.num_heads)
        z_TI, xbc_TC, dt_TH = self.input(x_TD).split(sizes, dim=-1)
        recurrent = attn_backend.recurrent_state(self.layer)
        state = find_decode_state(recurrent, self.numerics)
        group = self.sizes[0] // self.spec.groups
        if state is not None and supports_decode_step(x_TD, self.spec.head_dim, self.spec.state_dim, group):
            return self.output(self._decode(z_TI, xbc_TC, dt_TH, state))
        y_TI = scan_tokens(recurrent, self._scan, (xbc_TC, dt_TH))
        return self.output(self._gate(y_TI, z_TI))

    def _decode(self, z_TI: Tensor, xbc_TC: Tensor, dt_TH: Tensor, state: DecodeState) -> Tensor:
        """One token of each sequence by the kernels of decode steps, gated and normalized."""
        spec = self.spec
        xbc_TC = conv_step(xbc_TC, self.conv.squeeze(1), self.conv_bias, state.tensors[0], state, silu=True)
        y_TI = ssd_step(
            xbc_TC,
            dt_TH,
            self.A_log,
            self.dt_bias,
            self.skip,
            state,
            groups=spec.groups,
            step_limit=spec.step_limit,
        )
        return gated_group_norm(y_TI, z_TI, self.norm.weight, self.norm.eps, spec.groups)

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Convolve and run the SSD scan, from the convolution's last inputs and the matrix of each head."""
        xbc_TC, dt_TH = inputs_T
        inputs, state = (None, None) if before is None else before
        spec, wide = self.spec, torch.promote_types(xbc_TC.dtype, torch.float32)
        if shard is not None:
            inputs = shard.read_earlier(xbc_TC, spec.kernel - 1)
        xbc_TC, inputs = causal_conv1d(
            xbc_TC, self.conv.squeeze(1), self.conv_bias, lengths, inputs, numerics=self.numerics
        )
        x_TI, b_TX, c_TX = silu(xbc_TC, self.numerics).split(self.sizes, dim=-1)
        dt_TH = softplus(dt_TH.to(wide) + self.dt_bias.to(wide), self.numerics).clamp(*spec.step_limit)
        tokens_T = (
            x_TI.unflatten(-1, (-1, spec.head_dim)),
            dt_TH,
            -self.A_log.to(wide).exp(),
            b_TX.unflatten(-1, (-1, spec.state_dim)),
            c_TX.unflatten(-1, (-1, spec.state_dim)),
            self.skip,
        )
        if self.numerics.batch_invariant:
            y_THp, state = invariant_scan.mamba2_ssd(*tokens_T, lengths, state, shard)
        elif shard is not None:
            y_THp = split_mamba2_ssd(*tokens_T, shard)
        else:
            y_THp, state = mamba2_ssd(*tokens_T, lengths, state)
        return y_THp.flatten(1), None if inputs is None or state is None else (inputs, state)

    def _gate(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        """Gate first, then normalize within each group."""
        wide = torch.promote_types(z_TI.dtype, torch.float32)
        gated_TI = y_TI.to(wide) * silu(z_TI.to(wide), self.numerics)
        gated_TGi = gated_TI.unflatten(-1, (self.spec.groups, -1))
        normed_TI = wide_rms_norm(gated_TGi, None, self.norm.eps, self.numerics).flatten(-2)
        return (normed_TI * self.norm.weight.to(wide)).to(z_TI.dtype)
