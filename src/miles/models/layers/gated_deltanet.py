"""Gated DeltaNet layer: its past is one matrix per head, not a list of tokens.

Shapes: T tokens, D hidden, G key heads, H value heads, k channels of a key, v of a value, C = 2Gk + Hv convolved
channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant import recurrent_scan as invariant_scan
from miles.kernels.linear_attention.causal_conv1d import causal_conv1d
from miles.kernels.linear_attention.decode_step import DeltaStep, conv_step, delta_step, supports_decode_step
from miles.kernels.linear_attention.gated_delta_rule import gated_delta_rule
from miles.kernels.linear_attention.state_passing import split_delta_rule
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.recurrent_ops import normalize_heads, sigmoid, silu, softplus, wide_rms_norm
from miles.models.layers.recurrent_scan import find_decode_state, scan_tokens
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, GatedDeltaNetSpec


class GatedDeltaNet(nn.Module):
    """Project, convolve, apply the gated delta rule, normalize and gate the output, project back."""

    def __init__(
        self,
        spec: GatedDeltaNetSpec,
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
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        self.sizes = (keys, keys, values)
        self.qkvz = Linear(model.hidden_size, sum(self.sizes) + values, bias=False, **layer_factory)
        self.ba = Linear(model.hidden_size, 2 * spec.value_heads, bias=False, **layer_factory)
        self.conv = nn.Parameter(torch.empty(sum(self.sizes), 1, spec.kernel, **factory))
        self.dt_bias = nn.Parameter(torch.empty(spec.value_heads, **factory))
        self.A_log = nn.Parameter(torch.empty(spec.value_heads, **factory))
        self.norm = RMSNorm(spec.value_dim, model.norm_eps, **layer_factory)
        self.output = Linear(values, model.hidden_size, bias=False, **layer_factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        qkv_TC, z_THv, b_TH, a_TH = self._project(x_TD)
        recurrent = attn_backend.recurrent_state(self.layer)
        state = find_decode_state(recurrent, self.numerics)
        if state is not None and supports_decode_step(qkv_TC, self.spec.key_dim, self.spec.value_dim):
            qkv_TC = conv_step(qkv_TC, self.conv.squeeze(1), None, state.tensors[0], state, silu=True)
            return self.output(delta_step(qkv_TC, a_TH, b_TH, z_THv.flatten(1), self._decode_weights(), state))
        out_THv = scan_tokens(recurrent, self._scan, (qkv_TC, b_TH, a_TH))
        return self.output(self._gate(out_THv, z_THv).flatten(1))

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Convolve and apply the gated delta rule, from the convolution's last inputs and the matrix of each head."""
        qkv_TC, b_TH, a_TH = inputs_T
        inputs, state = (None, None) if before is None else before
        if shard is not None:
            inputs = shard.read_earlier(qkv_TC, self.spec.kernel - 1)
        qkv_TC, inputs = causal_conv1d(qkv_TC, self.conv.squeeze(1), None, lengths, inputs, numerics=self.numerics)
        q_TX, k_TX, v_TX = silu(qkv_TC, self.numerics).split(self.sizes, dim=-1)
        heads = (x.unflatten(-1, (-1, self.spec.key_dim)) for x in (q_TX, k_TX))
        q_TGk, k_TGk = (normalize_heads(x, self.numerics) for x in heads)
        tokens_T = (
            q_TGk * self.spec.key_dim**-0.5,
            k_TGk,
            v_TX.unflatten(-1, (-1, self.spec.value_dim)),
            self._log_decay(a_TH),
            sigmoid(b_TH, self.numerics),
        )
        if self.numerics.batch_invariant:
            out_THv, state = invariant_scan.gated_delta_rule(*tokens_T, lengths, state, shard)
        elif shard is not None:
            out_THv = split_delta_rule(gated_delta_rule, *tokens_T, shard)
        else:
            out_THv, state = gated_delta_rule(*tokens_T, lengths, state)
        return out_THv, None if inputs is None or state is None else (inputs, state)

    def _decode_weights(self) -> DeltaStep:
        spec = self.spec
        return DeltaStep(
            key_heads=spec.key_heads,
            value_heads=spec.value_heads,
            key_dim=spec.key_dim,
            value_dim=spec.value_dim,
            log_rate_H=self.A_log,
            dt_bias=self.dt_bias,
            weight_v=self.norm.weight,
            eps=self.norm.eps,
            silu_gate=spec.output_gate == "silu",
        )

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values side by side, gates, betas before the sigmoid, time steps before the
        softplus.
        """
        spec = self.spec
        qkvz, ba = self.qkvz(x_TD), self.ba(x_TD)
        if not spec.fused:
            qkv_TC, z_TX = qkvz.split((sum(self.sizes), self.sizes[-1]), dim=-1)
            b_TH, a_TH = ba.chunk(2, dim=-1)
            return qkv_TC, z_TX.unflatten(-1, (-1, spec.value_dim)), b_TH, a_TH
        share = spec.value_heads // spec.key_heads
        sizes = (spec.key_dim, spec.key_dim, share * spec.value_dim, share * spec.value_dim)
        q, k, v, z = qkvz.unflatten(-1, (spec.key_heads, -1)).split(sizes, dim=-1)
        b, a = ba.unflatten(-1, (spec.key_heads, 2, share)).unbind(2)
        qkv_TC = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        return qkv_TC, z.flatten(1).unflatten(-1, (-1, spec.value_dim)), b.flatten(1), a.flatten(1)

    def _log_decay(self, a_TH: Tensor) -> Tensor:
        """Compute the logarithm of the state decay of each token, in float32 because it is exponentiated again."""
        wide = torch.promote_types(a_TH.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * softplus(a_TH.to(wide) + self.dt_bias.to(wide), self.numerics)

    def _gate(self, out_THv: Tensor, z_THv: Tensor) -> Tensor:
        wide = torch.promote_types(z_THv.dtype, torch.float32)
        normed_THv = wide_rms_norm(out_THv, self.norm.weight, self.norm.eps, self.numerics)
        activate = silu if self.spec.output_gate == "silu" else sigmoid
        return (normed_THv * activate(z_THv.to(wide), self.numerics)).to(z_THv.dtype)
