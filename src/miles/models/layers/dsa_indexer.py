"""DSA indexer: small heads that score which earlier tokens sparse attention looks at.

Shapes: T tokens, D hidden, R query rank, H indexer heads, d their channels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.attention.index_pools import GatedPool
from miles.kernels.batch_invariant.linear import linear as invariant_linear
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import IndexerInputs
from miles.models.layers.linear import Linear
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.spec import DecoderSpec, IndexerSpec, MlaSpec, RopeSpec

# Fixed by the architecture, not in the config.
_NORM_EPS = 1e-6


class Indexer(nn.Module):
    """Queries from the attention's query latent, one key per token, and a weight per head.

    With pools of tokens, a token also has a gate for each channel of its key, and a pool a bias of each token.
    The selection has no gradient, so nothing here is trained.
    """

    def __init__(
        self,
        spec: IndexerSpec,
        mla: MlaSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        assert mla.query_rank is not None, "the DSA indexer reads the query latent"
        self.spec, self.numerics = spec, numerics
        # The attention's RoPE, but the channel pairing may differ.
        self.rope: RopeSpec | None = None
        if mla.rope is not None:
            self.rope = replace(mla.rope, dim=mla.rope_dim, interleaved=spec.rope_interleaved)
        self.scale = (spec.head_dim * spec.num_heads) ** -0.5
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.wq_b = Linear(mla.query_rank, spec.num_heads * spec.head_dim, bias=False, **factory)
        self.wk = Linear(model.hidden_size, spec.head_dim, bias=False, **factory)
        self.k_norm = nn.LayerNorm(spec.head_dim, eps=_NORM_EPS, device=device, dtype=dtype)
        self.weights_proj = Linear(model.hidden_size, spec.num_heads, bias=False, **factory)
        self.pool_gate: Linear | None = None
        self.pool_bias: nn.Parameter | None = None
        if spec.pool > 1:
            self.pool_gate = Linear(model.hidden_size, spec.head_dim, bias=False, **factory)
            self.pool_bias = nn.Parameter(torch.empty(spec.pool, spec.head_dim, device=device, dtype=dtype))
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, query_TR: Tensor, positions: Positions) -> IndexerInputs:
        q_THd = self.wq_b(query_TR).unflatten(-1, (-1, self.spec.head_dim))
        k_T1d = self.k_norm(self.wk(x_TD)).unsqueeze(1)
        if self.rope is not None:
            cos_sin = positions.cos_sin(self.rope, self.spec.head_dim)
            rotary: dict[str, Any] = {"interleaved": self.rope.interleaved, "numerics": self.numerics}
            q_THd, k_T1d = (apply_rotary(x, cos_sin, **rotary) for x in (q_THd, k_T1d))
        k_Td = k_T1d.squeeze(1)
        # The selection depends on small differences: the weights are not rounded to a low-precision dtype.
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        linear = invariant_linear if self.numerics.batch_invariant else F.linear
        weights_TH = linear(x_TD.to(fp32), self.weights_proj.weight.to(fp32)) * self.scale
        return IndexerInputs(
            q_THd=q_THd,
            k_Td=k_Td if self.pool_gate is None else torch.cat((k_Td, self.pool_gate(x_TD)), -1),
            weights_TH=weights_TH,
            topk=self.spec.top,
            pool=None if self.pool_bias is None else GatedPool(self.pool_bias),
        )
