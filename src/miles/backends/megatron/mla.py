"""Multi-head latent attention (MLA) in Megatron, over a packed batch and with our RoPE.

Shapes: ``t`` slots of this rank, ``s`` those of them that are its own under sequence parallelism, 1 Megatron's batch
dimension, D features, H heads of this rank, R query rank, K key-value rank, n and r channels of a head without and with
RoPE, d = n + r, v channels of a value.
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

from miles.backends.megatron.batch_invariant_layers import BatchInvariantLinear
from miles.backends.megatron.packed_batch import PackedParams
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.models.layers.rope import apply_rotary
from miles.models.spec import MlaSpec


class PackedMLASelfAttention(MLASelfAttention):
    """Megatron's projections and norms; RoPE uses the positions of the micro-batch."""

    def __init__(self, config: DecoderTransformerConfig, *args: Any, layer_number: int, **kwargs: Any) -> None:
        super().__init__(config, *args, layer_number=layer_number, **kwargs)
        mixer = config.decoder_spec.layers[layer_number - 1].mixer
        assert isinstance(mixer, MlaSpec)
        self.spec = mixer
        self.numerics = config.numerics
        if config.numerics.batch_invariant:
            # As in an engine: every tensor-parallel rank has them in full.
            if mixer.query_rank is not None:
                self.linear_q_down_proj = BatchInvariantLinear(config, config.hidden_size, mixer.query_rank)
            self.linear_kv_down_proj = BatchInvariantLinear(config, config.hidden_size, mixer.kv_rank + mixer.rope_dim)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values of this rank's heads, and the latents they come from."""
        assert packed_seq_params is not None and inference_context is None and inference_params is None
        spec, rope = self.spec, self.spec.rope
        assert rope is not None
        cos_sin = packed_seq_params.positions.cos_sin(rope, spec.rope_dim)
        query_s1R = self._query_latent(hidden_states)
        latent_s1K, k_t1r = self._kv_latent(hidden_states)
        project = self.linear_q_proj if spec.query_rank is None else self.linear_q_up_proj
        q_tHd = project(query_s1R)[0].squeeze(1).unflatten(-1, (-1, spec.head_dim))
        q_tHn, q_tHr = q_tHd.split((spec.nope_dim, spec.rope_dim), dim=-1)
        kv_tHx = self.linear_kv_up_proj(latent_s1K)[0].squeeze(1).unflatten(-1, (-1, spec.nope_dim + spec.value_dim))
        k_tHn, v_tHv = kv_tHx.split((spec.nope_dim, spec.value_dim), dim=-1)
        q_tHr = apply_rotary(q_tHr, cos_sin, interleaved=rope.interleaved, numerics=self.numerics)
        k_t1r = apply_rotary(k_t1r, cos_sin, interleaved=rope.interleaved, numerics=self.numerics)
        k_tHr = k_t1r.expand(-1, k_tHn.shape[1], -1)
        return torch.cat((q_tHn, q_tHr), -1), torch.cat((k_tHn, k_tHr), -1), v_tHv, query_s1R, latent_s1K

    def _query_latent(self, x_s1D: Tensor) -> Tensor:
        """Return the normalized query latent, or the input itself without one."""
        if self.spec.query_rank is None:
            return x_s1D
        norm: Any = self.q_layernorm
        return norm(self._gather_channels(self.linear_q_down_proj(x_s1D)[0], self.spec.query_rank)[0])

    def _kv_latent(self, x_s1D: Tensor) -> tuple[Tensor, Tensor]:
        """Return the normalized key-value latent, and the rotary channels of the keys."""
        sizes = (self.spec.kv_rank, self.spec.rope_dim)
        own = self.linear_kv_down_proj(x_s1D)[0]
        sharded = own.size(-1) != sum(sizes)
        latent, both = self._gather_channels(own, sum(sizes))
        latent_s1K = latent.split(sizes, dim=-1)[0]
        k_t1r = both.split(sizes, dim=-1)[1]
        # Every head uses these channels, and a rank has some of the heads: their gradient is summed over the ranks.
        if self.config.sequence_parallel and not sharded:
            k_t1r = gather_from_sequence_parallel_region(k_t1r)
        else:
            k_t1r = copy_to_tensor_model_parallel_region(k_t1r)
        norm: Any = self.kv_layernorm
        return norm(latent_s1K), k_t1r

    def _gather_channels(self, own: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return all channels: of this tensor-parallel rank's slots, and of the projection's output slots."""
        if own.size(-1) == width:
            return own, own
        full = gather_from_tensor_model_parallel_region(own)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(full), full
        return full, full
