"""gpt-oss: attention sinks, sliding windows in every other layer, experts with biases and clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 64
_WINDOW = 128
_THETA = 150_000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# The limit of the clamped SwiGLU.
_LIMIT = 7.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    stretched = config.get("rope_parameters") or config.get("rope_scaling")
    reader = ConfigReader(config if stretched else {**config, "rope_parameters": _YARN}, "gpt_oss")
    common = reader.common_args(eps=_EPS)
    heads = reader.attention_heads(head_dim=_HEAD_DIM)
    rope = reader.rope(theta=_THETA)
    reader.require("hidden_act", "silu")
    reader.require("swiglu_limit", _LIMIT)
    bias = reader.flag("attention_bias", True)
    own = {**heads, "rope": rope, "qkv_bias": bias, "output_bias": bias, "sinks": True}
    moe = MoeSpec(
        **reader.expert_counts("num_local_experts", "num_experts"),
        size=reader.positive_int("intermediate_size"),
        # A softmax over the selected experts equals the softmax over all, renormalized.
        norm_topk_prob=True,
        router_bias=True,
        activation="swiglu_clamped",
        expert_bias=True,
        interleaved=True,
    )
    windows = reader.sliding_windows(always=True, default=_WINDOW, sliding=lambda i: i % 2 == 0)
    layers = (LayerSpec(mixer=AttentionSpec(**own, window=window), ffn=moe) for window in windows)
    return reader.build_spec(common, layers)


FAMILIES = (
    ModelFamily(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        models="gpt-oss-20b, gpt-oss-120b",
        read=read,
        names={"router": "router", "stacked": "transposed"},
    ),
)
