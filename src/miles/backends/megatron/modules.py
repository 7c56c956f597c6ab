"""What of a Megatron layer is ours: its norms, its attention over packed sequences, and how its router hears a replay.

Shapes: ``t`` slots of this rank, 1 the batch that Megatron wants, H query heads, G key-value heads, N = H + G, d
channels of a key, e of a value, D features.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from miles.backends.megatron.experts import Experts
from miles.backends.megatron.latent import Latent
from miles.backends.megatron.packed import Packed, Told
from miles.backends.megatron.shape import Shape
from miles.kernels.norm import rms_norm
from miles.kernels.terms import Terms
from miles.models.rope import Positions, rotate
from miles.models.spec import AttentionSpec, MlaSpec, MoeSpec


class Norm(nn.Module):
    """Root-mean-square normalisation that also runs where tensor ranks share tokens, with or without extra packages."""

    def __init__(self, config: Shape, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=config.home))
        # Megatron's own bookkeeping reads this mark.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class CoreAttention(MegatronModule):
    """Attention within each sequence of a packed batch, the same lines as the embedded trainer's.

    Queries and keys come without their positions and are rotated here, but for those of latent attention.
    """

    def __init__(self, config: Shape, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        mixer = config.decoder.layers[self.layer].mixer
        assert isinstance(mixer, AttentionSpec | MlaSpec)
        self.spec = mixer
        scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        self.terms = Terms(scale=scale)
        if isinstance(mixer, AttentionSpec):
            self.terms = Terms(scale=scale, window=mixer.window, chunk=mixer.chunk, softcap=mixer.softcap)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Packed | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        q_tHd, k_tGd = query, key
        if isinstance(self.spec, AttentionSpec):
            q_tHd, k_tGd = _placed(self.spec, q_tHd, k_tGd, packed_seq_params.at)
        return packed_seq_params.attend(self.layer, q_tHd, k_tGd, value, self.terms).flatten(1)


def _placed(spec: AttentionSpec, q_tHd: Tensor, k_tGd: Tensor, at: Positions) -> tuple[Tensor, Tensor]:
    """Queries and keys that know where they stand."""
    if spec.rope is not None:
        heads = (q_tHd.shape[1], k_tGd.shape[1])
        rotation = at.rotation(spec.rope, spec.head_dim)
        qk_tNd = rotate(torch.cat((q_tHd, k_tGd), 1), rotation, interleaved=spec.rope.interleaved)
        q_tHd, k_tGd = qk_tNd.split(heads, dim=1)
    if spec.temperature is not None:
        q_tHd = (q_tHd * at.temperature(*spec.temperature)).to(q_tHd.dtype)
    return q_tHd, k_tGd


class Layer(TransformerLayer):
    """Megatron's layer, whose router is told what to replay in the micro-batch at hand."""

    def forward(self, *args: Any, packed_seq_params: Packed | None = None, **kwargs: Any) -> Any:
        config = self.config
        assert packed_seq_params is not None and isinstance(config, Shape)
        if isinstance(config.decoder.layers[self.layer_number - 1].ffn, MoeSpec):
            replay, slot = packed_seq_params.replay, config.decoder.moe_layers.index(self.layer_number - 1)
            mlp: Any = self.mlp
            mlp.router.router_replay = None if replay is None else Told(replay, slot)
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)


class Trunk(GPTModel):
    """Megatron's model up to the hidden states that the output weight turns into logits."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def head(self) -> Tensor:
        """The output weight, this tensor rank's rows."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight


# -- the specs Megatron builds from ---------------------------------------------------------


def trunk_of(config: Shape, *, first: bool, last: bool, stage: int | None, rank: int) -> Trunk:
    """A run of layers of this pipeline ``rank``, its ``stage``-th where it has several; uninitialised."""
    decoder = config.decoder
    size = -(-decoder.vocab_size // config.tensor_model_parallel_size) * config.tensor_model_parallel_size
    layers: Any = _block(config, stage, rank)
    return Trunk(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=size,
        max_sequence_length=decoder.max_positions,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=decoder.tie_embeddings,
        position_embedding_type="none",
        vp_stage=stage,
    )


def _block(config: Shape, stage: int | None, rank: int) -> TransformerBlockSubmodules:
    count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
    offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
    specs = [_layer(config, i) for i in range(offset, offset + count)]
    norm: Any = Norm
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _layer(config: Shape, index: int) -> ModuleSpec:
    """Megatron's own spec of a layer, with our parts in place of those that know no packed batch."""
    moe = isinstance(config.decoder.layers[index].ffn, MoeSpec)
    how = {
        "num_experts": config.num_moe_experts if moe else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if config.engine:
        spec = get_gpt_layer_with_transformer_engine_spec(**how)
    else:
        spec = get_gpt_layer_local_spec(**how, normalization="RMSNorm")
    spec.module = Layer
    parts: Any = spec.submodules
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(parts, name) is not IdentityOp:
            setattr(parts, name, Norm)
    if moe and parts.mlp.submodules.experts.module is SequentialMLP:
        parts.mlp.submodules.experts.module = Experts
    attention = parts.self_attention.submodules
    attention.core_attention = CoreAttention
    if config.multi_latent_attention:
        parts.self_attention.module = Latent
    for name in ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, Norm)
    return spec
