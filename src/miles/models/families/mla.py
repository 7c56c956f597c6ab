"""Config keys common to families with MLA: attention, DSA indexer, experts, and which layers have experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.models.families.base import MtpLayout
from miles.models.families.config_reader import ConfigReader
from miles.models.families.rope_config import yarn_mscale
from miles.models.spec import DecoderSpec, IndexerSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec

MTP_LAYOUT = MtpLayout(
    block="model.layers.{}",
    layer="model.layers.{}",
    embedding_norm="enorm",
    hidden_norm="hnorm",
    projection="eh_proj",
    norm="shared_head.norm",
    after_layers=True,
)
"""MTP layers as in DeepSeek-V3 and GLM-4.5: numbered on after the decoder's layers."""


def read_mla(reader: ConfigReader, *, interleaved: bool) -> MlaSpec:
    """Read multi-head latent attention; ``interleaved`` says how rotated channels are paired."""
    config = reader.config
    heads = reader.positive_int("num_attention_heads")
    reader.require("num_key_value_heads", heads, None)
    nope_dim, rope_dim = reader.positive_int("qk_nope_head_dim"), reader.positive_int("qk_rope_head_dim")
    if rope_dim % 2 and not reader.problems:
        reader.reject("qk_rope_head_dim", f"is {rope_dim}, but RoPE needs an even number")
    if "q_lora_rank" not in config:
        reader.reject("q_lora_rank", "is missing; use null if queries are projected directly")
    rope = reader.rope(head_dim=rope_dim, interleaved=interleaved)
    if rope.dim is not None:
        reader.reject("partial_rotary_factor", "leaves out some of qk_rope_head_dim, which is not implemented")
    direct = config.get("q_lora_rank") is None
    return MlaSpec(
        num_heads=heads,
        query_rank=None if direct else reader.positive_int("q_lora_rank"),
        kv_rank=reader.positive_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=reader.positive_int("v_head_dim"),
        rope=replace(rope, dim=rope_dim),
        scale=(nope_dim + rope_dim) ** -0.5 * _mscale_all_dim(reader) ** 2,
        bias=reader.flag("attention_bias"),
    )


def _mscale_all_dim(reader: ConfigReader) -> float:
    """Read the factor by which YaRN multiplies queries and keys each: ``mscale_all_dim`` of the RoPE parameters."""
    _, given = reader.rope_group()
    slope, factor = given.get("mscale_all_dim"), given.get("factor")
    if given.get("rope_type", given.get("type", "default")) == "default" or not slope or not factor:
        return 1.0
    return yarn_mscale(factor, slope)


def read_indexer(reader: ConfigReader, *, interleaved: bool) -> IndexerSpec:
    """Read the DSA indexer of a layer that has its own."""
    size, rope_dim = reader.positive_int("index_head_dim"), reader.positive_int("qk_rope_head_dim")
    if size < rope_dim and not reader.problems:
        reader.reject("index_head_dim", f"is {size}, too few for the {rope_dim} rotary channels")
    if reader.config.get("q_lora_rank", 0) is None:
        reader.reject("q_lora_rank", "is null, but the DSA indexer reads the query latent")
    return IndexerSpec(
        num_heads=reader.positive_int("index_n_heads"),
        head_dim=size,
        top=reader.positive_int("index_topk"),
        rope_interleaved=interleaved,
    )


def require_sparse_attention(reader: ConfigReader) -> None:
    """Reject layers whose attention is not sparse."""
    for kind in sorted(set(reader.config.get("layer_types") or ()) - {"deepseek_sparse_attention"}):
        reader.reject("layer_types", f"has a layer of kind {kind!r}, which is not implemented")


def read_experts(reader: ConfigReader, *, group_top: int | None, shared_bias: bool = False, **router: Any) -> MoeSpec:
    """Read the routed and shared experts; ``router`` are the family's own MoeSpec arguments.

    A group of experts is scored by its best ``group_top`` experts together; None is for routers without groups.
    """
    reader.require("moe_layer_freq", 1)
    size, shared = reader.positive_int("moe_intermediate_size"), reader.positive_int("n_shared_experts")
    routed = reader.expert_counts("n_routed_experts", "num_local_experts", "num_experts")
    return MoeSpec(
        **routed,
        **(_groups(reader, routed, group_top) if group_top else {}),
        **router,
        size=size,
        scale=reader.number("routed_scaling_factor", 1.0),
        shared=MlpSpec(size=size * shared, bias=shared_bias),
    )


def read_sigmoid_experts(reader: ConfigReader) -> MoeSpec:
    """Read experts with sigmoid scores, a correction bias for the selection, and groups scored by their best two."""
    reader.require("scoring_func", "sigmoid")
    reader.require("topk_method", "noaux_tc")
    normalise = reader.flag("norm_topk_prob", True)
    return read_experts(reader, group_top=2, score="sigmoid", correction=True, norm_topk_prob=normalise)


def _groups(reader: ConfigReader, routed: Mapping[str, int], top: int) -> dict[str, int]:
    """Read ``groups``, ``kept_groups`` and ``group_top`` of a MoeSpec."""
    total, chosen = routed["num_experts"], routed["experts_per_token"]
    count, kept = reader.positive_int("n_group", 1), reader.positive_int("topk_group", 1)
    if count == 1 or reader.problems:
        return {}
    if total % count or total // count < top:
        reader.reject("n_group", f"is {count}, which does not cut {total} experts into equal groups of {top} or more")
    elif kept > count:
        reader.reject("topk_group", f"is {kept}, more than the {count} groups")
    elif kept * (total // count) < chosen:
        reader.reject("topk_group", f"is {kept}, which leaves fewer experts than the {chosen} of num_experts_per_tok")
    return {"groups": count, "kept_groups": kept, "group_top": top}


def read_moe_layers(reader: ConfigReader, default: int) -> tuple[bool, ...]:
    """Read which layers have experts: from ``mlp_layer_types``, else all from ``first_k_dense_replace`` on."""
    count, kinds = reader.positive_int("num_hidden_layers"), reader.config.get("mlp_layer_types")
    if kinds is None:
        first = reader.config.get("first_k_dense_replace", default)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            reader.reject("first_k_dense_replace", f"is {first!r}, but must be an integer of 0 or more")
            first = 0
        return tuple(i >= first for i in range(count))
    if len(kinds) != count:
        reader.reject("mlp_layer_types", f"names {len(kinds)} layers, but there are {count}")
    for kind in sorted(set(kinds) - {"dense", "sparse"}):
        reader.reject("mlp_layer_types", f"has a layer of kind {kind!r}, which is not implemented")
    return tuple(kind == "sparse" for kind in kinds)


def build_decoder_spec(
    reader: ConfigReader, mixers: Sequence[MlaSpec], moe: MoeSpec, sparse: Sequence[bool], *, mlp_bias: bool = False
) -> DecoderSpec:
    """Build the decoder spec, or raise every problem found."""
    common = reader.common_args()
    reader.require("hidden_act", "silu")
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), bias=mlp_bias)
    layers = (LayerSpec(mixer=each, ffn=moe if s else mlp) for each, s in zip(mixers, sparse, strict=True))
    return reader.build_spec(common, layers)


def is_mtp_layer(spec: DecoderSpec, hf_name: str) -> bool:
    """Return whether a tensor belongs to a multi-token-prediction layer after the last decoder layer."""
    start, _, rest = hf_name.removeprefix("model.layers.").partition(".")
    return hf_name.startswith("model.layers.") and rest != "" and start.isdecimal() and int(start) >= spec.num_layers
