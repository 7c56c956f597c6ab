"""Hunyuan, dense and with a mixture of experts: Llama with QK-norm after RoPE, and a RoPE base scaled by ``alpha``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

# transformers' default for a config that leaves it out.
_EPS = 1e-5

_NAMES = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}


def read_dense(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "hunyuan_v1_dense")
    common, attention = reader.common_args(eps=_EPS), _read_attention(reader)
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    layers = reader.positive_int("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=mlp),)
    return reader.build_spec(common, layers)


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Every layer has experts and one shared expert, all of ``intermediate_size``."""
    size = config.get("intermediate_size")
    reader = ConfigReader({**config, "moe_topk": _same_in_all_layers(config.get("moe_topk"))}, "hunyuan_v1_moe")
    common, attention = reader.common_args(eps=_EPS), _read_attention(reader)
    for key, expected in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if _same_in_all_layers(config.get(key, expected)) not in (expected, None):
            reader.reject(key, f"is {config[key]!r}, but only {expected} in every layer is implemented")
    reader.require("moe_layer_num_skipped", 0, None)
    moe = MoeSpec(
        **reader.expert_counts("num_experts", "num_local_experts", per_token=("moe_topk", "num_experts_per_tok")),
        size=reader.positive_int("intermediate_size"),
        norm_topk_prob=True,
        wide_router=True,
        shared=MlpSpec(size=reader.positive_int("intermediate_size")),
    )
    layers = reader.positive_int("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=moe),)
    return reader.build_spec(common, layers)


def _same_in_all_layers(value: Any) -> Any:
    """Return the value of a key that may be a list with one for each layer; the list if they differ."""
    return value[0] if isinstance(value, list | tuple) and len(set(value)) == 1 else value


def _read_attention(reader: ConfigReader) -> AttentionSpec:
    heads = reader.attention_heads()
    reader.require("hidden_act", "silu")
    reader.require("use_qk_norm", True)
    reader.require("use_cla", False, None)  # keys and values shared between layers
    bias = reader.flag("attention_bias")
    rope = _read_rope(reader, heads["head_dim"])
    return AttentionSpec(**heads, rope=rope, qk_norm="head_after_rope", qkv_bias=bias, output_bias=bias)


def _read_rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """Read RoPE; the type ``dynamic`` with an ``alpha`` has one base for every length, scaled as NTK-aware RoPE is."""
    key, given = reader.rope_group()
    alpha = given.get("alpha")
    if given.get("rope_type", given.get("type")) != "dynamic" or not alpha:
        return reader.rope()
    rope = reader.rope(aliases={"dynamic": "default"})
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0 or head_dim <= 2:
        reader.reject(key, f"has alpha {alpha!r}, which must be a number above 0, for heads of more than two channels")
        return rope
    return replace(rope, theta=rope.theta * alpha ** (head_dim / (head_dim - 2)))


FAMILIES = (
    ModelFamily(
        model_type="hunyuan_v1_dense",
        architectures=("HunYuanDenseV1ForCausalLM",),
        models="Hunyuan 0.5B, 1.8B, 4B, 7B",
        read=read_dense,
        names=_NAMES,
    ),
    ModelFamily(
        model_type="hunyuan_v1_moe",
        architectures=("HunYuanMoEV1ForCausalLM",),
        models="Hunyuan-A13B",
        read=read_moe,
        names={**_NAMES, "router": "gate.wg", "shared": "shared_mlp"},
    ),
)
