"""Qwen3-Next: three layers of gated delta networks to one of gated attention, with experts beside a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, DeltaSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_HEAD_DIM = 256
_TURNED = 0.25
_FULL_EVERY = 4
_KERNEL = 4
_DELTA_DIM = 128
_KEY_HEADS = 16
_VALUE_HEADS = 32
_EXPERT = 512

NAMES = {"shared": "shared_expert"}


def mixers(fields: Fields, *, fused: bool) -> tuple[AttentionSpec | DeltaSpec, ...]:
    """Each layer's mixer, here and in Qwen3.5."""
    heads, bias = fields.heads(head_dim=_HEAD_DIM), fields.flag("attention_bias")
    rope = fields.rope(head_dim=heads["head_dim"], partial=_TURNED)
    attention = AttentionSpec(**heads, rope=rope, qk_norm="head", qkv_bias=bias, output_bias=bias, gated=True)
    delta = DeltaSpec(
        key_heads=fields.whole("linear_num_key_heads", _KEY_HEADS),
        value_heads=fields.whole("linear_num_value_heads", _VALUE_HEADS),
        key_dim=fields.whole("linear_key_head_dim", _DELTA_DIM),
        value_dim=fields.whole("linear_value_head_dim", _DELTA_DIM),
        kernel=fields.whole("linear_conv_kernel_dim", _KERNEL),
        fused=fused,
    )
    if delta.value_heads % delta.key_heads and not fields.problems:
        why = f"is {delta.key_heads}, which does not divide the {delta.value_heads} value heads"
        fields.refuse("linear_num_key_heads", why)
    every = fields.whole("full_attention_interval", _FULL_EVERY)
    named = ("full_attention", "linear_attention")
    kinds = fields.kinds(lambda i: named[(i + 1) % every != 0], *named)
    fields.only("hidden_act", "silu")
    fields.only("attn_output_gate", True)
    return tuple(attention if kind == "full_attention" else delta for kind in kinds)


def experts(fields: Fields, *, norm_topk_prob: bool) -> MoeSpec:
    """The experts of a layer, here and in Qwen3.5."""
    return MoeSpec(
        **fields.experts("num_experts"),
        size=fields.whole("moe_intermediate_size", _EXPERT),
        norm_topk_prob=norm_topk_prob,
        shared=MlpSpec(size=fields.whole("shared_expert_intermediate_size", _EXPERT)),
        shared_gate=True,
    )


def ahead(spec: DecoderSpec, hf_name: str) -> bool:
    """The layers that predict several tokens ahead."""
    return hf_name.startswith("mtp.")


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen3_next")
    common, mixed = fields.common(), mixers(fields, fused=True)
    moe = experts(fields, norm_topk_prob=fields.flag("norm_topk_prob", True))
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    plain = frozenset(config.get("mlp_only_layers") or ())
    step = fields.whole("decoder_sparse_step", 1)
    layers = tuple(
        LayerSpec(mixer=mixer, ffn=moe if i not in plain and (i + 1) % step == 0 else mlp)
        for i, mixer in enumerate(mixed)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers, norm_offset=1.0)


FAMILIES = (
    Family(
        model_type="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        models="Qwen3-Next (80B-A3B), Qwen3-Coder-Next",
        read=read,
        names=NAMES,
        spare=ahead,
    ),
)
