"""MTP draft: the multi-token-prediction layers of a checkpoint (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, MiMo).

Shapes: T tokens of a forward, D hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.numerics import FAST, Numerics
from miles.models.decoder import DecoderLayer, scale_embedding
from miles.models.draft.base import Draft
from miles.models.draft.spec import DraftSpec
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import Positions


class MtpBlock(nn.Module):
    """One MTP layer: embedding and hidden state, each normalized, projected to one vector; a decoder layer; a norm."""

    def __init__(
        self, spec: DraftSpec, index: int, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        assert spec.mtp is not None
        decoder = spec.decoder
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        norm: dict[str, Any] = {"offset": decoder.norm_offset, **factory}
        self.hidden_first = spec.mtp.hidden_first
        self.embedding_norm = RMSNorm(decoder.hidden_size, decoder.norm_eps, **norm)
        self.hidden_norm = RMSNorm(decoder.hidden_size, decoder.norm_eps, **norm)
        self.projection = Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=False, **factory)
        self.layer = DecoderLayer(decoder, index, **factory)
        self.norm = RMSNorm(decoder.hidden_size, decoder.norm_eps, **norm)

    def forward(
        self, hidden_TD: Tensor, embeds_TD: Tensor, positions: Positions, attn_backend: AttentionBackend
    ) -> Tensor:
        """Return the hidden states after the last norm."""
        pair = (self.embedding_norm(embeds_TD), self.hidden_norm(hidden_TD))
        x_TD = self.projection(torch.cat(pair[::-1] if self.hidden_first else pair, dim=-1))
        return self.norm(self.layer(x_TD, positions, attn_backend, None))


class MtpDraft(Draft):
    """The MTP layers of a checkpoint, with the policy's embedding and head.

    Step j runs layer j, and the last layer from then on. A step's hidden state is that after the block's last norm, as
    the policy's is that after its final norm.
    """

    def __init__(
        self, spec: DraftSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
    ) -> None:
        super().__init__(spec, numerics=numerics)
        self.blocks = nn.ModuleList(
            MtpBlock(spec, i, device=device, dtype=dtype, numerics=numerics) for i in range(spec.num_layers)
        )

    def forward(
        self,
        features_TF: Tensor,
        next_tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        *,
        step: int = 0,
    ) -> Tensor:
        block = self.blocks[self.spec.layer_of_step(step)]
        assert isinstance(block, MtpBlock)
        embeds_TD = scale_embedding(self.policy.embed(next_tokens_T), self.spec.decoder)
        positions = Positions(positions_T, self.spec.decoder.max_positions, embeds_TD.dtype, numerics=self.numerics)
        return block(features_TF, embeds_TD, positions, attn_backend)

    def head_input(self, hidden_TD: Tensor, *, step: int = 0) -> Tensor:
        return hidden_TD
