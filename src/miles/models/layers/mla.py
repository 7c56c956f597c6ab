"""Multi-head latent attention (MLA): keys and values of all heads come from one latent vector per token.

The trainer expands the latent into keys and values. The engine caches the latent itself: the up-projections are
absorbed into the queries and the output, which is the same sum in another order.

Shapes: T tokens, D hidden, H heads, R query rank, K key-value rank, n and r channels of a head without and with RoPE, d
= n + r, v channels of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams, IndexerInputs
from miles.models.layers.dsa_indexer import Indexer
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.spec import DecoderSpec, MlaSpec
from miles.precision.kv_cache import round_kv


class MultiHeadLatentAttention(nn.Module):
    """Project down, normalize, project up, apply RoPE to the positional channels, attend, project back."""

    def __init__(
        self,
        spec: MlaSpec,
        model: DecoderSpec,
        layer: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.spec = spec
        self.numerics = numerics
        self.params = AttentionParams(scale=spec.scale)
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        width, queries = model.hidden_size, spec.num_heads * spec.head_dim
        self.q: Linear | None = None
        self.q_a: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if spec.query_rank is None:
            self.q = Linear(width, queries, bias=False, **factory)
        else:
            self.q_a = Linear(width, spec.query_rank, bias=spec.bias, **factory)
            self.q_a_norm = RMSNorm(spec.query_rank, spec.norm_eps, **factory)
            self.q_b = Linear(spec.query_rank, queries, bias=False, **factory)
        self.kv_a = Linear(width, spec.kv_rank + spec.rope_dim, bias=spec.bias, **factory)
        self.kv_a_norm = RMSNorm(spec.kv_rank, spec.norm_eps, **factory)
        self.kv_b = Linear(spec.kv_rank, spec.num_heads * (spec.nope_dim + spec.value_dim), bias=False, **factory)
        self.output = Linear(spec.num_heads * spec.value_dim, width, bias=spec.bias, **factory)
        self.indexer: Indexer | None = None
        if spec.indexer is not None and spec.indexer.source is None:
            self.indexer = Indexer(spec.indexer, spec, model, **factory)

    def forward(self, x_TD: Tensor, positions: Positions, attn_backend: AttentionBackend) -> Tensor:
        spec = self.spec
        q_THd, index = self._queries(x_TD, positions)
        if spec.temperature is not None:
            q_THd = (q_THd * positions.temperature(*spec.temperature)).to(q_THd.dtype)
        q_THn, q_THr = q_THd.split((spec.nope_dim, spec.rope_dim), dim=-1)
        q_THr = self._rotate(q_THr, positions)
        latent_TK, k_Tr = self.kv_a(x_TD).split((spec.kv_rank, spec.rope_dim), dim=-1)
        latent_TK = self.kv_a_norm(latent_TK)
        k_T1r = self._rotate(k_Tr.unsqueeze(1), positions)
        if not attn_backend.latent:
            # Round what the engine caches: the latent, or with batch-invariant numerics the expanded keys and values.
            round_latent = self.numerics.fp8_kv_cache and not self.numerics.batch_invariant
            if round_latent:
                latent_TK, k_T1r = round_kv(latent_TK), round_kv(k_T1r)
            q_THd, k_THd, v_THv = self._expand(q_THn, q_THr, latent_TK, k_T1r)
            if self.numerics.fp8_kv_cache and not round_latent:
                k_THd, v_THv = round_kv(k_THd), round_kv(v_THv)
            return self.output(
                attn_backend(self.layer, AttentionInputs(q_THd, k_THd, v_THv, self.params, indexer=index)).flatten(1)
            )
        key_HnK, value_HvK = self._up_projections()
        q_THd = torch.cat((torch.einsum("thn,hnk->thk", q_THn, key_HnK), q_THr), -1)
        k_T1d = torch.cat((latent_TK.unsqueeze(1), k_T1r), -1)
        out_THK = attn_backend(
            self.layer, AttentionInputs(q_THd, k_T1d, k_T1d[..., : spec.kv_rank], self.params, indexer=index)
        )
        return self.output(torch.einsum("thk,hvk->thv", out_THK, value_HvK).flatten(1))

    def _rotate(self, x_THr: Tensor, positions: Positions) -> Tensor:
        """Apply RoPE, if the layer has one."""
        rope = self.spec.rope
        if rope is None:
            return x_THr
        cos_sin = positions.cos_sin(rope, self.spec.rope_dim)
        return apply_rotary(x_THr, cos_sin, interleaved=rope.interleaved, numerics=self.numerics)

    def _queries(self, x_TD: Tensor, positions: Positions) -> tuple[Tensor, IndexerInputs | int | None]:
        """Return queries, and the indexer inputs or the layer whose selection is reused."""
        spec = self.spec
        if self.q is not None:
            return self.q(x_TD).unflatten(-1, (-1, spec.head_dim)), None
        assert self.q_a is not None and self.q_a_norm is not None and self.q_b is not None
        query_TR = self.q_a_norm(self.q_a(x_TD))
        q_THd = self.q_b(query_TR).unflatten(-1, (-1, spec.head_dim))
        if self.indexer is not None:
            return q_THd, self.indexer(x_TD, query_TR, positions)
        return q_THd, None if spec.indexer is None else spec.indexer.source

    def _expand(self, q_THn: Tensor, q_THr: Tensor, latent_TK: Tensor, k_T1r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of every head."""
        spec = self.spec
        kv_THx = self.kv_b(latent_TK).unflatten(-1, (spec.num_heads, -1))
        k_THn, v_THv = kv_THx.split((spec.nope_dim, spec.value_dim), dim=-1)
        k_THd = torch.cat((k_THn, k_T1r.expand(-1, spec.num_heads, -1)), -1)
        return torch.cat((q_THn, q_THr), -1), k_THd, v_THv

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        """Return the up-projections of keys and of values from the latent: [H, n, K] and [H, v, K]."""
        both_HxK = self.kv_b.merged_weight().unflatten(0, (self.spec.num_heads, -1))
        key_HnK, value_HvK = both_HxK.split((self.spec.nope_dim, self.spec.value_dim), dim=1)
        return key_HnK, value_HvK
