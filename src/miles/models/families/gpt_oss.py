"""gpt-oss: attention with sinks, every other layer through a window, and experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
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
# What the one clamped activation is clamped to.
_LIMIT = 7.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    stretched = config.get("rope_parameters") or config.get("rope_scaling")
    fields = Fields(config if stretched else {**config, "rope_parameters": _YARN}, "gpt_oss")
    common, heads, rope = fields.common(eps=_EPS), fields.heads(head_dim=_HEAD_DIM), fields.rope(theta=_THETA)
    fields.only("hidden_act", "silu")
    fields.only("swiglu_limit", _LIMIT)
    bias = fields.flag("attention_bias", True)
    own = {**heads, "rope": rope, "qkv_bias": bias, "output_bias": bias, "sinks": True}
    moe = MoeSpec(
        **fields.experts("num_local_experts", "num_experts"),
        size=fields.whole("intermediate_size"),
        # A softmax over the chosen alone is that over all, normalised again.
        norm_topk_prob=True,
        router_bias=True,
        activation="swiglu_clamped",
        expert_bias=True,
        interleaved=True,
    )
    windows = fields.windows(always=True, default=_WINDOW, sliding=lambda i: i % 2 == 0)
    fields.settle()
    layers = (LayerSpec(mixer=AttentionSpec(**own, window=window), ffn=moe) for window in windows)
    return DecoderSpec(**common, layers=tuple(layers))


FAMILIES = (
    Family(
        model_type="gpt_oss",
        architectures=("GptOssForCausalLM",),
        models="gpt-oss-20b, gpt-oss-120b",
        read=read,
        names={"router": "router", "stacked": "transposed"},
    ),
)
