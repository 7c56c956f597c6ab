"""Llama 3, 3.1 and 3.2, and what was built on them (SmolLM2 among others)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.fields import Fields, written
from miles.models.spec import DecoderSpec


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "llama")
    common = fields.common()
    bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    fields.settle()
    return DecoderSpec(**common, qk_norm=False, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def write(spec: DecoderSpec) -> dict[str, Any]:
    return written(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}
