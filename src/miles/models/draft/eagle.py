"""EAGLE-3 draft: a head of one transformer layer over the hidden states of three policy layers, for any policy.

Shapes: T tokens of a forward, D hidden, F features of all captured layers, v reduced vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.numerics import FAST, Numerics
from miles.models.draft.base import Draft
from miles.models.draft.spec import DraftSpec
from miles.models.layers.attention import Attention
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.linear import Linear
from miles.models.layers.mlp import Mlp
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import Positions
from miles.models.spec import AttentionSpec, MlpSpec


class EagleDraft(Draft):
    """An EAGLE-3 head.

    The features of step 0 are projected to the hidden size; later steps read the draft's own residual stream. Embedding
    and hidden state, each normalized, are side by side the input of the attention, whose output is added to the hidden
    state; an MLP follows. The embedding is not scaled: the norm would remove it.
    """

    def __init__(
        self, spec: DraftSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics = FAST
    ) -> None:
        super().__init__(spec, numerics=numerics)
        decoder, layer = spec.decoder, spec.decoder.layers[0]
        assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MlpSpec)
        width, eps = decoder.hidden_size, decoder.norm_eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.projection = Linear(spec.feature_size, width, bias=False, **factory)
        self.embedding_norm = RMSNorm(width, eps, **factory)
        self.hidden_norm = RMSNorm(width, eps, **factory)
        self.attention = Attention(layer.mixer, decoder, 0, input_size=2 * width, **factory)
        self.mlp_norm = RMSNorm(width, eps, **factory)
        self.mlp = Mlp(width, layer.ffn, **factory)
        self.norm = RMSNorm(width, eps, **factory)
        self.lm_head: Linear | None = None
        if spec.draft_vocab_size is not None:
            self.lm_head = Linear(width, spec.draft_vocab_size, bias=False, **factory)
            self.token_offsets_v = torch.empty(spec.draft_vocab_size, dtype=torch.int64, device=device)

    def forward(
        self,
        features_TF: Tensor,
        next_tokens_T: Tensor,
        positions_T: Tensor,
        attn_backend: AttentionBackend,
        *,
        step: int = 0,
    ) -> Tensor:
        x_TD = self.projection(features_TF) if step == 0 else features_TF
        embeds_TD = self.policy.embed(next_tokens_T)
        positions = Positions(positions_T, self.spec.decoder.max_positions, embeds_TD.dtype, numerics=self.numerics)
        pair_TD2 = torch.cat((self.embedding_norm(embeds_TD), self.hidden_norm(x_TD)), dim=-1)
        x_TD, y_TD = self.mlp_norm.add_norm(x_TD, self.attention(pair_TD2, positions, attn_backend))
        return x_TD + self.mlp(y_TD)

    def head_input(self, hidden_TD: Tensor, *, step: int = 0) -> Tensor:
        return self.norm(hidden_TD)

    def head(self) -> Tensor:
        return self.policy.head() if self.lm_head is None else self.lm_head.weight
