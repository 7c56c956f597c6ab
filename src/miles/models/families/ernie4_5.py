"""ERNIE 4.5: Llama with interleaved RoPE, dense or with a mixture of experts that a correction bias balances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_THETA = 500_000.0
_EPS = 1e-5
_HEAD_DIM = 128
_FIRST_MOE_LAYER = 1
_SHARED_EXPERTS = 2


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "ernie4_5")
    common, heads = reader.common_args(eps=_EPS, tied=True), reader.attention_heads(head_dim=_HEAD_DIM)
    rope = reader.rope(head_dim=heads["head_dim"], interleaved=True, theta=_THETA)
    reader.require("hidden_act", "silu")
    bias = reader.flag("use_bias")
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), bias=bias)
    layers = reader.positive_int("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=mlp),)
    return reader.build_spec(common, layers)


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """The router's softmax is in float32; its scores are normalized over the selected experts."""
    reader = ConfigReader(config, "ernie4_5_moe")
    common, heads = reader.common_args(eps=_EPS, tied=True), reader.attention_heads()
    rope = reader.rope(head_dim=heads["head_dim"], interleaved=True, theta=_THETA)
    reader.require("hidden_act", "silu")
    reader.require("use_bias", False, None)  # the output head would have one too
    size = reader.positive_int("moe_intermediate_size")
    shared = reader.layer_index("moe_num_shared_experts", _SHARED_EXPERTS)
    moe = MoeSpec(
        **reader.expert_counts("moe_num_experts", "num_experts", per_token=("moe_k", "num_experts_per_tok")),
        size=size,
        norm_topk_prob=True,
        correction=True,
        wide_router=True,
        shared=MlpSpec(size=size * shared) if shared else None,
    )
    attention, mlp = AttentionSpec(**heads, rope=rope), MlpSpec(size=reader.positive_int("intermediate_size"))
    sparse = _moe_layers(reader)
    return reader.build_spec(common, (LayerSpec(mixer=attention, ffn=moe if s else mlp) for s in sparse))


def _moe_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have experts: every ``moe_layer_interval``-th, from a first layer to a last one."""
    count, step = reader.positive_int("num_hidden_layers"), reader.positive_int("moe_layer_interval", 1)
    first = reader.layer_index("moe_layer_start_index", _FIRST_MOE_LAYER)
    last = (
        count - 1
        if reader.config.get("moe_layer_end_index", -1) == -1
        else reader.layer_index("moe_layer_end_index", count - 1)
    )
    return tuple(first <= i <= last and (i + 1) % step == 0 for i in range(count))


def _is_mtp(spec: DecoderSpec, hf_name: str) -> bool:
    """Return whether a tensor belongs to the multi-token-prediction layer, which no decoder layer reads."""
    return hf_name.startswith("model.mtp_")


FAMILIES = (
    ModelFamily(
        model_type="ernie4_5",
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
        models="ERNIE 4.5 0.3B",
        read=read,
    ),
    ModelFamily(
        model_type="ernie4_5_moe",
        architectures=("Ernie4_5_MoeForCausalLM",),
        models="ERNIE 4.5 21B-A3B, 300B-A47B",
        read=read_moe,
        names={"correction": "moe_statics.e_score_correction_bias", "correction_layout": "row"},
        is_unused=_is_mtp,
    ),
)
