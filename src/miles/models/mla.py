"""Multi-head latent attention: keys and values of all heads come out of one short vector a token.

A trainer expands that vector into keys and values. An engine remembers the vector itself: the projections that would
expand it go into the queries and into the output instead, which is the same sum in another order.

Shapes: T tokens, D hidden, H heads, R query rank, K key-value rank, n and r channels of a head without and with a
position, d = n + r, v channels of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.models.indexer import Indexer
from miles.models.linear import Linear
from miles.models.memory import Attend, Index, Terms
from miles.models.norm import RMSNorm
from miles.models.rope import Positions, rotate
from miles.models.spec import DecoderSpec, MlaSpec


class Mla(nn.Module):
    """Project down, normalise, project up, rotate the part that carries the position, attend, project back."""

    def __init__(
        self, spec: MlaSpec, model: DecoderSpec, layer: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.layer, self.spec = layer, spec
        self.terms = Terms(scale=spec.scale)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        width, queries = model.hidden_size, spec.num_heads * spec.head_dim
        self.q: Linear | None = None
        self.q_a: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if spec.query_rank is None:
            self.q = Linear(width, queries, bias=False, **made)
        else:
            self.q_a = Linear(width, spec.query_rank, bias=spec.bias, **made)
            self.q_a_norm = RMSNorm(spec.query_rank, spec.norm_eps, **made)
            self.q_b = Linear(spec.query_rank, queries, bias=False, **made)
        self.kv_a = Linear(width, spec.kv_rank + spec.rope_dim, bias=spec.bias, **made)
        self.kv_a_norm = RMSNorm(spec.kv_rank, spec.norm_eps, **made)
        self.kv_b = Linear(spec.kv_rank, spec.num_heads * (spec.nope_dim + spec.value_dim), bias=False, **made)
        self.output = Linear(spec.num_heads * spec.value_dim, width, bias=spec.bias, **made)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and spec.indexer.source is None:
            self.indexer = Indexer(spec.indexer, spec, model, **made)

    def forward(self, x_TD: Tensor, at: Positions, attend: Attend) -> Tensor:
        spec, rope = self.spec, self.spec.rope
        rotation = at.rotation(rope, spec.rope_dim)
        q_THd, index = self._queries(x_TD, at)
        q_THn, q_THr = q_THd.split((spec.nope_dim, spec.rope_dim), dim=-1)
        q_THr = rotate(q_THr, rotation, interleaved=rope.interleaved)
        latent_TK, k_Tr = self.kv_a(x_TD).split((spec.kv_rank, spec.rope_dim), dim=-1)
        latent_TK = self.kv_a_norm(latent_TK)
        k_T1r = rotate(k_Tr.unsqueeze(1), rotation, interleaved=rope.interleaved)
        if not attend.latent:
            q_THd, k_THd, v_THv = self._expanded(q_THn, q_THr, latent_TK, k_T1r)
            return self.output(attend(self.layer, q_THd, k_THd, v_THv, self.terms, index=index).flatten(1))
        key_HnK, value_HvK = self._expanders()
        q_THd = torch.cat((torch.einsum("thn,hnk->thk", q_THn, key_HnK), q_THr), -1)
        k_T1d = torch.cat((latent_TK.unsqueeze(1), k_T1r), -1)
        out_THK = attend(self.layer, q_THd, k_T1d, k_T1d[..., : spec.kv_rank], self.terms, index=index)
        return self.output(torch.einsum("thk,hvk->thv", out_THK, value_HvK).flatten(1))

    def _queries(self, x_TD: Tensor, at: Positions) -> tuple[Tensor, Index | int | None]:
        """Queries, and who may be seen with them."""
        spec = self.spec
        if self.q is not None:
            return self.q(x_TD).unflatten(-1, (-1, spec.head_dim)), None
        assert self.q_a is not None and self.q_a_norm is not None and self.q_b is not None
        query_TR = self.q_a_norm(self.q_a(x_TD))
        q_THd = self.q_b(query_TR).unflatten(-1, (-1, spec.head_dim))
        if self.indexer is not None:
            return q_THd, self.indexer(x_TD, query_TR, at)
        return q_THd, None if spec.indexer is None else spec.indexer.source

    def _expanded(
        self, q_THn: Tensor, q_THr: Tensor, latent_TK: Tensor, k_T1r: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of every head."""
        spec = self.spec
        kv_THx = self.kv_b(latent_TK).unflatten(-1, (spec.num_heads, -1))
        k_THn, v_THv = kv_THx.split((spec.nope_dim, spec.value_dim), dim=-1)
        k_THd = torch.cat((k_THn, k_T1r.expand(-1, spec.num_heads, -1)), -1)
        return torch.cat((q_THn, q_THr), -1), k_THd, v_THv

    def _expanders(self) -> tuple[Tensor, Tensor]:
        """What makes keys, and what makes values, out of a latent: [H, n, K] and [H, v, K]."""
        both_HxK = self.kv_b.weight.unflatten(0, (self.spec.num_heads, -1))
        key_HnK, value_HvK = both_HxK.split((self.spec.nope_dim, self.spec.value_dim), dim=1)
        return key_HnK, value_HvK
