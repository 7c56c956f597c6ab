"""Kimi Delta Attention (KDA) layer: a Gated DeltaNet whose state decays channel by channel.

Shapes: T tokens, D hidden, H heads, d channels of a head, X = Hd, C = 3X convolved channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant import recurrent_scan as invariant_scan
from miles.kernels.linear_attention.causal_conv1d import causal_conv1d
from miles.kernels.linear_attention.decode_step import DeltaStep, conv_step, delta_step, supports_decode_step
from miles.kernels.linear_attention.kimi_delta_rule import kimi_delta_rule
from miles.kernels.linear_attention.state_passing import split_delta_rule
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.recurrent_ops import normalize_heads, sigmoid, silu, softplus, wide_rms_norm
from miles.models.layers.recurrent_scan import find_decode_state, scan_tokens
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, KimiDeltaSpec


class KimiDeltaAttention(nn.Module):
    """Project, convolve, apply the delta rule, normalize and gate the output, project back.

    The decay and the output gate come from projections of low rank.
    """

    def __init__(
        self,
        spec: KimiDeltaSpec,
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
        layer_factory: dict[str, Any] = {**factory, "bias": False, "numerics": numerics}
        width, inner = model.hidden_size, spec.num_heads * spec.head_dim
        self.qkv = Linear(width, 3 * inner, **layer_factory)
        self.conv = nn.Parameter(torch.empty(3 * inner, 1, spec.kernel, **factory))
        self.f_a = Linear(width, spec.head_dim, **layer_factory)
        self.f_b = Linear(spec.head_dim, inner, **layer_factory)
        self.dt_bias = nn.Parameter(torch.empty(inner, **factory))
        rates = (spec.num_heads,) if spec.flat_rates else (1, 1, spec.num_heads, 1)
        self.A_log = nn.Parameter(torch.empty(rates, **factory))
        self.b = Linear(width, spec.num_heads, **layer_factory)
        self.g_a = Linear(width, spec.head_dim, **layer_factory)
        self.g_b = Linear(spec.head_dim, inner, **layer_factory)
        self.norm = RMSNorm(spec.head_dim, model.norm_eps, numerics=numerics, **factory)
        self.output = Linear(inner, width, **layer_factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        qkv_TC, beta_TH = self.qkv(x_TD), self.b(x_TD)
        decay_TX, gate_TX = self.f_b(self.f_a(x_TD)), self.g_b(self.g_a(x_TD))
        recurrent = attn_backend.recurrent_state(self.layer)
        state = find_decode_state(recurrent, self.numerics)
        if state is not None and supports_decode_step(qkv_TC, self.spec.head_dim, self.spec.head_dim):
            qkv_TC = conv_step(qkv_TC, self.conv.squeeze(1), None, state.tensors[0], state, silu=True)
            return self.output(delta_step(qkv_TC, decay_TX, beta_TH, gate_TX, self._decode_weights(), state))
        inputs_T = (qkv_TC, self._log_decay(decay_TX), sigmoid(beta_TH, self.numerics))
        out_THd = scan_tokens(recurrent, self._scan, inputs_T)
        return self.output(self._gate(out_THd, gate_TX.view(out_THd.shape)).flatten(1))

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Convolve and apply the delta rule, from the convolution's last inputs and the matrix of each head."""
        qkv_TC, log_decay_THd, beta_TH = inputs_T
        inputs, state = (None, None) if before is None else before
        if shard is not None:
            inputs = shard.read_earlier(qkv_TC, self.spec.kernel - 1)
        qkv_TC, inputs = causal_conv1d(qkv_TC, self.conv.squeeze(1), None, lengths, inputs, numerics=self.numerics)
        q_THd, k_THd, v_THd = silu(qkv_TC, self.numerics).unflatten(-1, (3, -1, self.spec.head_dim)).unbind(1)
        scale = self.spec.head_dim**-0.5
        q_THd, k_THd = normalize_heads(q_THd, self.numerics) * scale, normalize_heads(k_THd, self.numerics)
        tokens_T = (q_THd, k_THd, v_THd, log_decay_THd, beta_TH)
        if self.numerics.batch_invariant:
            out_THd, state = invariant_scan.kimi_delta_rule(*tokens_T, lengths, state, shard)
        elif shard is not None:
            out_THd = split_delta_rule(kimi_delta_rule, *tokens_T, shard)
        else:
            out_THd, state = kimi_delta_rule(*tokens_T, lengths, state)
        return out_THd, None if inputs is None or state is None else (inputs, state)

    def _decode_weights(self) -> DeltaStep:
        spec = self.spec
        return DeltaStep(
            key_heads=spec.num_heads,
            value_heads=spec.num_heads,
            key_dim=spec.head_dim,
            value_dim=spec.head_dim,
            log_rate_H=self.A_log,
            dt_bias=self.dt_bias,
            weight_v=self.norm.weight,
            eps=self.norm.eps,
            silu_gate=False,
            lower_bound=spec.lower_bound,
        )

    def _log_decay(self, f_TX: Tensor) -> Tensor:
        """Compute the logarithm of each channel's decay, in float32 because it is exponentiated again."""
        wide = torch.promote_types(f_TX.dtype, torch.float32)
        input_THd = (f_TX.to(wide) + self.dt_bias.to(wide)).unflatten(-1, (-1, self.spec.head_dim))
        rate_H1 = self.A_log.view(-1, 1).to(wide).exp()
        if self.spec.lower_bound is not None:
            return self.spec.lower_bound * sigmoid(rate_H1 * input_THd, self.numerics)
        return -rate_H1 * softplus(input_THd, self.numerics)

    def _gate(self, out_THd: Tensor, gate_THd: Tensor) -> Tensor:
        wide = torch.promote_types(gate_THd.dtype, torch.float32)
        normed_THd = wide_rms_norm(out_THd, self.norm.weight, self.norm.eps, self.numerics)
        return (normed_THd * sigmoid(gate_THd.to(wide), self.numerics)).to(gate_THd.dtype)
