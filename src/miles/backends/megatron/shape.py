"""A decoder's spec as Megatron's own config, and what of a spec Megatron cannot be."""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch.nn import functional as F

from miles.cluster.layout import Layout
from miles.core.errors import UsageError
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec


@dataclass
class Shape(MLATransformerConfig):
    """Megatron's config, and what our parts of its layers need: the spec, where parameters lie, and whether its layers
    are Transformer Engine's."""

    decoder: DecoderSpec = field(kw_only=True)
    home: torch.device = field(kw_only=True)
    engine: bool = field(default=False, kw_only=True)


def shape_of(
    spec: DecoderSpec, layout: Layout, flags: Mapping[str, Any], *, dtype: torch.dtype, device: torch.device
) -> Shape:
    """What Megatron builds ``spec`` from; ``flags`` are fields of its own. Its refusals are UsageErrors."""
    problem = misfit(spec, layout)
    if problem is not None:
        raise UsageError(problem)
    engine = device.type == "cuda" and find_spec("transformer_engine") is not None
    told = {
        **_decoder(spec),
        **_moe(spec, engine=engine),
        **_parallel(layout, device, interleaved=flags.get("virtual_pipeline_model_parallel_size") is not None),
        **_precision(dtype),
        "calculate_per_token_loss": True,  # the schedules then leave a loss as it is
        "perform_initialization": False,
        "use_cpu_initialization": device.type == "cpu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        # Fusions of other packages, or of kernels that our attention takes the place of.
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        **flags,
    }
    try:
        return Shape(**told, decoder=spec, home=device, engine=engine)
    except (ValueError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"Megatron-Core refuses this model and layout: {error}") from error


def _decoder(spec: DecoderSpec) -> dict[str, Any]:
    mlp = _mlp(spec)
    return {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": mlp.size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "gated_linear_unit": True,
        "activation_func": _ACTIVATIONS[mlp.activation],
        **_attention(spec.layers[0].mixer),
    }


def _attention(mixer: object) -> dict[str, Any]:
    if isinstance(mixer, MlaSpec):
        return {
            "multi_latent_attention": True,
            "num_attention_heads": mixer.num_heads,
            "num_query_groups": mixer.num_heads,
            "kv_channels": mixer.value_dim,
            "q_lora_rank": mixer.query_rank,
            "kv_lora_rank": mixer.kv_rank,
            "qk_head_dim": mixer.nope_dim,
            "qk_pos_emb_head_dim": mixer.rope_dim,
            "v_head_dim": mixer.value_dim,
            "rope_type": "rope",  # ours takes its place
            "rotary_scaling_factor": 1.0,
            "add_bias_linear": False,
            "qk_layernorm": True,
        }
    assert isinstance(mixer, AttentionSpec)
    return {
        "multi_latent_attention": False,
        "num_attention_heads": mixer.num_heads,
        "num_query_groups": mixer.num_kv_heads,
        "kv_channels": mixer.head_dim,
        "add_bias_linear": mixer.output_bias,
        "add_qkv_bias": mixer.qkv_bias and not mixer.output_bias,
        "qk_layernorm": mixer.qk_norm == "head",
    }


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS = {"silu": F.silu, "gelu_tanh": _gelu_tanh}


def _moe(spec: DecoderSpec, *, engine: bool) -> dict[str, Any]:
    moe = spec.moe
    if moe is None:
        return {}
    out: dict[str, Any] = {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.experts_per_token,
        "moe_ffn_hidden_size": moe.size,
        "moe_layer_freq": [int(isinstance(layer.ffn, MoeSpec)) for layer in spec.layers],
        "moe_router_score_function": moe.score,
        # Normalised weights are those of a softmax over the chosen alone.
        "moe_router_pre_softmax": moe.score == "softmax" and not moe.norm_topk_prob,
        "moe_router_topk_scaling_factor": None if moe.scale == 1.0 else moe.scale,
        "moe_router_enable_expert_bias": moe.correction,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32" if moe.wide_router or moe.score == "sigmoid" else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": engine,
    }
    if moe.groups > 1:
        out |= {"moe_router_num_groups": moe.groups, "moe_router_group_topk": moe.kept_groups}
    if moe.shared is not None:
        out |= {"moe_shared_expert_intermediate_size": moe.shared.size, "moe_shared_expert_gate": moe.shared_gate}
    return out


def _parallel(layout: Layout, device: torch.device, *, interleaved: bool) -> dict[str, Any]:
    out: dict[str, Any] = {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor or layout.tensor,
        "sequence_parallel": layout.sequence,
        # Packed micro-batches are of many lengths, which only this dispatcher takes.
        "variable_seq_lengths": layout.pipeline > 1,
        "moe_token_dispatcher_type": "alltoall",
        "deallocate_pipeline_outputs": device.type != "cpu",
    }
    if device.type == "cpu" and interleaved:
        # Over gloo the batched sends of interleaved stages overtake each other and give wrong numbers.
        out |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return out


def _precision(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
    }


# -- what fits ------------------------------------------------------------------------------


