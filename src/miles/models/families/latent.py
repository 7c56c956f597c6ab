"""What the families with latent attention read alike: the attention, its scorer, the experts, and where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.models.families.fields import Fields
from miles.models.families.rotary import stretch
from miles.models.spec import DecoderSpec, IndexerSpec, LayerSpec, MlaSpec, MlpSpec, MoeSpec


def attention(fields: Fields, *, interleaved: bool) -> MlaSpec:
    """Latent attention; ``interleaved`` says how the rotated channels pair up."""
    config = fields.config
    heads = fields.whole("num_attention_heads")
    fields.only("num_key_value_heads", heads, None)
    nope, turned = fields.whole("qk_nope_head_dim"), fields.whole("qk_rope_head_dim")
    if turned % 2 and not fields.problems:
        fields.refuse("qk_rope_head_dim", f"is {turned}, but rotary positions need an even one")
    if "q_lora_rank" not in config:
        fields.refuse("q_lora_rank", "is missing; null says that queries are projected directly")
    rope = fields.rope(head_dim=turned, interleaved=interleaved)
    if rope.dim is not None:
        fields.refuse("partial_rotary_factor", "leaves out some of qk_rope_head_dim, which is not implemented")
    direct = config.get("q_lora_rank") is None
    return MlaSpec(
        num_heads=heads,
        query_rank=None if direct else fields.whole("q_lora_rank"),
        kv_rank=fields.whole("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        value_dim=fields.whole("v_head_dim"),
        rope=replace(rope, dim=turned),
        scale=(nope + turned) ** -0.5 * _sharpness(fields) ** 2,
        bias=fields.flag("attention_bias"),
    )


def _sharpness(fields: Fields) -> float:
    """What stretched positions multiply queries and keys by, each: ``mscale_all_dim`` of the rope settings."""
    _, given = fields.rotary()
    slope, factor = given.get("mscale_all_dim"), given.get("factor")
    if given.get("rope_type", given.get("type", "default")) == "default" or not slope or not factor:
        return 1.0
    return stretch(factor, slope)


def scorer(fields: Fields, *, interleaved: bool) -> IndexerSpec:
    """The scorer of sparse attention, for a layer that has its own."""
    size, turned = fields.whole("index_head_dim"), fields.whole("qk_rope_head_dim")
    if size < turned and not fields.problems:
        fields.refuse("index_head_dim", f"is {size}, too few for the {turned} channels that carry the position")
    if fields.config.get("q_lora_rank", 0) is None:
        fields.refuse("q_lora_rank", "is null, but sparse attention reads the latent of the queries")
    return IndexerSpec(
        num_heads=fields.whole("index_n_heads"),
        head_dim=size,
        top=fields.whole("index_topk"),
        rope_interleaved=interleaved,
    )


def all_choose(fields: Fields) -> None:
    """Every layer's attention must be sparse."""
    for kind in sorted(set(fields.config.get("layer_types") or ()) - {"deepseek_sparse_attention"}):
        fields.refuse("layer_types", f"has a layer of kind {kind!r}, which is not implemented")


def experts(fields: Fields, *, group_top: int | None, shared_bias: bool = False, **router: Any) -> MoeSpec:
    """The experts and the MLP every token goes through; ``router`` is what the family says of its router.

    A group of experts counts as much as its best ``group_top`` together; None is for routers that know no groups.
    """
    fields.only("moe_layer_freq", 1)
    size, shared = fields.whole("moe_intermediate_size"), fields.whole("n_shared_experts")
    routed = fields.experts("n_routed_experts", "num_local_experts", "num_experts")
    return MoeSpec(
        **routed,
        **(_groups(fields, routed, group_top) if group_top else {}),
        **router,
        size=size,
        scale=fields.number("routed_scaling_factor", 1.0),
        shared=MlpSpec(size=size * shared, bias=shared_bias),
    )


def sigmoid_experts(fields: Fields) -> MoeSpec:
    """Scores by sigmoid, a bias that counts for choosing alone, and groups as good as their best two together."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    normalise = fields.flag("norm_topk_prob", True)
    return experts(fields, group_top=2, score="sigmoid", correction=True, norm_topk_prob=normalise)


def _groups(fields: Fields, routed: Mapping[str, int], top: int) -> dict[str, int]:
    """``groups``, ``kept_groups`` and ``group_top`` of a MoeSpec."""
    total, chosen = routed["num_experts"], routed["experts_per_token"]
    count, kept = fields.whole("n_group", 1), fields.whole("topk_group", 1)
    if count == 1 or fields.problems:
        return {}
    if total % count or total // count < top:
        fields.refuse("n_group", f"is {count}, which does not cut {total} experts into equal groups of {top} or more")
    elif kept > count:
        fields.refuse("topk_group", f"is {kept}, more than the {count} groups")
    elif kept * (total // count) < chosen:
        fields.refuse("topk_group", f"is {kept}, which leaves fewer experts than the {chosen} of num_experts_per_tok")
    return {"groups": count, "kept_groups": kept, "group_top": top}


def sparse_from(fields: Fields, default: int) -> tuple[bool, ...]:
    """Which layers have experts: as ``mlp_layer_types`` says, else all from ``first_k_dense_replace`` on."""
    count, kinds = fields.whole("num_hidden_layers"), fields.config.get("mlp_layer_types")
    if kinds is None:
        first = fields.config.get("first_k_dense_replace", default)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            fields.refuse("first_k_dense_replace", f"is {first!r}, but must be an integer of 0 or more")
            first = 0
        return tuple(i >= first for i in range(count))
    if len(kinds) != count:
        fields.refuse("mlp_layer_types", f"names {len(kinds)} layers, but there are {count}")
    for kind in sorted(set(kinds) - {"dense", "sparse"}):
        fields.refuse("mlp_layer_types", f"has a layer of kind {kind!r}, which is not implemented")
    return tuple(kind == "sparse" for kind in kinds)


def decoder(
    fields: Fields, mixers: Sequence[MlaSpec], moe: MoeSpec, sparse: Sequence[bool], *, mlp_bias: bool = False
) -> DecoderSpec:
    """All of it, or every complaint there was."""
    common = fields.common()
    fields.only("hidden_act", "silu")
    mlp = MlpSpec(size=fields.whole("intermediate_size"), bias=mlp_bias)
    fields.settle()
    layers = (LayerSpec(mixer=each, ffn=moe if s else mlp) for each, s in zip(mixers, sparse, strict=True))
    return DecoderSpec(**common, layers=tuple(layers))


def ahead(spec: DecoderSpec, hf_name: str) -> bool:
    """Layers after the last one guess tokens further ahead, which nobody here asks for."""
    start, _, rest = hf_name.removeprefix("model.layers.").partition(".")
    return hf_name.startswith("model.layers.") and rest != "" and start.isdecimal() and int(start) >= spec.num_layers
