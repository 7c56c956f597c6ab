"""Qwen3-MoE: Qwen3 with experts in place of the MLP, in all layers or some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields, written, written_windows
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' default for a config without sliding_window.
_WINDOW = 4096


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen3_moe")
    common, heads, rope = fields.common(), fields.heads(), fields.rope()
    bias = fields.flag("attention_bias")
    fields.only("hidden_act", "silu")
    own = {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias}
    moe = MoeSpec(
        **fields.experts("num_experts", "num_local_experts"),
        size=fields.whole("moe_intermediate_size"),
        norm_topk_prob=fields.flag("norm_topk_prob"),
    )
    plain = frozenset(config.get("mlp_only_layers") or ())
    step = fields.whole("decoder_sparse_step", 1)
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    windows = fields.windows(default=_WINDOW)
    if len(set(windows)) > 1:
        fields.refuse("layer_types", "gives some layers a window and some none, which this family does not do")
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(**heads, **own, rope=rope, window=window),
            ffn=moe if i not in plain and (i + 1) % step == 0 else mlp,
        )
        for i, window in enumerate(windows)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def write(spec: DecoderSpec) -> dict[str, Any]:
    mixer, moe = spec.layers[0].mixer, spec.moe
    assert isinstance(mixer, AttentionSpec)
    if moe is None:  # every layer has a plain MLP, but the config's keys are all wanted
        moe = MoeSpec(num_experts=1, experts_per_token=1, size=1, norm_topk_prob=False)
    return (
        written(spec)
        | written_windows(spec)
        | {
            "attention_bias": mixer.qkv_bias,
            "num_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.size,
            "norm_topk_prob": moe.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i in range(spec.num_layers) if i not in spec.moe_layers],
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
    )


FAMILIES = (
    Family(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        models="Qwen3-MoE (30B-A3B, 235B-A22B)",
        read=read,
        write=write,
    ),
)
