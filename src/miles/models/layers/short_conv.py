"""Gated short convolution (LFM2): its past is the last few inputs of a causal convolution, not a list of tokens.

Shapes: T tokens, D hidden, C convolved channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.linear_attention.causal_conv1d import causal_conv1d
from miles.kernels.linear_attention.decode_step import conv_step, supports_decode_step
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.linear import Linear
from miles.models.layers.recurrent_scan import find_decode_state, scan_tokens
from miles.models.layers.rope import Positions
from miles.models.spec import DecoderSpec, ShortConvSpec


class ShortConv(nn.Module):
    """Project to two gates and an input, gate, convolve, gate again, project back."""

    def __init__(
        self,
        spec: ShortConvSpec,
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
        self.input = Linear(model.hidden_size, 3 * spec.channels, bias=spec.bias, **layer_factory)
        self.conv = nn.Parameter(torch.empty(spec.channels, 1, spec.kernel, **factory))
        self.conv_bias = nn.Parameter(torch.empty(spec.channels, **factory)) if spec.bias else None
        self.output = Linear(spec.channels, model.hidden_size, bias=spec.bias, **layer_factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        gate_in_TC, gate_out_TC, x_TC = self.input(x_TD).chunk(3, dim=-1)
        recurrent = attn_backend.recurrent_state(self.layer)
        state = find_decode_state(recurrent, self.numerics)
        if state is not None and supports_decode_step(x_TD, 1, 1):
            gates, weight_CK = (gate_in_TC, gate_out_TC), self.conv.squeeze(1)
            return self.output(conv_step(x_TC, weight_CK, self.conv_bias, state.tensors[0], state, gates=gates))
        y_TC = scan_tokens(recurrent, self._scan, (gate_in_TC * x_TC,))
        return self.output(gate_out_TC * y_TC)

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Convolve, from the convolution's last inputs."""
        (x_TC,) = inputs_T
        earlier = None if before is None else before[0]
        if shard is not None:
            earlier = shard.read_earlier(x_TC, self.spec.kernel - 1)
        y_TC, last = causal_conv1d(x_TC, self.conv.squeeze(1), self.conv_bias, lengths, earlier, numerics=self.numerics)
        return y_TC, None if last is None or shard is not None else (last,)
