"""The scorer of sparse attention: few small heads that say which earlier tokens are worth looking at.

Shapes: T tokens, D hidden, R query rank, H heads of the scorer, d their channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.models.linear import Linear
from miles.models.memory import Index
from miles.models.rope import Positions, rotate
from miles.models.spec import DecoderSpec, IndexerSpec, MlaSpec

# Not a config's to say.
_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Queries out of the latent of the attention's own, one key a token, and how much each head's opinion weighs.

    Choosing takes no gradient, so nothing here is trained.
    """

    def __init__(
        self, spec: IndexerSpec, mla: MlaSpec, model: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        assert mla.query_rank is not None, "a scorer reads the latent of the queries"
        self.spec = spec
        # The same positions as the attention's, though the pairs may lie otherwise.
        self.rope = replace(mla.rope, dim=mla.rope_dim, interleaved=spec.rope_interleaved)
        self.scale = (spec.head_dim * spec.num_heads) ** -0.5
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq_b = Linear(mla.query_rank, spec.num_heads * spec.head_dim, bias=False, **made)
        self.wk = Linear(model.hidden_size, spec.head_dim, bias=False, **made)
        self.k_norm = nn.LayerNorm(spec.head_dim, eps=_NORM_EPS, **made)
        self.weights_proj = Linear(model.hidden_size, spec.num_heads, bias=False, **made)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, query_TR: Tensor, at: Positions) -> Index:
        rotation, interleaved = at.rotation(self.rope, self.spec.head_dim), self.rope.interleaved
        q_THd = self.wq_b(query_TR).unflatten(-1, (-1, self.spec.head_dim))
        k_T1d = self.k_norm(self.wk(x_TD)).unsqueeze(1)
        # Who is chosen hangs on small differences: the weights are not rounded to a narrow dtype.
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        weights_TH = F.linear(x_TD.to(wide), self.weights_proj.weight.to(wide)) * self.scale
        return Index(
            q_THd=rotate(q_THd, rotation, interleaved=interleaved),
            k_Td=rotate(k_T1d, rotation, interleaved=interleaved).squeeze(1),
            weights_TH=weights_TH,
            top=self.spec.top,
        )
