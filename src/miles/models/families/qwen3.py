"""Qwen3, dense: queries and keys are normalised per head before they are rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.fields import Fields, written
from miles.models.spec import DecoderSpec

# transformers' defaults for a config without head_dim and max_window_layers, whatever the sizes.
_HEAD_DIM = 128
_WINDOWED_FROM = 28


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "qwen3")
    common = fields.common(head_dim=_HEAD_DIM, first_windowed=config.get("max_window_layers", _WINDOWED_FROM))
    bias = fields.flag("attention_bias")
    fields.settle()
    return DecoderSpec(**common, qk_norm=True, qkv_bias=bias, output_bias=bias, mlp_bias=False)


def write(spec: DecoderSpec) -> dict[str, Any]:
    return written(spec) | {
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": False,
        "sliding_window": None,
    }
