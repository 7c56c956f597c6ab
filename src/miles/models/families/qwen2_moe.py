"""Qwen1.5-MoE and Qwen2-MoE: experts beside one that every token goes through, behind a gate of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_WINDOW = 4096
_WINDOWED_BEFORE = 28
_SHARED = 5632


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen2_moe")
    common, heads, rope = fields.common(), fields.heads(), fields.rope()
    fields.only("hidden_act", "silu")
    moe = MoeSpec(
        **fields.experts("num_experts"),
        size=fields.whole("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        shared=MlpSpec(size=fields.whole("shared_expert_intermediate_size", _SHARED)),
        shared_gate=True,
    )
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    plain = frozenset(config.get("mlp_only_layers") or ())
    step = fields.whole("decoder_sparse_step", 1)
    before = fields.index("max_window_layers", _WINDOWED_BEFORE)
    windows = fields.windows(default=_WINDOW, sliding=lambda i: i % 2 == 0 and i < before)
    own = {**heads, "rope": rope, "qkv_bias": fields.flag("qkv_bias", True)}
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**own, window=window), ffn=moe if i not in plain and (i + 1) % step == 0 else mlp)
        for i, window in enumerate(windows)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


FAMILIES = (
    Family(
        model_type="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        read=read,
        names={"shared": "shared_expert"},
    ),
)
