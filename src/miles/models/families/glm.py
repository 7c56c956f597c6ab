"""GLM-4 (dense), GLM-4.5 to 4.7 (MoE), GLM-4.7-Flash (MLA + MoE) and GLM-5 (MLA + DSA indexer + MoE)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.models.families import mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_HEAD_DIM = 128
_DENSE_EPS = 1.5625e-7
_MOE_EPS = 1e-5
_PARTIAL_ROTARY = 0.5
_MOE_FIRST_LAYER = 1
_DSA_FIRST_LAYER = 3
_INDEX_SKIP_OFFSET = 2

_INDEXER_LETTERS = {"F": "full", "S": "shared"}


# -- dense ----------------------------------------------------------------------------------


def _read_dense(reader: ConfigReader, *, post_norms: bool, mrope: tuple[int, int, int] | None = None) -> DecoderSpec:
    common = reader.common_args(eps=_DENSE_EPS)
    heads = reader.attention_heads(head_dim=_HEAD_DIM if mrope is None else None)
    rope = reader.rope(
        head_dim=heads["head_dim"],
        interleaved=True,
        partial=_PARTIAL_ROTARY if mrope is None else 1.0,
        mrope=mrope,
        aliases={"mrope": "default"},
    )
    reader.require("hidden_act", "silu")
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=reader.flag("attention_bias", True))
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    layer = LayerSpec(mixer=attention, ffn=mlp, post_norms=post_norms)
    layers = reader.positive_int("num_hidden_layers") * (layer,)
    return reader.build_spec(common, layers)


def read_glm(config: Mapping[str, Any]) -> DecoderSpec:
    return _read_dense(ConfigReader(config, "glm"), post_norms=False)


def read_glm4(
    config: Mapping[str, Any], family: str = "glm4", *, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """Read GLM-4; ``mrope`` are the default sections of multimodal RoPE, which vision-language models have."""
    return _read_dense(ConfigReader(config, family), post_norms=True, mrope=mrope)


# -- mixture of experts ---------------------------------------------------------------------


def read_glm4_moe(
    config: Mapping[str, Any], family: str = "glm4_moe", *, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """GLM-4.5 to 4.7: partial rotary embedding, experts with a correction bias; ``mrope`` as in ``read_glm4``."""
    reader = ConfigReader(config, family)
    common, heads = reader.common_args(eps=_MOE_EPS), reader.attention_heads()
    rope = reader.rope(head_dim=heads["head_dim"], partial=_PARTIAL_ROTARY, mrope=mrope, aliases={"mrope": "default"})
    reader.require("hidden_act", "silu")
    attention = AttentionSpec(
        **heads,
        rope=rope,
        qk_norm="head" if reader.flag("use_qk_norm") else "none",
        qkv_bias=reader.flag("attention_bias"),
    )
    moe, mlp = mla.read_sigmoid_experts(reader), MlpSpec(size=reader.positive_int("intermediate_size"))
    sparse = mla.read_moe_layers(reader, default=_MOE_FIRST_LAYER)
    return reader.build_spec(common, (LayerSpec(mixer=attention, ffn=moe if s else mlp) for s in sparse))


def read_glm4_moe_lite(config: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4.7-Flash: the mixture of experts of GLM-4.5 over MLA."""
    reader = ConfigReader(config, "glm4_moe_lite")
    if config.get("mlp_layer_types") is None:
        # transformers puts experts in every layer but the first, whatever this key says.
        reader.require("first_k_dense_replace", 1)
    mixer = mla.read_mla(reader, interleaved=reader.flag("rope_interleave", True))
    sparse = mla.read_moe_layers(reader, default=1)
    return mla.build_decoder_spec(reader, len(sparse) * (mixer,), mla.read_sigmoid_experts(reader), sparse)


# -- sparse attention -----------------------------------------------------------------------


def read_glm_moe_dsa(config: Mapping[str, Any]) -> DecoderSpec:
    """GLM-5: MLA with sparse attention; some layers reuse the token selection of an earlier layer's indexer."""
    reader = ConfigReader(config, "glm_moe_dsa")
    reader.require("rope_interleave", True)
    reader.require("indexer_rope_interleave", True)
    mixer, indexer = mla.read_mla(reader, interleaved=True), mla.read_indexer(reader, interleaved=True)
    sparse = mla.read_moe_layers(reader, default=_DSA_FIRST_LAYER)
    mla.require_sparse_attention(reader)
    mixers = [replace(mixer, indexer=replace(indexer, source=source)) for source in _read_indexer_sources(reader)]
    return mla.build_decoder_spec(reader, mixers, mla.read_sigmoid_experts(reader), sparse)


def _read_indexer_sources(reader: ConfigReader) -> list[int | None]:
    """For each layer the layer whose token selection it reuses; None if it has its own indexer."""
    count, kinds = reader.positive_int("num_hidden_layers"), read_indexer_types(reader)
    if len(kinds) != count:
        reader.reject("indexer_types", f"names {len(kinds)} layers, but there are {count}")
    for kind in sorted(set(kinds) - set(_INDEXER_LETTERS.values())):
        reader.reject("indexer_types", f"has a layer of kind {kind!r}, which is not implemented")
    if kinds[:1] == ["shared"]:
        reader.reject("indexer_types", "lets the first layer share a selection, but no layer before it makes one")
    sources: list[int | None] = []
    last: int | None = None
    for i, kind in enumerate(kinds):
        sources.append(last if kind == "shared" else None)
        last = i if kind == "full" else last
    return sources


def read_indexer_types(reader: ConfigReader) -> list[str]:
    """Each layer's indexer type: from a list, a pattern of letters, or an interval."""
    config = reader.config
    types: Sequence[str] | None = config.get("indexer_types") or config.get("index_topk_pattern")
    if types is not None:
        return [_INDEXER_LETTERS.get(each, each) for each in types]
    count, every = reader.positive_int("num_hidden_layers"), reader.positive_int("index_topk_freq", 1)
    offset = _INDEX_SKIP_OFFSET
    if every > 1:
        offset = reader.positive_int("index_skip_topk_offset", _INDEX_SKIP_OFFSET)
    return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]


def _is_unused_dsa(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers, and the indexer of a layer that reuses another layer's selection."""
    return mla.is_mtp_layer(spec, hf_name) or any(
        hf_name.startswith(f"model.layers.{i}.self_attn.indexer.")
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, MlaSpec)
        and layer.mixer.indexer is not None
        and layer.mixer.indexer.source is not None
    )


FAMILIES = (
    ModelFamily(
        model_type="glm",
        architectures=("GlmForCausalLM",),
        models="GLM-4 9B, GLM-Edge",
        read=read_glm,
        names={"gate_up": "gate_up_proj"},
    ),
    ModelFamily(
        model_type="glm4",
        architectures=("Glm4ForCausalLM",),
        models="GLM-4-0414, GLM-Z1",
        read=read_glm4,
        names={
            "gate_up": "gate_up_proj",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
    ),
    ModelFamily(
        model_type="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        models="GLM-4.5, 4.5-Air, 4.6, 4.7",
        read=read_glm4_moe,
        is_unused=mla.is_mtp_layer,
        mtp=mla.MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        models="GLM-4.7-Flash",
        read=read_glm4_moe_lite,
        is_unused=mla.is_mtp_layer,
        mtp=mla.MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="glm_moe_dsa",
        architectures=("GlmMoeDsaForCausalLM",),
        models="GLM-5, 5.1, 5.2",
        read=read_glm_moe_dsa,
        is_unused=_is_unused_dsa,
        mtp=mla.MTP_LAYOUT,
    ),
)
