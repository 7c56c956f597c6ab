"""Megatron layer specs with our modules: RMSNorm, attention over packed sequences, grouped experts, routing replay.

Shapes: ``t`` slots of this rank, 1 Megatron's batch dimension, H query heads, G key-value heads, N = H + G, d channels
of a key, e of a value, D features.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn

from miles.backends.megatron.batch_invariant_layers import (
    BatchInvariantColumnLinear,
    BatchInvariantMLP,
    BatchInvariantQKVLinear,
    BatchInvariantRowLinear,
    BatchInvariantSelfAttention,
)
from miles.backends.megatron.batch_invariant_moe import BatchInvariantMoeLayer
from miles.backends.megatron.decoder_modules import DecoderMlp, DecoderMoe, use_decoder_modules
from miles.backends.megatron.experts import GroupedExperts
from miles.backends.megatron.mla import PackedMLASelfAttention
from miles.backends.megatron.packed_batch import LayerRoutingReplay, PackedParams
from miles.backends.megatron.residual_streams import (
    ResidualState,
    build_layer_streams,
    build_per_layer_input,
    has_wide_state,
    recompute_layers,
    select_input,
    shares_keys,
)
from miles.backends.megatron.router import BalancedRouter
from miles.backends.megatron.stage_tensors import StageTensors
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.backends.megatron.vision_stage import add_deepstack, build_vision_tower, place_images
from miles.kernels.attention.params import AttentionInputs, AttentionParams
from miles.kernels.fused.rms_norm import rms_norm
from miles.kernels.numerics import FAST
from miles.models.decoder import scale_embedding
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.rope import Positions, apply_rotary
from miles.models.spec import AttentionSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec
from miles.models.vision.tower import VisionTower
from miles.precision.kv_cache import round_kv


class MegatronRMSNorm(nn.Module):
    """RMSNorm that supports sequence parallelism, without Transformer Engine or Apex; the decoder's offset is added to
    its weight.
    """

    def __init__(self, config: DecoderTransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.offset = config.decoder_spec.norm_offset
        self.numerics = config.numerics
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=config.param_device))
        # Megatron reads this attribute.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, numerics=self.numerics)


class PackedCoreAttention(MegatronModule):
    """Attention within each sequence of a packed batch, with the attention backends of the FSDP trainer.

    RoPE is applied here, except for MLA and with batch-invariant numerics.
    """

    def __init__(self, config: DecoderTransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1
        self.numerics = config.numerics
        mixer = config.decoder_spec.layers[self.layer].mixer
        assert isinstance(mixer, AttentionSpec | MlaSpec)
        self.spec = mixer
        scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        self.params = AttentionParams(scale=scale)
        if isinstance(mixer, AttentionSpec):
            self.params = AttentionParams(
                scale=scale,
                window=mixer.window,
                chunk=mixer.chunk,
                softcap=mixer.softcap,
                ignores_spans=mixer.ignores_spans,
            )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        q_tHd, k_tGd = query, key
        v_tGe = value
        if self.numerics.batch_invariant:
            if self.numerics.fp8_kv_cache:
                k_tGd, v_tGe = round_kv(k_tGd), round_kv(v_tGe)
        elif isinstance(self.spec, AttentionSpec):
            q_tHd, k_tGd = _apply_positions(self.spec, q_tHd, k_tGd, packed_seq_params.positions)
        return packed_seq_params.attn_backend(self.layer, AttentionInputs(q_tHd, k_tGd, v_tGe, self.params)).flatten(1)


def _apply_positions(spec: AttentionSpec, q_tHd: Tensor, k_tGd: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
    """Apply RoPE and position-dependent temperature to queries and keys."""
    if spec.rope is not None:
        heads = (q_tHd.shape[1], k_tGd.shape[1])
        cos_sin = positions.cos_sin(spec.rope, spec.head_dim)
        both_tNd, interleaved = torch.cat((q_tHd, k_tGd), 1), spec.rope.interleaved
        qk_tNd = apply_rotary(both_tNd, cos_sin, interleaved=interleaved, numerics=FAST)
        q_tHd, k_tGd = qk_tNd.split(heads, dim=1)
    if spec.temperature is not None:
        q_tHd = (q_tHd * positions.temperature(*spec.temperature)).to(q_tHd.dtype)
    return q_tHd, k_tGd


class ReplayTransformerLayer(TransformerLayer):
    """Megatron's layer, which passes the routing replay and the losses of the micro-batch to its router."""

    def __init__(self, config: DecoderTransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.output_scale: nn.Parameter | None = None
        layer = config.decoder_spec.layers[self.layer_number - 1]
        self.streams = build_layer_streams(config, self.layer_number - 1)
        self.per_layer = build_per_layer_input(config, self.layer_number - 1)
        if layer.post_norms:
            # Megatron enables gradients for its residual additions, also in a forward without them.
            self.bias_dropout_add_exec_handler = nullcontext
        if layer.output_scale:
            empty = torch.empty(1, dtype=config.params_dtype, device=config.param_device)
            self.output_scale = nn.Parameter(empty, requires_grad=False)
        # A recomputed router would see the replay of another micro-batch, and a convolution its sequences.
        is_alone = isinstance(layer.ffn, MlpSpec) and not layer.output_kernel
        self.recompute_mlp = self.recompute_mlp and is_alone

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        context: Tensor | None = None,
        packed_seq_params: PackedParams | None = None,
        **kwargs: Any,
    ) -> Any:
        config = self.config
        assert packed_seq_params is not None and isinstance(config, DecoderTransformerConfig)
        spec, index = config.decoder_spec, self.layer_number - 1
        if isinstance(spec.layers[index].ffn, MoeSpec):
            replay, slot = packed_seq_params.replay, spec.moe_layers.index(index)
            mlp: Any = self.mlp
            mlp.router.router_replay = None if replay is None else LayerRoutingReplay(replay, slot)
            mlp.router.router_loss = packed_seq_params.router_loss
            if isinstance(mlp, DecoderMoe):
                mlp.tokens_s = packed_seq_params.tokens_s
        if isinstance(self.mlp, DecoderMlp | DecoderMoe):
            self.mlp.attn_backend = packed_seq_params.attn_backend
        if self.streams is not None:
            hidden_states = self.streams(self, hidden_states, context, packed_seq_params)
        else:
            out: Any = super().forward(hidden_states, *args, packed_seq_params=packed_seq_params, **kwargs)
            hidden_states = self._finish(out[0], context, packed_seq_params)
        if packed_seq_params.capture is not None and packed_seq_params.capture.wants(index):
            packed_seq_params.capture.store(index, hidden_states, None)
        return hidden_states, context

    def _finish(self, hidden_states: Tensor, context: Tensor | None, packed: PackedParams) -> Tensor:
        """Return the hidden states behind what a layer with one residual stream does after its MLP."""
        index = self.layer_number - 1
        if self.per_layer is not None:
            assert context is not None and isinstance(self.config, DecoderTransformerConfig)
            input_sP = select_input(context, self.config.decoder_spec, index)
            hidden_states = hidden_states + self.per_layer(hidden_states.squeeze(1), input_sP).unsqueeze(1)
        if self.output_scale is not None:
            hidden_states = hidden_states * self.output_scale
        return add_deepstack(hidden_states, packed, index)


