"""Kimi-Linear: Kimi Delta Attention in most layers, MLA without position embedding in the others, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import mixtral, mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import DecoderSpec, KimiDeltaSpec, LayerSpec, MlaSpec, MlpSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEADS = 32
_HEAD_DIM = 128
_KERNEL = 4
_SCALE = 2.446
_MLA_INTERVAL = 4
_FIRST_MOE_LAYER = 1

# Keys of published configs, and what other families call them; transformers takes either.
_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_router_activation_func": "scoring_func",
}
# Keys of the group ``linear_attn_config`` of published configs, and what transformers calls them.
_LINEAR_KEYS = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
# Layers by kind in that group, counted from one.
_LAYER_KEYS = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(_rename_keys(config), "kimi_linear")
    _require_supported(reader)
    common = reader.common_args(eps=_EPS)
    full = _read_mla(reader)
    linear = KimiDeltaSpec(
        num_heads=reader.positive_int("linear_num_heads", _HEADS),
        head_dim=reader.positive_int("linear_head_dim", _HEAD_DIM),
        kernel=reader.positive_int("linear_conv_kernel_dim", _KERNEL),
    )
    moe = mla.read_experts(
        reader,
        group_top=2,
        score="sigmoid",
        correction=True,
        norm_topk_prob=reader.flag("norm_topk_prob", True),
    )
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    sparse, kinds = mla.read_moe_layers(reader, default=_FIRST_MOE_LAYER), _read_layer_types(reader)
    pairs = zip(kinds, sparse, strict=False)  # a list of another length was rejected
    layers = (LayerSpec(mixer=full if kind == "full_attention" else linear, ffn=moe if s else mlp) for kind, s in pairs)
    return reader.build_spec(common, layers)


def _rename_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the keys that ``ConfigReader`` reads."""
    renamed = {_KEYS.get(key, key): value for key, value in config.items()}
    group = renamed.get("linear_attn_config") or {}
    renamed |= {key: group[own] for own, key in _LINEAR_KEYS.items() if own in group}
    renamed.setdefault("routed_scaling_factor", _SCALE)
    return renamed


def _require_supported(reader: ConfigReader) -> None:
    """Reject options of the published configs that are not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("scoring_func", "sigmoid")
    reader.require("mla_use_nope", True)
    reader.require("mla_use_output_gate", False, None)
    reader.require("tie_word_embeddings", False)
    reader.require("num_nextn_predict_layers", 0, None)
    group = reader.config.get("linear_attn_config") or {}
    for key in sorted(set(group) - {*_LINEAR_KEYS, *_LAYER_KEYS}):
        if group[key]:
            reader.reject(f"linear_attn_config.{key}", f"is {group[key]!r}, which is not implemented")


def _read_mla(reader: ConfigReader) -> MlaSpec:
    """Read multi-head latent attention without position embedding."""
    heads = reader.positive_int("num_attention_heads")
    reader.require("num_key_value_heads", heads, None)
    nope_dim, shared_dim = reader.positive_int("qk_nope_head_dim"), reader.positive_int("qk_rope_head_dim")
    direct = reader.config.get("q_lora_rank") is None
    return MlaSpec(
        num_heads=heads,
        query_rank=None if direct else reader.positive_int("q_lora_rank"),
        kv_rank=reader.positive_int("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=shared_dim,
        value_dim=reader.positive_int("v_head_dim"),
        rope=None,
        scale=(nope_dim + shared_dim) ** -0.5,
        bias=reader.flag("attention_bias"),
    )


def _read_layer_types(reader: ConfigReader) -> tuple[str, ...]:
    """Read each layer's type: from ``layer_types``, else from the numbers of the published config."""
    group, count = reader.config.get("linear_attn_config") or {}, reader.positive_int("num_hidden_layers")
    named = {number: kind for key, kind in _LAYER_KEYS.items() for number in group.get(key) or ()}
    if reader.config.get("layer_types") is None and named:
        if set(named) != set(range(1, count + 1)):
            reader.reject("linear_attn_config", f"does not name each of the layers 1 to {count} once")
        return tuple(named.get(i + 1, "linear_attention") for i in range(count))
    kinds = ("linear_attention", "full_attention")
    return reader.layer_types(lambda i: kinds[i > 0 and i % _MLA_INTERVAL == 0], *kinds)


FAMILIES = (
    ModelFamily(
        model_type="kimi_linear",
        architectures=("KimiLinearForCausalLM",),
        models="Kimi-Linear-48B-A3B",
        read=read,
        names={**mixtral.NAMES, "router": "gate"},
        # transformers writes the MLP of dense layers under the name of the experts.
        renames={f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
    ),
)
