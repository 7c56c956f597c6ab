"""Mamba-2 as a layer's mixer: its past is a matrix a head, not a list of tokens.

Shapes: T tokens, D hidden, H heads, p channels of a head, I = Hp, G groups, n channels of the state, C = I + 2Gn
channels that are convolved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.conv import causal_conv
from miles.kernels.ssd import ssd
from miles.models.linear import Linear
from miles.models.memory import Attend
from miles.models.norm import RMSNorm
from miles.models.rope import Positions
from miles.models.spec import DecoderSpec, MambaSpec


class Mamba(nn.Module):
    """Project, convolve, let the state pass through the tokens, gate and normalise what they read, project back."""

    def __init__(
        self, spec: MambaSpec, model: DecoderSpec, layer: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        made = {"device": device, "dtype": dtype}
        inner, both = spec.num_heads * spec.head_dim, spec.groups * spec.state_dim
        self.sizes = (inner, both, both)
        channels = sum(self.sizes)
        self.input = Linear(model.hidden_size, inner + channels + spec.num_heads, bias=spec.bias, **made)
        self.conv = nn.Parameter(torch.empty(channels, 1, spec.kernel, **made))
        self.conv_bias = nn.Parameter(torch.empty(channels, **made)) if spec.conv_bias else None
        self.dt_bias = nn.Parameter(torch.empty(spec.num_heads, **made))
        self.A_log = nn.Parameter(torch.empty(spec.num_heads, **made))
        self.skip = nn.Parameter(torch.empty(spec.num_heads, **made))
        self.norm = RMSNorm(inner, model.norm_eps, device=device, dtype=dtype)
        self.output = Linear(inner, model.hidden_size, bias=spec.bias, **made)

    def forward(self, x_TD: Tensor, at: Positions, attend: Attend) -> Tensor:
        carry = attend.carry(self.layer)
        inputs, state = (None, None) if carry.state is None else carry.state
        spec, wide = self.spec, torch.promote_types(x_TD.dtype, torch.float32)
        z_TI, xbc_TC, dt_TH = self.input(x_TD).split((self.sizes[0], sum(self.sizes), spec.num_heads), dim=-1)
        xbc_TC, inputs = causal_conv(xbc_TC, self.conv.squeeze(1), self.conv_bias, carry.lengths, inputs)
        x_TI, b_TX, c_TX = F.silu(xbc_TC).split(self.sizes, dim=-1)
        dt_TH = F.softplus(dt_TH.to(wide) + self.dt_bias.to(wide)).clamp(*spec.step_limit)
        y_THp, state = ssd(
            x_TI.unflatten(-1, (-1, spec.head_dim)),
            dt_TH,
            -self.A_log.to(wide).exp(),
            b_TX.unflatten(-1, (-1, spec.state_dim)),
            c_TX.unflatten(-1, (-1, spec.state_dim)),
            self.skip,
            carry.lengths,
            state,
        )
        if inputs is not None and state is not None:
            carry.keep((inputs, state))
        return self.output(self._gate(y_THp.flatten(1), z_TI))

    def _gate(self, y_TI: Tensor, z_TI: Tensor) -> Tensor:
        """Gated first, then normalised within each group."""
        wide = torch.promote_types(z_TI.dtype, torch.float32)
        gated_TGi = (y_TI.to(wide) * F.silu(z_TI.to(wide))).unflatten(-1, (self.spec.groups, -1))
        normed_TI = F.rms_norm(gated_TGi, gated_TGi.shape[-1:], None, self.norm.eps).flatten(-2)
        return (normed_TI * self.norm.weight.to(wide)).to(z_TI.dtype)
