"""Block-sparse attention indexer: one small head per key-value head scores which blocks of tokens it attends to.

Shapes: T tokens, D hidden, G key-value heads, d channels of an indexer head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import BlockIndexerInputs
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.spec import AttentionSpec, BlockIndexerSpec, DecoderSpec


class BlockIndexer(nn.Module):
    """Queries of every key-value head and one key per token, normalized and rotated as the attention's.

    The selection has no gradient, so nothing here is trained.
    """

    def __init__(
        self,
        attention: AttentionSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        assert isinstance(attention.indexer, BlockIndexerSpec) and attention.rope is not None
        self.spec, self.rope = attention.indexer, attention.rope
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        channels = self.spec.head_dim
        self.q = Linear(model.hidden_size, attention.num_kv_heads * channels, bias=False, **factory)
        self.k = Linear(model.hidden_size, channels, bias=False, **factory)
        self.q_norm = RMSNorm(channels, model.norm_eps, offset=model.norm_offset, **factory)
        self.k_norm = RMSNorm(channels, model.norm_eps, offset=model.norm_offset, **factory)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, positions: Positions) -> BlockIndexerInputs:
        cos_sin = positions.cos_sin(self.rope, self.spec.head_dim)
        rotary: dict[str, Any] = {"interleaved": self.rope.interleaved, "numerics": self.numerics}
        q_TGd = self.q_norm(self.q(x_TD).unflatten(-1, (-1, self.spec.head_dim)))
        k_T1d = self.k_norm(self.k(x_TD).unsqueeze(1))
        return BlockIndexerInputs(
            q_TGd=apply_rotary(q_TGd, cos_sin, **rotary),
            k_Td=apply_rotary(k_T1d, cos_sin, **rotary).squeeze(1),
            block=self.spec.block,
            topk=self.spec.top,
            local=self.spec.local,
        )