def _mlp(spec: DecoderSpec) -> MlpSpec:
    """The MLP of layers without experts; where there are none, one like the experts."""
    found = next((layer.ffn for layer in spec.layers if isinstance(layer.ffn, MlpSpec)), None)
    if found is not None:
        return found
    assert spec.moe is not None
    return MlpSpec(size=spec.moe.size, activation=spec.moe.activation)


def misfit(spec: DecoderSpec, layout: Layout) -> str | None:
    """Why Megatron cannot train this model in this layout, if it cannot: a whole sentence."""
    problem = layout.misfit(spec)
    if problem is not None:
        return problem
    problems = ((i, _odd(layer, spec)) for i, layer in enumerate(spec.layers))
    found = next((f"layer {i} has {problem}" for i, problem in problems if problem is not None), None)
    if found is None:
        found = _uneven(spec) or _indivisible(spec, layout)
    if found is not None:
        return f"the megatron backend cannot train {spec.family}: {found}; use --train-backend fsdp."
    if spec.moe is not None and layout.tensor > 1 and not layout.sequence:
        return "Megatron-Core trains experts under tensor parallelism only with --sequence-parallel: add it."
    return None


def _odd(layer: LayerSpec, spec: DecoderSpec) -> str | None:
    """What of a layer Megatron does not have."""
    mixer, ffn = layer.mixer, layer.ffn
    if isinstance(mixer, MlaSpec):
        if mixer.indexer is not None or mixer.bias or mixer.norm_eps != spec.norm_eps:
            return "latent attention with a scorer, biases or norms of its own kind"
    elif not isinstance(mixer, AttentionSpec):
        return "a mixer other than attention"
    elif mixer.qk_norm not in ("none", "head"):
        return "norms over all heads of a query"
    elif mixer.sinks or mixer.gated:
        return "attention sinks" if mixer.sinks else "a gate on what attention gives"
    if ffn is None or layer.post_norms:
        return "no feed-forward part" if ffn is None else "norms behind its parts"
    if isinstance(ffn, MlpSpec):
        return None if ffn.gated and ffn.activation in _ACTIVATIONS else "an MLP without a gate"
    return _odd_moe(ffn)


def _odd_moe(moe: MoeSpec) -> str | None:
    for wrong, what in (
        (not moe.gated or moe.activation not in _ACTIVATIONS, "experts without a gate"),
        (moe.interleaved or moe.expert_bias or moe.router_bias, "biases or interleaved rows in its experts"),
        (moe.latent is not None, "experts that work in a width of their own"),
        (moe.weigh_input, "experts whose inputs are weighed"),
        (moe.score == "sigmoid" and not moe.norm_topk_prob, "weights of sigmoid experts that are not normalised"),
        (moe.experts_per_token == 1 and moe.norm_topk_prob, "one expert a token, whose weight is always 1"),
        (moe.score == "softmax" and moe.correction, "a bias on the choice of softmax experts"),
        (
            moe.groups > 1 and moe.experts_per_token // moe.kept_groups != moe.group_top,
            "groups of experts that count by other than Megatron's number of their best",
        ),
        (moe.shared is not None and (moe.shared.bias or not moe.shared.gated), "biases in its shared expert"),
    ):
        if wrong:
            return what
    return None


def _uneven(spec: DecoderSpec) -> str | None:
    """What differs between layers, or between a layer's parts, that is one number to Megatron."""
    mixers = {_sizes(layer.mixer) for layer in spec.layers}
    mlps = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MlpSpec)}
    moes = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)}
    if len(mixers) > 1 or len(mlps) > 1 or len(moes) > 1:
        return "its layers are of several sizes"
    mixer = spec.layers[0].mixer
    bias = isinstance(mixer, AttentionSpec) and mixer.output_bias
    if any(mlp.bias != bias for mlp in mlps) or (moes and bias):
        return "attention and MLP do not both have biases on their outputs"
    if isinstance(mixer, AttentionSpec) and bias and not mixer.qkv_bias:
        return "attention has a bias on its outputs alone"
    if spec.norm_offset or spec.embedding_scale != 1.0:
        return "its norms or its embedding are scaled"
    return None


def _sizes(mixer: object) -> object:
    """All that must be alike."""
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.qk_norm, mixer.qkv_bias, mixer.output_bias
    return mixer


def _indivisible(spec: DecoderSpec, layout: Layout) -> str | None:
    """What of a model its ranks cannot share evenly, as Megatron asks for."""
    own = layout.expert_tensor or layout.tensor
    parts = [
        (layer.ffn.size, own if isinstance(layer.ffn, MoeSpec) else layout.tensor) for layer in spec.layers if layer.ffn
    ]
    for layer in spec.layers:
        if isinstance(layer.mixer, MlaSpec):
            parts += [
                (layer.mixer.query_rank or 0, layout.tensor),
                (layer.mixer.kv_rank + layer.mixer.rope_dim, layout.tensor),
            ]
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.shared is not None:
            parts.append((layer.ffn.shared.size, layout.tensor))
    odd = next(((size, ranks) for size, ranks in parts if size % ranks), None)
    return None if odd is None else f"{odd[0]} channels cannot be cut evenly over {odd[1]} tensor ranks"
