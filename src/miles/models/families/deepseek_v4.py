"""DeepSeek-V4: attention to a window and to compressed keys (CSA, HCA), hash routing, and hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.kernels.activation_kinds import limited_swiglu
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.residual_spec import HyperConnectionSpec
from miles.models.spec import (
    CompressedAttentionSpec,
    CompressorSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    RopeSpec,
    WindowIndexerSpec,
)

_FAMILY = "deepseek_v4"
# transformers' defaults for a config that does not name them.
_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "compress_rope_theta": 160000.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}
_ROTATED_PART = 64 / 512
_HASH_LAYERS = 3
_THETA = 10_000.0
_SLIDING = "sliding_attention"
_CSA = "compressed_sparse_attention"
_HCA = "heavily_compressed_attention"
_RATES = {_CSA: 4, _HCA: 128}
# Kinds of layers in ``compress_ratios`` of published configs.
_KINDS = {0: _SLIDING, _RATES[_CSA]: _CSA, _RATES[_HCA]: _HCA}
_HASH, _MOE = "hash_moe", "moe"

_NAMES = {
    "embedding": "embed",
    "layer": "layers.{}",
    "norm": "norm",
    "lm_head": "head",
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q_a": "wq_a",
    "q_a_norm": "q_norm",
    "q_b": "wq_b",
    "o": "wo_b",
    "sinks": "attn_sink",
    "moe": "ffn",
    "correction": "gate.bias",
    "gate": "w1",
    "up": "w3",
    "down": "w2",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}
# What transformers calls tensors that it saves; and scales of FP8 weights as others call them.
_PREFIXES = {
    "model.embed_tokens.": "embed.",
    "model.hc_head.hc_": "hc_head_",
    "model.": "",
    "lm_head.": "head.",
}
_RENAMES = {".attn.norm.": ".attn.kv_norm.", ".scale": ".weight_scale_inv"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The decoder; multi-token-prediction layers are not computed here."""
    reader = ConfigReader(_rename_keys({**_DEFAULTS, **config}), _FAMILY)
    _require_supported(reader)
    common = reader.common_args()
    moe, hashed = _read_experts(reader), _read_hash_layers(reader)
    hyper = HyperConnectionSpec(
        streams=reader.positive_int("hc_mult"),
        iterations=reader.positive_int("hc_sinkhorn_iters"),
        eps=reader.number("hc_eps", 1e-6),
        learned_join=True,
    )
    kinds = reader.layer_types(lambda i: _HCA if i < 2 or i % 2 == 0 else _CSA, _SLIDING, _CSA, _HCA)
    mixers = _read_attention(reader)
    by_hash = replace(moe, correction=False, hash_vocab=common["vocab_size"])
    layers = (
        LayerSpec(mixer=mixers.get(kind), ffn=by_hash if is_hash else moe, hyper=hyper)
        for kind, is_hash in zip(kinds, hashed, strict=False)  # a list of another length was rejected
    )
    return reader.build_spec(common, layers)


def _rename_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with transformers' names of keys; those of published configs are older."""
    out = dict(config)
    ratios = out.pop("compress_ratios", None)
    if out.get("layer_types") is None and ratios is not None:
        kinds = [_KINDS.get(ratio, f"compression by {ratio}") for ratio in ratios]
        out["layer_types"] = kinds[: out["num_hidden_layers"]]  # those of MTP layers follow
    out["compress_rates"] = {**_RATES, **(out.get("compress_rates") or {})}
    for kind, key in ((_CSA, "compress_rate_csa"), (_HCA, "compress_rate_hca")):
        out["compress_rates"][kind] = out.get(key) or out["compress_rates"][kind]
    if out.get("partial_rotary_factor") is None:
        rotated = out.get("qk_rope_head_dim")
        out["partial_rotary_factor"] = _ROTATED_PART if rotated is None else rotated / out["head_dim"]
    return _nest_rope(out)


def _nest_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with RoPE parameters of layers with a window alone (``main``) and of others (``compress``)."""
    given = config.pop("rope_scaling", None) or config.get("rope_parameters") or {}
    if isinstance(given, Mapping) and not {"main", "compress"} <= given.keys():
        main = {"rope_type": "default", "rope_theta": config.get("rope_theta", _THETA)}
        compress = {**given, "rope_theta": config["compress_rope_theta"]}
        if compress.get("rope_type", compress.get("type")) == "yarn":
            compress.setdefault("attention_factor", 1.0)
        given = {"main": main, "compress": compress}
    return config | {"rope_parameters": given}


def _require_supported(reader: ConfigReader) -> None:
    """Reject options that are not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("attention_bias", False)
    reader.require("mlp_bias", False)
    reader.require("num_key_value_heads", 1)
    reader.require("n_shared_experts", 1)
    reader.require("norm_topk_prob", True)
    reader.require("scoring_func", "sqrtsoftplus")
    reader.require("expert_dtype", None, "fp8", "bf16")


