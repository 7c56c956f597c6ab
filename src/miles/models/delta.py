"""A gated delta network as a layer's mixer: its past is a matrix a head, not a list of tokens.

Shapes: T tokens, D hidden, G key heads, H value heads, k channels of a key, v of a value, C = 2Gk + Hv channels that
are convolved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.conv import causal_conv
from miles.kernels.delta import gated_delta
from miles.models.linear import Linear
from miles.models.memory import Attend
from miles.models.norm import RMSNorm
from miles.models.rope import Positions
from miles.models.spec import DecoderSpec, DeltaSpec

# Keeps a key of all zeros finite; part of the models' definition.
_UNIT_EPS = 1e-6


class Delta(nn.Module):
    """Project, convolve, let the state pass through the tokens, normalise and gate what they read, project back."""

    def __init__(
        self, spec: DeltaSpec, model: DecoderSpec, layer: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        made = {"device": device, "dtype": dtype}
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        self.sizes = (keys, keys, values)
        self.qkvz = Linear(model.hidden_size, sum(self.sizes) + values, bias=False, **made)
        self.ba = Linear(model.hidden_size, 2 * spec.value_heads, bias=False, **made)
        self.conv = nn.Parameter(torch.empty(sum(self.sizes), 1, spec.kernel, **made))
        self.dt_bias = nn.Parameter(torch.empty(spec.value_heads, **made))
        self.A_log = nn.Parameter(torch.empty(spec.value_heads, **made))
        self.norm = RMSNorm(spec.value_dim, model.norm_eps, device=device, dtype=dtype)
        self.output = Linear(values, model.hidden_size, bias=False, **made)

    def forward(self, x_TD: Tensor, at: Positions, attend: Attend) -> Tensor:
        carry = attend.carry(self.layer)
        inputs, state = (None, None) if carry.state is None else carry.state
        qkv_TC, z_THv, b_TH, a_TH = self._project(x_TD)
        qkv_TC, inputs = causal_conv(qkv_TC, self.conv.squeeze(1), None, carry.lengths, inputs)
        q_TX, k_TX, v_TX = F.silu(qkv_TC).split(self.sizes, dim=-1)
        q_TGk, k_TGk = (_unit(x.unflatten(-1, (-1, self.spec.key_dim))) for x in (q_TX, k_TX))
        out_THv, state = gated_delta(
            q_TGk * self.spec.key_dim**-0.5,
            k_TGk,
            v_TX.unflatten(-1, (-1, self.spec.value_dim)),
            self._log_decay(a_TH),
            b_TH.sigmoid(),
            carry.lengths,
            state,
        )
        if inputs is not None and state is not None:
            carry.keep((inputs, state))
        return self.output(self._gate(out_THv, z_THv).flatten(1))

    def _project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side, gates, betas before their sigmoid, steps before their softplus."""
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
        """The logarithm of how much of the state each token leaves, in float32: its exponential is exponential's."""
        wide = torch.promote_types(a_TH.dtype, torch.float32)
        return -self.A_log.to(wide).exp() * F.softplus(a_TH.to(wide) + self.dt_bias.to(wide))

    def _gate(self, out_THv: Tensor, z_THv: Tensor) -> Tensor:
        wide = torch.promote_types(z_THv.dtype, torch.float32)
        normed_THv = F.rms_norm(out_THv.to(wide), self.norm.shape, self.norm.weight.to(wide), self.norm.eps)
        return (normed_THv * F.silu(z_THv.to(wide))).to(z_THv.dtype)


def _unit(x_TGk: Tensor) -> Tensor:
    """Each head's vector at length one, in float32."""
    x_TGk = x_TGk.to(torch.promote_types(x_TGk.dtype, torch.float32))
    return x_TGk * torch.rsqrt(x_TGk.square().sum(-1, keepdim=True) + _UNIT_EPS)
