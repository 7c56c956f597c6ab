"""Qwen3, dense: queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields, written, written_windows
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config without head_dim, max_window_layers and sliding_window, whatever the sizes.
_HEAD_DIM = 128
_WINDOWED_FROM = 28
_WINDOW = 4096


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen3")
    common, heads, rope = fields.common(), fields.heads(head_dim=_HEAD_DIM), fields.rope()
    bias = fields.flag("attention_bias")
    fields.only("hidden_act", "silu")
    own = {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias}
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, **own, rope=rope, window=window), ffn=mlp)
        for window in fields.windows(first=fields.index("max_window_layers", _WINDOWED_FROM), default=_WINDOW)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def write(spec: DecoderSpec) -> dict[str, Any]:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return written(spec) | written_windows(spec) | {"attention_bias": mixer.qkv_bias}


FAMILIES = (
    Family(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        models="Qwen3, dense",
        read=read,
        write=write,
    ),
)
