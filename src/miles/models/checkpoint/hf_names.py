"""Hugging Face tensor names and shapes of every module kind: attention, recurrent mixers, MLP, mixture of experts.

``HF_NAMES`` is what most families call a tensor; a family overrides the entries in which it differs. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from miles.models.checkpoint.param_slices import HfSlice, ModuleNames, ParamMap, concat_slices
from miles.models.residual_spec import GatedResidualSpec, NgramSpec
from miles.models.spec import (
    AttentionSpec,
    BlockIndexerSpec,
    CompressedAttentionSpec,
    CompressorSpec,
    GatedDeltaNetSpec,
    IndexerSpec,
    KimiDeltaSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    PoolIndexerSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
)

HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "layer": "model.layers.{}",
        "norm": "model.norm",
        "embedding_norm": "model.embed_norm",
        "lm_head": "lm_head",
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
        "attention_conv": "attn_sconv.conv1d",
        "mlp_conv": "mlp_sconv.conv1d",
        "output_scale": "layer_scalar",
        "attention_hyper": "hc_attn",
        "mlp_hyper": "hc_ffn",
        "hyper_head": "hc_head",
        "hyper_norm": "hc_norm",
        "hyper_down": "input_mix_weight_down",
        "hyper_up": "input_mix_weight_up",
        "hyper_inject": "block_inject_weight",
        "ngram": "ple",
        "ngram_table": "ple_embedding.ngram_embedding.shard_{}",
        "ngram_multipliers": "ple_embedding.layer_multipliers",
        "ngram_sizes": "ple_embedding.ngram_heads_vocab_sizes",
        "ngram_offsets": "ple_embedding.ngram_heads_offsets",
        "ngram_key": "key_proj",
        "ngram_value": "value_proj",
        "ngram_key_norm": "norm_key",
        "ngram_query_norm": "norm_query",
        "ngram_conv_norm": "norm_conv",
        "per_layer_gate": "per_layer_input_gate",
        "per_layer_projection": "per_layer_projection",
        "per_layer_norm": "post_per_layer_input_norm",
        "per_layer_table": "model.embed_tokens_per_layer",
        "per_layer_inputs": "model.per_layer_model_projection",
        "per_layer_inputs_norm": "model.per_layer_projection_norm",
        "altup_projection": "model.altup_projections.{}",
        "altup_unembed": "model.altup_unembed_projections.{}",
        "altup": "altup",
        "altup_prediction": "prediction_coefs",
        "altup_correction": "correction_coefs",
        "altup_router": "modality_router",
        "altup_router_norm": "router_norm",
        "altup_scale": "correct_output_scale",
        "laurel": "laurel",
        "laurel_left": "linear_left",
        "laurel_right": "linear_right",
        "laurel_norm": "post_laurel_norm",
        # mixers
        "attention": "self_attn",
        "relative": "self_attn",
        "mla": "self_attn",
        "compressed": "attn",
        "delta": "linear_attn",
        "kda": "self_attn",
        "mamba": "mixer",
        "short_conv": "conv",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "o_proj",
        "q_norm": "q_norm",
        "k_norm": "k_norm",
        "sinks": "sinks",
        "head_gate": "g_proj",
        "relative_weights": "r_proj",
        "k_conv": "k_sconv.conv1d",
        "v_conv": "v_sconv.conv1d",
        "profiles": "rel_logits_proj.proj",
        "q_a": "q_a_proj",
        "q_a_norm": "q_a_layernorm",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "indexer": "indexer",
        "index_q": "wq_b",
        "index_k": "wk",
        "index_k_norm": "k_norm",
        "index_weights": "weights_proj",
        "index_pool_gate": "index_kpool_compress_gate",
        "index_pool_bias": "index_kpool_compress_ape",
        "kv": "wkv",
        "kv_norm": "kv_norm",
        "output_groups": "wo_a",
        "compressor": "compressor",
        "compressor_kv": "wkv",
        "compressor_gate": "wgate",
        "compressor_bias": "ape",
        "compressor_norm": "norm",
        "pool_index_qk": "index_qk_proj",
        "pool_index_q_norm": "q_layernorm",
        "pool_index_k_norm": "k_layernorm",
        "block_indexer": "",
        "block_index_q": "index_q_proj",
        "block_index_k": "index_k_proj",
        "block_index_q_norm": "index_q_norm",
        "block_index_k_norm": "index_k_norm",
        "delta_qkvz": "in_proj_qkvz",
        "delta_ba": "in_proj_ba",
        "delta_qkv": "in_proj_qkv",
        "delta_z": "in_proj_z",
        "delta_b": "in_proj_b",
        "delta_a": "in_proj_a",
        "kda_f_a": "f_a_proj",
        "kda_f_b": "f_b_proj",
        "kda_b": "b_proj",
        "kda_g_a": "g_a_proj",
        "kda_g_b": "g_b_proj",
        "kda_q_conv": "q_conv1d",
        "kda_k_conv": "k_conv1d",
        "kda_v_conv": "v_conv1d",
        "kda_norm": "o_norm",
        "mamba_in": "in_proj",
        "short_conv_in": "in_proj",
        "conv": "conv1d",
        "dt_bias": "dt_bias",
        "a_log": "A_log",
        "skip": "D",
        "gated_norm": "norm",
        "recurrent_out": "out_proj",
        # feed-forward
        "mlp": "mlp",
        "mlp_scale": "global_scale",
        "gate": "gate_proj",
        "up": "up_proj",
        "down": "down_proj",
        "moe": "mlp",
        "router": "gate",
        "correction": "gate.e_score_correction_bias",
        "expert_table": "gate.tid2eid",
        "expert": "experts.{}",
        "expert_gate": "gate_proj",
        "expert_up": "up_proj",
        "expert_down": "down_proj",
        "experts_gate_up": "experts.gate_up_proj",
        "experts_gate": "experts.gate_proj",
        "experts_up": "experts.up_proj",
        "experts_down": "experts.down_proj",
        "experts_gate_up_bias": "experts.gate_up_proj_bias",
        "experts_down_bias": "experts.down_proj_bias",
        "shared": "shared_experts",
        "shared_gate": "shared_expert_gate",
        "weighed_gate": "shared_experts.gate_proj",
        "weighed_up": "shared_experts.up_proj",
        "weighed_down": "shared_experts.down_proj",
        "router_factor": "gate.global_scale",
        "router_scale": "router.scale",
        "expert_scale": "router.per_expert_scale",
        "expert_norm": "pre_feedforward_layernorm_2",
        "expert_post_norm": "post_feedforward_layernorm_2",
        "shared_post_norm": "post_feedforward_layernorm_1",
        "latent_in": "fc1_latent_proj",
        "latent_out": "fc2_latent_proj",
    }
)


def map_attention(spec: AttentionSpec, width: int, module: ModuleNames) -> ParamMap:
    """Softmax attention: queries (with their gates, head by head, if gated), keys and values in one projection."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"q": queries * (2 if spec.gated else 1), "k": keys} | ({} if spec.value_from_key else {"v": keys})
    rows = {"q": queries} if spec.kv_source is not None else rows
    params = module.linear("qkv", rows, width, bias=spec.qkv_bias, fused="qkv")
    params |= module.linear("output", {"o": width}, queries, bias=spec.output_bias)
    if spec.qk_norm in ("head", "all", "head_after_rope"):
        per_head = spec.qk_norm != "all"
        params |= module.tensor("q_norm.weight", "q_norm", (spec.head_dim if per_head else queries,))
        if spec.kv_source is None:
            params |= module.tensor("k_norm.weight", "k_norm", (spec.head_dim if per_head else keys,))
    if spec.head_gate:
        params |= module.linear("gate", {"head_gate": spec.num_heads}, width, bias=False)
    if spec.sinks:
        params |= module.tensor("sinks", "sinks", (spec.num_heads,), suffix="")
    if isinstance(spec.indexer, PoolIndexerSpec):
        params |= _map_pool_indexer(spec.indexer, width, module.submodule("indexer", "indexer"))
    elif spec.indexer is not None:
        own = module.submodule("indexer", "block_indexer")
        params |= _map_block_indexer(spec.indexer, spec.num_kv_heads, width, own)
    return params


