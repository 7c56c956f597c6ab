"""Short convolution with a residual connection: a causal depthwise convolution of some channels, added to its input.

Shapes: T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from miles.kernels.linear_attention.causal_conv1d import causal_conv1d
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, SequenceShard
from miles.models.layers.recurrent_scan import scan_tokens


class ResidualConv(nn.Module):
    """``x + conv(x)`` in float32; its past are the last inputs of a sequence, in the recurrent state ``state``."""

    def __init__(
        self,
        channels: int,
        kernel: int,
        state: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.state = state
        self.numerics = numerics
        self.conv = nn.Parameter(torch.empty(channels, 1, kernel, device=device, dtype=dtype))

    def forward(self, x_TC: Tensor, attn_backend: AttentionBackend) -> Tensor:
        return scan_tokens(attn_backend.recurrent_state(self.state), self._scan, (x_TC,))

    def _scan(
        self,
        inputs_T: Sequence[Tensor],
        lengths: Sequence[int],
        before: tuple[Tensor, ...] | None,
        shard: SequenceShard | None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        (x_TC,) = inputs_T
        wide_TC = x_TC.to(torch.promote_types(x_TC.dtype, torch.float32))
        earlier = None if before is None else before[0].to(wide_TC.dtype)
        if shard is not None:
            earlier = shard.read_earlier(wide_TC, self.conv.shape[-1] - 1)
        y_TC, last = causal_conv1d(wide_TC, self.conv.squeeze(1), None, lengths, earlier, numerics=self.numerics)
        out_TC = (y_TC + wide_TC).to(x_TC.dtype)
        return out_TC, None if last is None or shard is not None else (last,)
