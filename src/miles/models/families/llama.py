"""Llama 3, 3.1, 3.2 and 3.3, and what was built on them (SmolLM2 among others)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields, written
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "llama")
    common, heads, rope = fields.common(), fields.heads(), fields.rope()
    bias = fields.flag("attention_bias")
    fields.only("hidden_act", "silu")
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=fields.whole("intermediate_size"), bias=fields.flag("mlp_bias"))
    layers = fields.whole("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=mlp),)
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def write(spec: DecoderSpec) -> dict[str, Any]:
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(mixer, AttentionSpec) and isinstance(ffn, MlpSpec)
    return written(spec) | {"attention_bias": mixer.qkv_bias, "mlp_bias": ffn.bias}


FAMILIES = (
    Family(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        models="Llama 3, 3.1, 3.2, 3.3; SmolLM2",
        read=read,
        write=write,
    ),
)