def map_relative_attention(spec: RelativeAttentionSpec, width: int, module: ModuleNames) -> ParamMap:
    """Attention with a relative position bias: one convolution of keys and values, which a checkpoint has apart."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    params = module.linear("qkv", {"q": queries, "k": keys, "v": keys}, width, bias=False)
    params |= module.linear("relative", {"relative_weights": spec.num_heads * spec.rank}, width, bias=False)
    shape = (keys, 1, spec.kernel)
    params[f"{module.prefix}.kv_conv.conv"] = concat_slices(*((module.hf_name(f"{x}_conv"), shape) for x in "kv"))
    for name in ("q_norm", "k_norm"):
        params |= module.tensor(f"{name}.weight", name, (spec.head_dim,))
    params |= module.tensor("profiles", "profiles", (spec.rank, spec.extent), suffix="")
    return params | module.linear("output", {"o": width}, queries, bias=False)


def _map_pool_indexer(spec: PoolIndexerSpec, width: int, module: ModuleNames) -> ParamMap:
    params = module.linear("qk", {"pool_index_qk": (spec.num_heads + 1) * spec.head_dim}, width, bias=False)
    for name in ("q_norm", "k_norm"):
        params |= module.tensor(f"{name}.weight", f"pool_index_{name}", (spec.head_dim,))
    return params


def _map_block_indexer(spec: BlockIndexerSpec, kv_heads: int, width: int, module: ModuleNames) -> ParamMap:
    channels = spec.head_dim
    params = module.linear("q", {"block_index_q": kv_heads * channels}, width, bias=False)
    params |= module.linear("k", {"block_index_k": channels}, width, bias=False)
    for name in ("q_norm", "k_norm"):
        params |= module.tensor(f"{name}.weight", f"block_index_{name}", (channels,))
    return params


def map_mla(spec: MlaSpec, width: int, module: ModuleNames) -> ParamMap:
    """Multi-head latent attention: every projection is one tensor in the checkpoint too."""
    queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
    if spec.query_rank is None:
        params = module.linear("q", {"q": queries}, width, bias=False)
    else:
        params = module.linear("q_a", {"q_a": spec.query_rank}, width, bias=spec.bias)
        params |= module.tensor("q_a_norm.weight", "q_a_norm", (spec.query_rank,))
        params |= module.linear("q_b", {"q_b": queries}, spec.query_rank, bias=False)
    params |= module.linear("kv_a", {"kv_a": spec.kv_rank + spec.rope_dim}, width, bias=spec.bias)
    params |= module.tensor("kv_a_norm.weight", "kv_a_norm", (spec.kv_rank,))
    params |= module.linear("kv_b", {"kv_b": spec.num_heads * spec.nope_dim + values}, spec.kv_rank, bias=False)
    params |= module.linear("output", {"o": width}, values, bias=spec.bias)
    if spec.indexer is not None and spec.indexer.source is None:
        assert spec.query_rank is not None, "the DSA indexer reads the query latent"
        params |= _map_indexer(spec.indexer, spec.query_rank, width, module.submodule("indexer", "indexer"))
    return params


def _map_indexer(spec: IndexerSpec, rank: int, width: int, module: ModuleNames) -> ParamMap:
    params = module.linear("wq_b", {"index_q": spec.num_heads * spec.head_dim}, rank, bias=False)
    params |= module.linear("wk", {"index_k": spec.head_dim}, width, bias=False)
    params |= module.tensor("k_norm.weight", "index_k_norm", (spec.head_dim,))
    params |= module.tensor("k_norm.bias", "index_k_norm", (spec.head_dim,), suffix="bias")
    params |= module.linear("weights_proj", {"index_weights": spec.num_heads}, width, bias=False)
    if spec.pool > 1:
        params |= module.tensor("pool_gate.weight", "index_pool_gate", (spec.head_dim, width), suffix="")
        params |= module.tensor("pool_bias", "index_pool_bias", (spec.pool, spec.head_dim), suffix="")
    return params


def map_compressed_attention(spec: CompressedAttentionSpec, width: int, module: ModuleNames) -> ParamMap:
    """Compressed attention: every projection is one tensor in the checkpoint, but those of a compressor are fused."""
    queries, outputs = spec.num_heads * spec.head_dim, spec.output_groups * spec.output_rank
    params = module.linear("q_a", {"q_a": spec.query_rank}, width, bias=False)
    params |= module.tensor("q_a_norm.weight", "q_a_norm", (spec.query_rank,))
    params |= module.linear("q_b", {"q_b": queries}, spec.query_rank, bias=False)
    params |= module.linear("kv", {"kv": spec.head_dim}, width, bias=False)
    params |= module.tensor("kv_norm.weight", "kv_norm", (spec.head_dim,))
    params |= module.tensor("sinks", "sinks", (spec.num_heads,), suffix="")
    params |= module.tensor("output_groups.weight", "output_groups", (outputs, queries // spec.output_groups))
    params |= module.linear("output", {"o": width}, outputs, bias=False)
    own = spec.compressor
    if own is None:
        return params
    params |= _map_compressor(own, spec.head_dim, width, module.submodule("compressor", "compressor"))
    if own.indexer is not None:
        indexer = module.submodule("indexer", "indexer")
        rows = own.indexer.num_heads * own.indexer.head_dim
        params |= indexer.linear("wq_b", {"index_q": rows}, spec.query_rank, bias=False)
        params |= indexer.linear("weights_proj", {"index_weights": own.indexer.num_heads}, width, bias=False)
        params |= _map_compressor(own, own.indexer.head_dim, width, indexer.submodule("compressor", "compressor"))
    return params


def _map_compressor(spec: CompressorSpec, head_dim: int, width: int, module: ModuleNames) -> ParamMap:
    channels = head_dim * (2 if spec.overlap else 1)
    rows = {"compressor_kv": channels, "compressor_gate": channels}
    params = module.linear("kv_gate", rows, width, bias=False)
    params |= module.tensor("position_bias", "compressor_bias", (spec.rate, channels), suffix="")
    return params | module.tensor("norm.weight", "compressor_norm", (head_dim,))


def map_gated_deltanet(spec: GatedDeltaNetSpec, width: int, module: ModuleNames) -> ParamMap:
    """Gated DeltaNet: one projection for queries, keys, values and gates, and one for betas and decay steps.

    Rows are in the checkpoint's order: grouped by key head if it is ``fused``, else one kind after the other.
    """
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    qkv, heads = 2 * keys + values, spec.value_heads
    if spec.fused:
        params = module.linear("qkvz", {"delta_qkvz": qkv + values}, width, bias=False)
        params |= module.linear("ba", {"delta_ba": 2 * heads}, width, bias=False)
    else:
        params = module.linear("qkvz", {"delta_qkv": qkv, "delta_z": values}, width, bias=False)
        params |= module.linear("ba", {"delta_b": heads, "delta_a": heads}, width, bias=False)
    params |= module.tensor("conv", "conv", (qkv, 1, spec.kernel))
    params |= module.tensor("dt_bias", "dt_bias", (heads,), suffix="")
    params |= module.tensor("A_log", "a_log", (heads,), suffix="")
    params |= module.tensor("norm.weight", "gated_norm", (spec.value_dim,))
    return params | module.linear("output", {"recurrent_out": width}, values, bias=False)


def map_kimi_delta(spec: KimiDeltaSpec, width: int, module: ModuleNames) -> ParamMap:
    """Kimi Delta Attention: queries, keys and values in one projection and one convolution, the rest as stored."""
    heads, low = spec.num_heads, spec.head_dim
    inner = heads * low
    params = module.linear("qkv", {"q": inner, "k": inner, "v": inner}, width, bias=False)
    convolved = ("kda_q_conv", "kda_k_conv", "kda_v_conv")
    kernels = concat_slices(*((module.hf_name(key), (inner, 1, spec.kernel)) for key in convolved))
    params[f"{module.prefix}.conv"] = kernels
    params |= module.linear("f_a", {"kda_f_a": low}, width, bias=False)
    params |= module.linear("f_b", {"kda_f_b": inner}, low, bias=False)
    params |= module.tensor("dt_bias", "dt_bias", (inner,), suffix="")
    params |= module.tensor("A_log", "a_log", (heads,) if spec.flat_rates else (1, 1, heads, 1), suffix="")
    params |= module.linear("b", {"kda_b": heads}, width, bias=False)
    params |= module.linear("g_a", {"kda_g_a": low}, width, bias=False)
    params |= module.linear("g_b", {"kda_g_b": inner}, low, bias=False)
    params |= module.tensor("norm.weight", "kda_norm", (low,))
    return params | module.linear("output", {"o": width}, inner, bias=False)


def map_mamba(spec: MambaSpec, width: int, module: ModuleNames) -> ParamMap:
    """Mamba-2: gates, convolved channels and time steps in one projection, as in the checkpoint."""
    inner, heads = spec.num_heads * spec.head_dim, spec.num_heads
    channels = inner + 2 * spec.groups * spec.state_dim
    params = module.linear("input", {"mamba_in": inner + channels + heads}, width, bias=spec.bias)
    params |= module.tensor("conv", "conv", (channels, 1, spec.kernel))
    if spec.conv_bias:
        params |= module.tensor("conv_bias", "conv", (channels,), suffix="bias")
    params |= module.tensor("dt_bias", "dt_bias", (heads,), suffix="")
    params |= module.tensor("A_log", "a_log", (heads,), suffix="")
    params |= module.tensor("skip", "skip", (heads,), suffix="")
    params |= module.tensor("norm.weight", "gated_norm", (inner,))
    return params | module.linear("output", {"recurrent_out": width}, inner, bias=spec.bias)


def map_short_conv(spec: ShortConvSpec, width: int, module: ModuleNames) -> ParamMap:
    """Gated short convolution: both gates and the input in one projection, as in the checkpoint."""
    params = module.linear("input", {"short_conv_in": 3 * spec.channels}, width, bias=spec.bias)
    params |= module.tensor("conv", "conv", (spec.channels, 1, spec.kernel))
    if spec.bias:
        params |= module.tensor("conv_bias", "conv", (spec.channels,), suffix="bias")
    return params | module.linear("output", {"recurrent_out": width}, spec.channels, bias=spec.bias)


def map_altup(streams: int, width: int, module: ModuleNames) -> ParamMap:
    """AltUp: coefficients of predictions and corrections, the router, and the scale of the active stream."""
    params = module.linear("prediction", {"altup_prediction": streams**2}, streams, bias=False)
    params |= module.linear("correction", {"altup_correction": streams}, streams, bias=False)
    params |= module.linear("router", {"altup_router": streams}, width, bias=False)
    params |= module.tensor("router_norm.weight", "altup_router_norm", (width,))
    return params | module.tensor("output_scale", "altup_scale", (width,), suffix="")


def map_laurel(rank: int, width: int, module: ModuleNames) -> ParamMap:
    """LAuReL: two projections and a norm."""
    params = module.linear("left", {"laurel_left": rank}, width, bias=False)
    params |= module.linear("right", {"laurel_right": width}, rank, bias=False)
    return params | module.tensor("norm.weight", "laurel_norm", (width,))


def map_gated_residual(spec: GatedResidualSpec, width: int, module: ModuleNames, *, writes: bool = True) -> ParamMap:
    """Gated hyper-connections: the norm of the streams, two projections of gates, and the weights to write."""
    streams = spec.streams * width
    params = module.tensor("norm.weight", "hyper_norm", (streams,))
    params |= module.tensor("down", "hyper_down", (spec.rank, streams))
    params |= module.tensor("up", "hyper_up", (streams, spec.rank))
    return params | (module.tensor("inject", "hyper_inject", (spec.streams, streams)) if writes else {})


def map_ngram(spec: NgramSpec, streams: int, width: int, module: ModuleNames) -> ParamMap:
    """N-gram embeddings: a table in shards of equal size, the constants of the hash, projections and a convolution."""
    heads, channels = len(spec.head_sizes), streams * width
    rows = -(-spec.rows // spec.shards)
    sizes = [min(rows, spec.rows - start) for start in range(0, spec.rows, rows)]
    table = ((module.hf_name("ngram_table").format(i), (size, spec.dim // heads)) for i, size in enumerate(sizes))
    params: ParamMap = {f"{module.prefix}.table.weight": concat_slices(*table)}
    for name, size in {"multipliers": spec.order, "sizes": heads, "offsets": heads}.items():
        params |= module.tensor(name, f"ngram_{name}", (size,), suffix="", integer=True)
    params |= module.linear("key", {"ngram_key": channels}, spec.dim, bias=False)
    params |= module.linear("value", {"ngram_value": width}, spec.dim, bias=False)
    for name in ("key_norm", "query_norm", "conv_norm"):
        params |= module.tensor(f"{name}.weight", f"ngram_{name}", (channels,))
    return params | module.tensor("conv", "conv", (channels, 1, spec.kernel))


def map_mlp(spec: MlpSpec, width: int, module: ModuleNames) -> ParamMap:
    """MLP: gate and up are one projection."""
    rows = {"gate": spec.size, "up": spec.size} if spec.gated else {"up": spec.size}
    first = module.linear("gate_up" if spec.gated else "up", rows, width, bias=spec.bias, fused="gate_up")
    params = first | module.linear("down", {"down": width}, spec.size, bias=spec.bias)
    return params | (module.tensor("scale", "mlp_scale", (1,), suffix="") if spec.learned_scale else {})


def map_moe(spec: MoeSpec, width: int, module: ModuleNames) -> ParamMap:
    """MoE: ``gate_up`` [E, 2I, D] (``up`` [E, I, D] if not gated), ``down`` [E, D, I], router, shared experts."""
    inner, count = spec.latent or width, spec.num_experts
    params: ParamMap = {}
    if spec.correction:
        row = module.names.get("correction_layout") == "row"
        params |= module.tensor("correction", "correction", (count,), suffix="", row=row)
    if spec.hash_vocab:
        shape = (spec.hash_vocab, spec.experts_per_token)
        params |= module.tensor("expert_table", "expert_table", shape, suffix="", integer=True)
    rows = 2 * spec.size if spec.gated else spec.size
    name = "gate_up" if spec.gated else "up"
    if "stacked" in module.names:
        params |= _map_stacked_experts(spec, name, (count, rows, inner), module)
    else:
        params |= _map_separate_experts(spec, name, inner, module)
    params |= module.linear("router", {"router": count + spec.weighed_shared}, width, bias=spec.router_bias)
    if spec.weighed_shared:
        params |= module.tensor("shared_experts.factor", "router_factor", (1,), suffix="")
        params |= _map_shared_experts(spec, width, module)
    if spec.latent is not None:
        params |= module.linear("into", {"latent_in": spec.latent}, width, bias=spec.latent_bias)
        params |= module.linear("outof", {"latent_out": width}, spec.latent, bias=spec.latent_bias)
    if spec.shared is not None:
        params |= map_mlp(spec.shared, width, module.submodule("shared", "shared"))
        if spec.shared_gate:
            params |= module.tensor("shared_gate.weight", "shared_gate", (1, width))
    if spec.beside_mlp:
        params |= module.tensor("router_scale", "router_scale", (width,), suffix="")
        params |= module.tensor("expert_scale", "expert_scale", (count,), suffix="")
        for name in ("expert_norm", "expert_post_norm", "shared_post_norm"):
            params |= module.tensor(f"{name}.weight", name, (width,))
    return params


def _map_shared_experts(spec: MoeSpec, width: int, module: ModuleNames) -> ParamMap:
    """Shared experts that the router weighs, stacked; gates and ups are one tensor if the family names it."""
    prefix = f"{module.prefix}.shared_experts"
    count, size = spec.weighed_shared, spec.size
    if "weighed_gate_up" in module.names:
        params = module.tensor("shared_experts.gate_up", "weighed_gate_up", (count, 2 * size, width), suffix="")
    else:
        half, parts = (count, size, width), (("weighed_gate", (0, size)), ("weighed_up", (size, 2 * size)))
        slices = (HfSlice(module.hf_name(key, ""), half, 0, count, matrix_rows=rows) for key, rows in parts)
        params = {f"{prefix}.gate_up": tuple(slices)}
    return params | module.tensor("shared_experts.down", "weighed_down", (count, width, size), suffix="")


def _map_stacked_experts(spec: MoeSpec, name: str, shape: tuple[int, int, int], module: ModuleNames) -> ParamMap:
    """One tensor for all experts; the role ``stacked`` is ``transposed`` if inputs come before outputs in it, and
    ``separate`` if gates and ups are two tensors.
    """
    count, rows, inner = shape
    if module.names["stacked"] == "separate":
        assert spec.gated and not spec.expert_bias, "no family stores such experts without gates or with biases"
        gates, ups = (module.hf_name(f"experts_{key}", "") for key in ("gate", "up"))
        half = (count, spec.size, inner)
        first = HfSlice(gates, half, 0, count, matrix_rows=(0, spec.size))
        second = HfSlice(ups, half, 0, count, matrix_rows=(spec.size, rows))
        params: ParamMap = {f"{module.prefix}.{name}": (first, second)}
        return params | module.tensor("down", "experts_down", (count, inner, spec.size), suffix="")
    transposed = module.names["stacked"] == "transposed"
    params = module.tensor(name, f"experts_{name}", shape, suffix="", transposed=transposed)
    params |= module.tensor("down", "experts_down", (count, inner, spec.size), suffix="", transposed=transposed)
    if spec.expert_bias:
        params |= module.tensor(f"{name}_bias", f"experts_{name}_bias", (count, rows), suffix="")
        params |= module.tensor("down_bias", "experts_down_bias", (count, inner), suffix="")
    return params


def _map_separate_experts(spec: MoeSpec, name: str, inner: int, module: ModuleNames) -> ParamMap:
    """Separate tensors for each expert, and for its gate and up projections."""
    assert not spec.expert_bias, "no family stores expert biases one expert a tensor"
    first: list[HfSlice] = []
    down: list[HfSlice] = []
    keys = ("gate", "up") if spec.gated else ("up",)
    for e in range(spec.num_experts):
        prefix = f"{module.hf_prefix}.{module.names['expert'].format(e)}"
        tensors = ((f"{prefix}.{module.names[f'expert_{key}']}.weight", (spec.size, inner)) for key in keys)
        first += concat_slices(*tensors, expert=e)
        down += concat_slices((f"{prefix}.{module.names['expert_down']}.weight", (inner, spec.size)), expert=e)
    return {f"{module.prefix}.{name}": tuple(first), f"{module.prefix}.down": tuple(down)}
