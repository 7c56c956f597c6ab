"""GLM-5.3-Flash, the text model: Kimi Delta Attention and MLA with pooled sparse attention, over hyper-connections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.kernels.activation_kinds import ActivationKind, limited_swiglu
from miles.models.families import glm, mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import read_text_config
from miles.models.residual_spec import HyperConnectionSpec
from miles.models.spec import DecoderSpec, IndexerSpec, KimiDeltaSpec, LayerSpec, MlaSpec, MlpSpec

_FAMILY = "glm5_next"
# transformers' defaults for a config that does not name them.
_TEXT = {
    "vocab_size": 154880,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 288,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 0,
    "v_head_dim": 256,
    "qk_nope_head_dim": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 1048576,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_kpool": 16,
    "index_kpool_always_select_tail": True,
    "swiglu_limit": 10.0,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "linear_conv_kernel_dim": 4,
    "linear_lower_bound": -5.0,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
}
_EPS = 1e-5
_FIRST_MOE_LAYER = 3
_SPARSE_INTERVAL = 4
# Keys of the group ``linear_attn_config`` of published configs, and what transformers calls them.
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
_LINEAR, _SPARSE = "linear_attention", "deepseek_sparse_attention"

_LAYERS = "model.language_model.layers."
_NAMES = {
    "embedding": "model.language_model.embed_tokens",
    "layer": f"{_LAYERS}{{}}",
    "norm": "model.language_model.norm",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model; the vision tower is not computed here."""
    reader = ConfigReader(_rename_keys(read_text_config(config, _TEXT, family=_FAMILY)), _FAMILY)
    _require_supported(reader)
    common = reader.common_args(eps=_EPS)
    activation = _read_activation(reader)
    moe = mla.read_sigmoid_experts(reader)
    assert moe.shared is not None
    moe = replace(moe, activation=activation, shared=replace(moe.shared, activation=activation))
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), activation=activation)
    hyper = HyperConnectionSpec(
        streams=reader.positive_int("hc_mult"),
        iterations=reader.positive_int("hc_sinkhorn_iters"),
        eps=reader.number("hc_eps", 1e-6),
    )
    kinds = reader.layer_types(lambda i: _SPARSE if i % _SPARSE_INTERVAL == 3 else _LINEAR, _LINEAR, _SPARSE)
    sparse = mla.read_moe_layers(reader, default=_FIRST_MOE_LAYER)
    linear, mixers = _read_linear(reader), _read_sparse(reader, kinds)
    layers = (
        LayerSpec(mixer=linear if kind == _LINEAR else mixer, ffn=moe if has else mlp, hyper=hyper)
        for kind, mixer, has in zip(kinds, mixers, sparse, strict=False)  # a list of another length was rejected
    )
    return reader.build_spec(common, layers)


def _rename_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with transformers' names of keys and of layers."""
    renamed = dict(config)
    group = renamed.get("linear_attn_config") or {}
    renamed |= {key: group[own] for own, key in _LINEAR_KEYS.items() if own in group}
    if group.get("safe_gate", True) and group and renamed.get("linear_lower_bound") is None:
        renamed["linear_lower_bound"] = _TEXT["linear_lower_bound"]
    if renamed.get("layer_types") is not None:
        renamed["layer_types"] = [_SPARSE if kind == "full_attention" else kind for kind in renamed["layer_types"]]
    return renamed


def _require_supported(reader: ConfigReader) -> None:
    """Reject options that are not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("qk_rope_head_dim", 0)
    reader.require("index_kpool_always_select_tail", True)
    if reader.config.get("q_lora_rank") is None:
        reader.reject("q_lora_rank", "is null, but the DSA indexer reads the query latent")


def _read_activation(reader: ConfigReader) -> ActivationKind:
    limit = reader.optional_positive("swiglu_limit")
    if limit is None:
        reader.reject("swiglu_limit", "is missing or no number above 0, which is not implemented")
        return "silu"
    return limited_swiglu(limit)


def _read_linear(reader: ConfigReader) -> KimiDeltaSpec:
    bound = reader.config.get("linear_lower_bound")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or bound >= 0):
        reader.reject("linear_lower_bound", f"is {bound!r}, but must be a number below 0")
        bound = None
    return KimiDeltaSpec(
        num_heads=reader.positive_int("linear_num_heads"),
        head_dim=reader.positive_int("linear_head_dim"),
        kernel=reader.positive_int("linear_conv_kernel_dim"),
        lower_bound=None if bound is None else float(bound),
        flat_rates=True,
    )


def _read_sparse(reader: ConfigReader, kinds: Sequence[str]) -> list[MlaSpec]:
    """Read MLA without position embedding for every layer, with the indexer it would have."""
    heads, nope_dim = reader.positive_int("num_attention_heads"), reader.positive_int("qk_nope_head_dim")
    reader.require("num_key_value_heads", heads, None)
    top, pool = reader.positive_int("index_topk"), reader.positive_int("index_kpool")
    if top % pool:
        reader.reject("index_topk", f"is {top}, which is not a multiple of the {pool} tokens of index_kpool")
        pool = 1
    indexer = IndexerSpec(
        num_heads=reader.positive_int("index_n_heads"),
        head_dim=reader.positive_int("index_head_dim"),
        top=top,
        rope_interleaved=False,
        pool=pool,
    )
    mixer = MlaSpec(
        num_heads=heads,
        query_rank=reader.positive_int("q_lora_rank", 1),
        kv_rank=reader.positive_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=0,
        value_dim=reader.positive_int("v_head_dim"),
        rope=None,
        scale=nope_dim**-0.5,
        bias=reader.flag("attention_bias"),
        norm_eps=reader.number("rms_norm_eps", _EPS),
    )
    types = glm.read_indexer_types(reader)
    if len(types) < len(kinds):
        reader.reject("indexer_types", f"names {len(types)} layers, but there are {len(kinds)}")
        types = [*types, *("full" for _ in kinds)]
    mixers: list[MlaSpec] = []
    for i, (kind, own) in enumerate(zip(kinds, types, strict=False)):
        is_shared = kind == _SPARSE and own == "shared"
        if is_shared and (i == 0 or (kinds[i - 1], types[i - 1]) != (_SPARSE, "full")):
            reader.reject("indexer_types", f"lets layer {i} share a selection, but the layer before it makes none")
        mixers.append(replace(mixer, indexer=replace(indexer, source=i - 1 if is_shared else None)))
    return mixers


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision tower, and multi-token-prediction layers behind the last layer."""
    return hf_name.startswith("model.visual.") or mla.is_mtp_layer(
        spec, f"model.layers.{hf_name.removeprefix(_LAYERS)}" if hf_name.startswith(_LAYERS) else hf_name
    )


FAMILIES = (
    ModelFamily(
        model_type=_FAMILY,
        architectures=("Glm5NextForConditionalGeneration",),
        models="GLM-5.3-Flash, text only",
        read=read,
        names=_NAMES,
        is_unused=_is_unused,
    ),
)