def _read_experts(reader: ConfigReader) -> MoeSpec:
    size = reader.positive_int("moe_intermediate_size")
    limit = reader.optional_positive("swiglu_limit")
    if limit is None:
        reader.reject("swiglu_limit", "is missing or no number above 0, which is not implemented")
    activation = limited_swiglu(limit or 1.0)
    return MoeSpec(
        **reader.expert_counts("n_routed_experts"),
        size=size,
        norm_topk_prob=True,
        score="sqrtsoftplus",
        correction=True,
        scale=reader.number("routed_scaling_factor", 1.5),
        activation=activation,
        shared=MlpSpec(size=size, activation=activation),
    )


def _read_hash_layers(reader: ConfigReader) -> Sequence[bool]:
    """Read which layers look experts up by the token."""
    count, kinds = reader.positive_int("num_hidden_layers"), reader.config.get("mlp_layer_types")
    if kinds is None:
        first = reader.layer_index("num_hash_layers", _HASH_LAYERS)
        return [i < first for i in range(count)]
    if len(kinds) < count or set(kinds) - {_HASH, _MOE}:
        reader.reject("mlp_layer_types", f"is {kinds!r}, but must name {count} layers {_HASH!r} or {_MOE!r}")
        return [False] * count
    return [kind == _HASH for kind in kinds[:count]]


def _read_attention(reader: ConfigReader) -> dict[str, CompressedAttentionSpec]:
    """Read the attention of each kind of layer."""
    heads, groups = reader.positive_int("num_attention_heads"), reader.positive_int("o_groups")
    if heads % groups:
        reader.reject("o_groups", f"is {groups}, which does not divide the {heads} attention heads")
        groups = 1
    sliding = CompressedAttentionSpec(
        num_heads=heads,
        head_dim=reader.positive_int("head_dim"),
        query_rank=reader.positive_int("q_lora_rank"),
        rope=_read_rope(reader, "main"),
        window=reader.positive_int("sliding_window"),
        output_groups=groups,
        output_rank=reader.positive_int("o_lora_rank"),
    )
    indexer = WindowIndexerSpec(
        num_heads=reader.positive_int("index_n_heads"),
        head_dim=reader.positive_int("index_head_dim"),
        top=reader.positive_int("index_topk"),
    )
    rope = _read_rope(reader, "compress")
    if indexer.head_dim < (rope.dim or 0):
        reader.reject("index_head_dim", f"is {indexer.head_dim}, less than the {rope.dim} channels that RoPE rotates")
    rates = _read_rates(reader)
    compressors = {
        _CSA: CompressorSpec(rate=rates[_CSA], overlap=True, indexer=indexer),
        _HCA: CompressorSpec(rate=rates[_HCA], overlap=False),
    }
    mixers = {kind: replace(sliding, rope=rope, compressor=own) for kind, own in compressors.items()}
    return {_SLIDING: sliding} | mixers


def _read_rope(reader: ConfigReader, layer_type: str) -> RopeSpec:
    head_dim = reader.positive_int("head_dim")
    rope = reader.rope(layer_type=layer_type, head_dim=head_dim, interleaved=True)
    if rope.dim is None:
        reader.reject("partial_rotary_factor", "rotates all channels of a head, which is not implemented")
    return rope if rope.dim is not None else replace(rope, dim=2)


def _read_rates(reader: ConfigReader) -> dict[str, int]:
    rates: dict[str, int] = {}
    for kind, rate in reader.config["compress_rates"].items():
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
            reader.reject("compress_rates", f"has {rate!r} for {kind}, but must have positive integers")
            rate = 1
        rates[kind] = rate
    return rates


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers."""
    return hf_name.startswith("mtp.")


FAMILIES = (
    ModelFamily(
        model_type=_FAMILY,
        architectures=("DeepseekV4ForCausalLM",),
        models="DeepSeek-V4-Flash, V4-Pro",
        read=read,
        names=_NAMES,
        is_unused=_is_unused,
        prefixes=_PREFIXES,
        renames=_RENAMES,
    ),
)
