"""Mixtral: Mistral's attention and a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_THETA = 1e6

NAMES = {"moe": "block_sparse_moe", "expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "mixtral")
    common = reader.common_args(eps=_EPS)
    heads = reader.attention_heads()
    rope = reader.rope(theta=_THETA)
    reader.require("hidden_act", "silu")
    reader.require("router_jitter_noise", 0.0, None)
    moe = MoeSpec(
        **reader.expert_counts("num_local_experts", "num_experts"),
        size=reader.positive_int("intermediate_size"),
        norm_topk_prob=True,
    )
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=window), ffn=moe)
        for window in reader.sliding_windows(always=True)
    )
    return reader.build_spec(common, layers)


FAMILIES = (
    ModelFamily(
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        models="Mixtral 8x7B, 8x22B",
        read=read,
        names=NAMES,
    ),
)
