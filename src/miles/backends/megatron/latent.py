"""Latent attention as Megatron holds it, over a packed batch and with our own positions.

Shapes: ``t`` slots of this rank, ``s`` those of them that are its own where tensor ranks share tokens, 1 the batch that
Megatron wants, D features, H heads of this rank, R query rank, K key-value rank, n and r channels of a head without and
with a position, d = n + r, v channels of a value.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from miles.backends.megatron.packed import Packed
from miles.backends.megatron.shape import Shape
from miles.models.rope import rotate
from miles.models.spec import MlaSpec


class Latent(MLASelfAttention):
    """Megatron's projections and norms; queries and keys are rotated by the positions of the micro-batch."""

    def __init__(self, config: Shape, *args: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        mixer = config.decoder.layers[layer_number - 1].mixer
        assert isinstance(mixer, MlaSpec)
        self.spec = mixer

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Packed | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, and the latents they come from."""
        assert packed_seq_params is not None and inference_context is None and inference_params is None
        spec, rope = self.spec, self.spec.rope
        rotation = packed_seq_params.at.rotation(rope, spec.rope_dim)
        query_s1R = self._queries_from(hidden_states)
        latent_s1K, k_t1r = self._keys_from(hidden_states)
        project = self.linear_q_proj if spec.query_rank is None else self.linear_q_up_proj
        q_tHd = project(query_s1R)[0].squeeze(1).unflatten(-1, (-1, spec.head_dim))
        q_tHn, q_tHr = q_tHd.split((spec.nope_dim, spec.rope_dim), dim=-1)
        kv_tHx = self.linear_kv_up_proj(latent_s1K)[0].squeeze(1).unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        k_tHn, v_tHv = kv_tHx.split((spec.nope_dim, spec.value_dim), dim=-1)
        q_tHr = rotate(q_tHr, rotation, interleaved=rope.interleaved)
        k_tHr = rotate(k_t1r, rotation, interleaved=rope.interleaved).expand(-1, k_tHn.shape[1], -1)
        return torch.cat((q_tHn, q_tHr), -1), torch.cat((k_tHn, k_tHr), -1), v_tHv, query_s1R, latent_s1K

    def _queries_from(self, x_s1D: Tensor) -> Tensor:
        """What queries are made of: their latent, normalised, or the input itself."""
        if self.spec.query_rank is None:
            return x_s1D
        norm: Any = self.q_layernorm
        return norm(self._whole(self.linear_q_down_proj(x_s1D)[0], self.spec.query_rank)[0])

    def _keys_from(self, x_s1D: Tensor) -> tuple[Tensor, Tensor]:
        """The latent of keys and values, normalised, and the channels of keys that carry the position."""
        sizes = (self.spec.kv_rank, self.spec.rope_dim)
        own = self.linear_kv_down_proj(x_s1D)[0]
        cut = own.size(-1) != sum(sizes)
        latent, both = self._whole(own, sum(sizes))
        latent_s1K = latent.split(sizes, dim=-1)[0]
        k_t1r = both.split(sizes, dim=-1)[1]
        # Every head uses these channels, and a rank has some of the heads: their gradient is the sum over the ranks.
        if self.config.sequence_parallel and not cut:
            k_t1r = gather_from_sequence_parallel_region(k_t1r)
        else:
            k_t1r = copy_to_tensor_model_parallel_region(k_t1r)
        norm: Any = self.kv_layernorm
        return norm(latent_s1K), k_t1r

    def _whole(self, own: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """All channels: of the slots that are this tensor rank's, and of those its projection gave."""
        if own.size(-1) == width:
            return own, own
        whole = gather_from_tensor_model_parallel_region(own)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(whole), whole
        return whole, whole
