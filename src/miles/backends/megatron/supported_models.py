"""Models that the Megatron backend supports, from their specs. No torch and no Megatron, so that rules can ask."""

from __future__ import annotations

from miles.cluster.parallel_dims import ParallelDims
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations of gated MLPs and experts."""


def check_megatron_support(spec: DecoderSpec, layout: ParallelDims) -> str | None:
    """Return why Megatron cannot train this model in this layout (a sentence), or None if it can."""
    problem = layout.find_model_problem(spec)
    if problem is not None:
        return problem
    if spec.vision is not None:
        return f"the megatron backend cannot train {spec.family}: it has a vision tower; use --train-backend fsdp."
    problems = ((i, _unsupported_part(layer, spec)) for i, layer in enumerate(spec.layers))
    found = next((f"layer {i} has {problem}" for i, problem in problems if problem is not None), None)
    if found is None:
        found = _non_uniform(spec) or _indivisible(spec, layout)
    if found is not None:
        return f"the megatron backend cannot train {spec.family}: {found}; use --train-backend fsdp."
    if spec.moe is not None and layout.tensor > 1 and not layout.sequence:
        return "Megatron-Core trains experts under tensor parallelism only with --sequence-parallel: add it."
    return None


def check_batch_invariant_support(spec: DecoderSpec, layout: ParallelDims) -> str | None:
    """Return why Megatron has no batch-invariant layers for this model in this layout (a sentence), or None."""
    keys = [layer.mixer.num_kv_heads for layer in spec.layers if isinstance(layer.mixer, AttentionSpec)]
    if any(count % layout.tensor for count in keys):
        return (
            "--parity exact with --train-backend megatron needs a number of key-value heads that is a multiple of "
            f"--tensor-model-parallel-size {layout.tensor}, but the model has {min(keys)}; use --train-backend fsdp."
        )
    if spec.moe is not None and layout.expert_tensor not in (None, layout.tensor):
        return (
            "--parity exact needs experts that are sharded over tensor-parallel ranks as in the engine; remove "
            f"--expert-tensor-parallel-size {layout.expert_tensor}."
        )
    if spec.quantization is not None:
        return (
            f"--parity exact does not work with --train-precision {spec.quantization.format.name} under "
            "--train-backend megatron, whose FP8 is Transformer Engine's; use --train-backend fsdp."
        )
    return None


def _unsupported_part(layer: LayerSpec, spec: DecoderSpec) -> str | None:
    """Return the part of a layer that Megatron does not support, or None."""
    if (part := _unsupported_mixer(layer, spec)) is not None:
        return part
    ffn = layer.ffn
    if ffn is None or layer.post_norms:
        return "no feed-forward part" if ffn is None else "post norms"
    if isinstance(ffn, MlpSpec):
        if ffn.activation not in ACTIVATIONS:
            return f"an MLP with the activation {ffn.activation}"
        return None if ffn.gated else "an ungated MLP"
    return _unsupported_moe(ffn)


def _unsupported_mixer(layer: LayerSpec, spec: DecoderSpec) -> str | None:
    mixer = layer.mixer
    if isinstance(mixer, MlaSpec):
        if mixer.indexer is not None or mixer.bias or mixer.norm_eps != spec.norm_eps or mixer.temperature is not None:
            return "MLA with an indexer, biases, its own norm epsilon or query temperature"
        return "MLA without RoPE" if mixer.rope is None else None
    if not isinstance(mixer, AttentionSpec):
        return "a mixer other than attention"
    if mixer.qk_norm not in ("none", "head"):
        return "QK-norm over all heads or after RoPE"
    if mixer.indexer is not None:
        return "block-sparse attention"
    if mixer.sinks or mixer.gated or mixer.head_gate:
        return "attention sinks" if mixer.sinks else "a gate on the attention output"
    return None


def _unsupported_moe(moe: MoeSpec) -> str | None:
    for unsupported, part in (
        (not moe.gated, "ungated experts"),
        (moe.activation not in ACTIVATIONS, f"experts with the activation {moe.activation}"),
        (moe.interleaved or moe.expert_bias or moe.router_bias, "biases or interleaved rows in its experts"),
        (moe.latent is not None, "latent experts"),
        (moe.weigh_input, "router weights on the experts' inputs"),
        (moe.score == "sigmoid" and not moe.norm_topk_prob, "sigmoid router weights that are not normalized"),
        (moe.experts_per_token == 1 and moe.norm_topk_prob, "one expert per token with normalized weights"),
        (moe.score == "softmax" and moe.correction, "a correction bias on a softmax router"),
        (
            moe.groups > 1 and moe.experts_per_token // moe.kept_groups != moe.group_top,
            "expert groups scored by another number of experts than in Megatron",
        ),
        (moe.shared is not None and (moe.shared.bias or not moe.shared.gated), "biases in its shared expert"),
    ):
        if unsupported:
            return part
    return None


def _non_uniform(spec: DecoderSpec) -> str | None:
    """Return what differs between layers, or within a layer, but is a single setting in Megatron."""
    mixers = {_sizes(layer.mixer) for layer in spec.layers}
    mlps = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MlpSpec)}
    moes = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeSpec)}
    if len(mixers) > 1 or len(mlps) > 1 or len(moes) > 1:
        return "its layers have different sizes"
    mixer = spec.layers[0].mixer
    bias = isinstance(mixer, AttentionSpec) and mixer.output_bias
    if any(mlp.bias != bias for mlp in mlps) or (moes and bias):
        return "attention and MLP do not both have biases on their outputs"
    if isinstance(mixer, AttentionSpec) and bias and not mixer.qkv_bias:
        return "attention has a bias on its outputs alone"
    if spec.norm_offset or spec.embedding_scale != 1.0:
        return "its norms or embedding are scaled"
    return None


def _sizes(mixer: object) -> object:
    """Return everything that must be equal in all layers."""
    if isinstance(mixer, AttentionSpec):
        return mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.qk_norm, mixer.qkv_bias, mixer.output_bias
    return mixer


def _indivisible(spec: DecoderSpec, layout: ParallelDims) -> str | None:
    """Return which size cannot be divided evenly among the ranks, as Megatron requires."""
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
    return None if odd is None else f"{odd[0]} channels cannot be divided evenly among {odd[1]} tensor-parallel ranks"
