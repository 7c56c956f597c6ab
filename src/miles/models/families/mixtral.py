"""Mixtral: Mistral's attention and, in every layer, experts of which each token takes a few."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_THETA = 1e6

NAMES = {"moe": "block_sparse_moe", "expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "mixtral")
    common, heads, rope = fields.common(eps=_EPS), fields.heads(), fields.rope(theta=_THETA)
    fields.only("hidden_act", "silu")
    fields.only("router_jitter_noise", 0.0, None)
    moe = MoeSpec(
        **fields.experts("num_local_experts", "num_experts"),
        size=fields.whole("intermediate_size"),
        norm_topk_prob=True,
    )
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=window), ffn=moe)
        for window in fields.windows(always=True)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


FAMILIES = (
    Family(
        model_type="mixtral",
        architectures=("MixtralForCausalLM",),
        models="Mixtral 8x7B, 8x22B",
        read=read,
        names=NAMES,
    ),
)