class GPTBackbone(GPTModel):
    """Megatron's GPTModel up to the hidden states, without the output layer."""

    def __init__(self, config: DecoderTransformerConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        spec = config.decoder_spec
        if self.pre_process and spec.embedding_scale != 1.0:
            self.embedding.register_forward_hook(lambda *call: scale_embedding(call[-1], spec))
        self.embedding_norm: MegatronRMSNorm | None = None
        if self.pre_process and spec.embedding_norm:
            norm = self.embedding_norm = MegatronRMSNorm(config, spec.hidden_size, spec.norm_eps)
            self.embedding.register_forward_hook(lambda *call: norm(call[-1]))
        self._output_divisor = spec.output_divisor if self.post_process else 1.0
        # Rows of padding have no logits; several tensor-parallel ranks know how many of theirs are.
        self._head_rows = spec.vocab_size if spec.vocab_padding and config.tensor_model_parallel_size == 1 else None
        self.vision: VisionTower | None = None
        if self.pre_process and spec.vision is not None:
            self.vision = build_vision_tower(config)
        self.residual: ResidualState | None = None
        decoder: Any = self.decoder
        if has_wide_state(spec):
            sides = {"first": self.pre_process, "last": self.post_process}
            self.residual = ResidualState(config, end=decoder.layers[-1].layer_number, **sides)
            if self.post_process:
                join = self.residual.join
                decoder.final_layernorm.register_forward_pre_hook(lambda _, args: (join(args[0]),))
        first = get_transformer_layer_offset(config, vp_stage=kwargs.get("vp_stage"))
        self.stage_tensors = StageTensors(config, first=first, end=first + len(decoder.layers))
        if shares_keys(spec):
            decoder._checkpointed_forward = partial(recompute_layers, decoder)

    def forward(
        self, input_ids: Tensor, *args: Any, packed_seq_params: PackedParams | None = None, **kwargs: Any
    ) -> Tensor:
        packed, residual = packed_seq_params, self.residual
        assert packed is not None
        inputs_s1X: Tensor | None = None
        if not self.pre_process:
            received: Any = self.decoder.input_tensor
            x_sSD = self.stage_tensors.receive(received, packed)
            if residual is not None:
                x_sSD, inputs_s1X = residual.receive(x_sSD)
            self.decoder.set_input_tensor(x_sSD)
        elif residual is not None:
            x_s1D = self._place_images(self.embedding(input_ids=input_ids, position_ids=None), packed)
            placeholder_I = None if packed.vision is None else packed.vision.token_I
            x_sSD, inputs_s1X = residual.begin(packed.tokens_s, x_s1D, placeholder_I)
            kwargs["decoder_input"] = x_sSD
        if residual is not None:
            kwargs["extra_block_kwargs"] = {"context": inputs_s1X}
        out = super().forward(input_ids, *args, packed_seq_params=packed, **kwargs)
        if self.post_process:
            return out
        return self.stage_tensors.send(out if residual is None else residual.send(out, inputs_s1X), packed)

    def _preprocess(
        self, *args: Any, packed_seq_params: PackedParams, decoder_input: Tensor | None = None, **kwargs: Any
    ) -> Any:
        how: Any = {"packed_seq_params": packed_seq_params, "decoder_input": decoder_input, **kwargs}
        x_s1D, *others = super()._preprocess(*args, **how)
        return x_s1D if decoder_input is not None else self._place_images(x_s1D, packed_seq_params), *others

    def _place_images(self, x_s1D: Tensor, packed: PackedParams) -> Tensor:
        if self.vision is None:
            return x_s1D
        assert isinstance(self.config, DecoderTransformerConfig)
        return place_images(self.vision, x_s1D, packed, self.config)

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states if self._output_divisor == 1.0 else hidden_states / self._output_divisor

    @torch.no_grad()
    def concatenate_captured(self, capture: HiddenCapture) -> Tensor:
        """Return the outputs of the captured layers side by side, [s, F]; the last stage joins residual streams."""
        states = [capture.state(layer) for layer in capture.layers]
        if self.residual is not None:
            states = [self.residual.join(x_sSD) for x_sSD in states]
        return torch.cat([x_s1D.squeeze(1) for x_s1D in states], -1)

    def head(self) -> Tensor:
        """Return the output weight, this tensor-parallel rank's rows."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        weight = self.output_layer.weight
        assert weight is not None
        return weight[: self._head_rows]

    def add_scalar_head(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        """Add the parameters of a scalar head, such as value_head.weight: zeros in float32."""
        for name, shape in shapes.items():
            module, _, parameter = name.rpartition(".")
            if module not in self._modules:
                self.add_module(module, nn.Module())
            zeros = torch.zeros(shape, dtype=torch.float32, device=device)
            self.get_submodule(module).register_parameter(parameter, nn.Parameter(zeros))


# -- layer specs ----------------------------------------------------------------------------


def build_gpt_backbone(
    config: DecoderTransformerConfig, *, first: bool, last: bool, stage: int | None, rank: int
) -> GPTBackbone:
    """Build the layers of this pipeline ``rank``, its ``stage``-th virtual stage if it has several; uninitialized."""
    decoder = config.decoder_spec
    size = -(-decoder.vocab_rows // config.tensor_model_parallel_size) * config.tensor_model_parallel_size
    layers: Any = _block_spec(config, stage, rank)
    return GPTBackbone(
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


def _block_spec(config: DecoderTransformerConfig, stage: int | None, rank: int) -> TransformerBlockSubmodules:
    specs = [_layer_module_spec(config, i) for i in _stage_layers(config, stage, rank)]
    norm: Any = MegatronRMSNorm if config.decoder_spec.has_final_norm else IdentityOp
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _stage_layers(config: DecoderTransformerConfig, stage: int | None, rank: int) -> range:
    """Return the layers of a pipeline rank, or of one of its virtual stages."""
    count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=rank)
    offset = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
    return range(offset, offset + count)


def _layer_module_spec(config: DecoderTransformerConfig, index: int) -> ModuleSpec:
    """Return Megatron's spec of a layer, with our modules in place of those that do not support packed batches."""
    modules = config.modules
    moe = isinstance(config.decoder_spec.layers[index].ffn, MoeSpec) and index not in modules.ffns
    how = {
        "num_experts": config.num_moe_experts if moe else None,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if config.transformer_engine:
        spec = get_gpt_layer_with_transformer_engine_spec(**how)
    else:
        spec = get_gpt_layer_local_spec(**how, normalization="RMSNorm")
    spec.module = ReplayTransformerLayer
    submodules: Any = spec.submodules
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, MegatronRMSNorm)
    if config.numerics.batch_invariant:
        _use_batch_invariant_modules(submodules, moe=moe, latent=config.multi_latent_attention)
    elif moe:
        submodules.mlp.submodules.router = BalancedRouter
        if submodules.mlp.submodules.experts.module is SequentialMLP:
            submodules.mlp.submodules.experts.module = GroupedExperts
    attention = submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.multi_latent_attention:
        submodules.self_attention.module = PackedMLASelfAttention
    for name in ("q_layernorm", "kv_layernorm" if config.multi_latent_attention else "k_layernorm"):
        if getattr(attention, name) is not IdentityOp:
            setattr(attention, name, MegatronRMSNorm)
    use_decoder_modules(submodules, config, index, norm=MegatronRMSNorm)
    _remove_missing(submodules, config.decoder_spec.layers[index])
    return spec


def _remove_missing(submodules: Any, layer: LayerSpec) -> None:
    """Remove the attention, the MLP or the norms of a layer that has none."""
    if layer.mixer is None:
        submodules.input_layernorm, submodules.self_attention = IdentityOp, IdentityOp
        submodules.self_attn_bda = IdentityFuncOp
    if not layer.has_norms:
        submodules.input_layernorm = submodules.pre_mlp_layernorm = IdentityOp
    if layer.ffn is None:
        submodules.pre_mlp_layernorm, submodules.mlp = IdentityOp, IdentityOp
        submodules.mlp_bda = IdentityFuncOp


def _use_batch_invariant_modules(submodules: Any, *, moe: bool, latent: bool) -> None:
    """Replace the modules of a layer by batch-invariant ones."""
    submodules.mlp = BatchInvariantMoeLayer if moe else BatchInvariantMLP
    attention = submodules.self_attention.submodules
    attention.linear_proj = BatchInvariantRowLinear
    if latent:  # its attention builds the down-projections itself
        for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj"):
            setattr(attention, name, BatchInvariantColumnLinear)
        return
    submodules.self_attention.module = BatchInvariantSelfAttention
    attention.linear_qkv = BatchInvariantQKVLinear
