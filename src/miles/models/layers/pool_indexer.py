"""Indexer of pools of tokens for softmax attention (QSA): small heads score means of consecutive tokens' keys.

Shapes: T tokens, S of a sequence, D hidden, H indexer heads, d their channels, p pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant.elementwise import sum_in_order
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import IndexerInputs
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.layers.rope import Positions, apply_rotary, compute_cos_sin
from miles.models.spec import AttentionSpec, DecoderSpec, PoolIndexerSpec, RopeSpec


@dataclass(frozen=True, slots=True)
class MeanPool:
    """Keys of complete pools of ``size`` tokens: the mean of their keys, normalized, rotated as the first token."""

    size: int
    norm: RMSNorm
    rope: RopeSpec
    max_positions: int

    def __call__(self, keys_Sd: Tensor) -> Tensor:
        """Return [p, d] or [B, p, d] of the keys of whole sequences; tokens behind the last pool are left out."""
        pools = keys_Sd.shape[-2] // self.size
        wide = torch.promote_types(keys_Sd.dtype, torch.float32)
        # Added one after the other, which is batch-invariant.
        tokens = keys_Sd[..., : pools * self.size, :].unflatten(-2, (pools, self.size)).to(wide).unbind(-2)
        means_pd = sum_in_order(tokens) / self.size
        normed_pd = self.norm(means_pd.to(keys_Sd.dtype))
        first_p = torch.arange(pools, device=keys_Sd.device) * self.size
        dim = self.rope.dim or keys_Sd.shape[-1]
        cos_sin_p2d = compute_cos_sin(
            self.rope, dim, self.max_positions, first_p, keys_Sd.dtype, numerics=self.norm.numerics
        )
        rotary: dict[str, Any] = {"interleaved": self.rope.interleaved, "numerics": self.norm.numerics}
        if normed_pd.dim() == 2:
            return apply_rotary(normed_pd.unsqueeze(1), cos_sin_p2d, **rotary).squeeze(1)
        return apply_rotary(normed_pd.transpose(0, 1), cos_sin_p2d, **rotary).transpose(0, 1)


class PoolIndexer(nn.Module):
    """Queries, normalized and rotated as the attention's, and one key per token, which pools are the means of.

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
        assert isinstance(attention.indexer, PoolIndexerSpec) and attention.rope is not None
        self.spec, self.rope = attention.indexer, attention.rope
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        channels = self.spec.head_dim
        self.qk = Linear(model.hidden_size, (self.spec.num_heads + 1) * channels, bias=False, **factory)
        self.q_norm = RMSNorm(channels, model.norm_eps, offset=model.norm_offset, **factory)
        self.k_norm = RMSNorm(channels, model.norm_eps, offset=model.norm_offset, **factory)
        self.max_positions = model.max_positions
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(self, x_TD: Tensor, positions: Positions) -> IndexerInputs:
        channels = self.spec.head_dim
        q_TX, k_Td = self.qk(x_TD).split((self.spec.num_heads * channels, channels), dim=-1)
        q_THd = self.q_norm(q_TX.unflatten(-1, (-1, channels)))
        cos_sin = positions.cos_sin(self.rope, channels)
        q_THd = apply_rotary(q_THd, cos_sin, interleaved=self.rope.interleaved, numerics=self.numerics)
        fp32 = torch.promote_types(x_TD.dtype, torch.float32)
        return IndexerInputs(
            q_THd=q_THd,
            k_Td=k_Td,
            weights_TH=torch.full(q_THd.shape[:2], channels**-0.5, device=x_TD.device, dtype=fp32),
            topk=self.spec.top,
            pool=MeanPool(self.spec.pool, self.k_norm, self.rope, self.max_positions),
        )
