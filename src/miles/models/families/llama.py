"""Llama 3, 3.1, 3.2 and 3.3, and what was built on them (SmolLM2 among others)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader, write_common_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "llama")
    common = reader.common_args()
    heads = reader.attention_heads()
    rope = reader.rope()
    bias = reader.flag("attention_bias")
    reader.require("hidden_act", "silu")
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=bias, output_bias=bias)
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), bias=reader.flag("mlp_bias"))
    layers = reader.positive_int("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=mlp),)
    return reader.build_spec(common, layers)


def write(spec: DecoderSpec) -> dict[str, Any]:
    mixer, ffn = spec.layers[0].mixer, spec.layers[0].ffn
    assert isinstance(mixer, AttentionSpec) and isinstance(ffn, MlpSpec)
    return write_common_config(spec) | {"attention_bias": mixer.qkv_bias, "mlp_bias": ffn.bias}


FAMILIES = (
    ModelFamily(
        model_type="llama",
        architectures=("LlamaForCausalLM",),
        models="Llama 3, 3.1, 3.2, 3.3; SmolLM2",
        read=read,
        write=write,
    ),
)
