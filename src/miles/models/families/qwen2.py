"""Qwen2 and Qwen2.5: biases on queries, keys and values, none elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields, written, written_windows
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config without max_window_layers and sliding_window.
_WINDOWED_FROM = 28
_WINDOW = 4096


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen2")
    common, heads, rope = fields.common(), fields.heads(), fields.rope()
    fields.only("hidden_act", "silu")
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, qkv_bias=True, window=window), ffn=mlp)
        for window in fields.windows(first=fields.index("max_window_layers", _WINDOWED_FROM), default=_WINDOW)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def write(spec: DecoderSpec) -> dict[str, Any]:
    return written(spec) | written_windows(spec)


FAMILIES = (
    Family(
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        models="Qwen2, Qwen2.5",
        read=read,
        write=write,
    ),
)
