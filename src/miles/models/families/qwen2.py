"""Qwen2 and Qwen2.5: biases on queries, keys and values, none elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.fields import Fields, written
from miles.models.spec import DecoderSpec

# transformers' default for a config without max_window_layers.
_WINDOWED_FROM = 28


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen2")
    common = fields.common(first_windowed=config.get("max_window_layers", _WINDOWED_FROM))
    fields.settle()
    return DecoderSpec(**common, qk_norm=False, qkv_bias=True, output_bias=False, mlp_bias=False)


def write(spec: DecoderSpec) -> dict[str, Any]:
    return written(spec) | {"use_sliding_window": False, "sliding_window": None}
