"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers or some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.fields import Fields, written
from miles.models.spec import DecoderSpec, MoeSpec


def _experts(fields: Fields) -> int:
    key = "num_experts" if fields.config.get("num_experts") is not None else "num_local_experts"
    return fields.whole(key)


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen3_moe")
    common = fields.common(first_windowed=0)
    bias = fields.flag("attention_bias")
    plain = frozenset(config.get("mlp_only_layers") or ())
    step = fields.whole("decoder_sparse_step", 1)
    layers = tuple(i for i in range(common["num_layers"]) if i not in plain and (i + 1) % step == 0)
    moe = MoeSpec(
        num_experts=_experts(fields),
        experts_per_token=fields.whole("num_experts_per_tok"),
        intermediate_size=fields.whole("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
        layers=layers,
    )
    if moe.experts_per_token > moe.num_experts:
        fields.refuse("num_experts_per_tok", f"is {moe.experts_per_token}, more than the {moe.num_experts} experts")
    fields.settle()
    return DecoderSpec(**common, qk_norm=True, qkv_bias=bias, output_bias=bias, mlp_bias=False, moe=moe)


def write(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.moe is not None
    return written(spec) | {
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
        "num_experts": spec.moe.num_experts,
        "num_experts_per_tok": spec.moe.experts_per_token,
        "moe_intermediate_size": spec.moe.intermediate_size,
        "norm_topk_prob": spec.moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(spec.num_layers) if i not in spec.moe.layers],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }
