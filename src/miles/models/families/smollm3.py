"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' default for a config without rope_theta.
_THETA = 2_000_000.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "smollm3")
    common = reader.common_args(tied=True)
    heads = reader.attention_heads()
    rope = reader.rope(theta=_THETA)
    bias = reader.flag("attention_bias")
    reader.require("hidden_act", "silu")
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), bias=reader.flag("mlp_bias"))
    has_rope = _rope_layers(reader)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **heads, rope=rope if has_rope[i] else None, qkv_bias=bias, output_bias=bias, window=window
            ),
            ffn=mlp,
        )
        for i, window in enumerate(reader.sliding_windows(sliding=lambda i: not has_rope[i]))
    )
    return reader.build_spec(common, layers)


def _rope_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have RoPE: ``no_rope_layers`` has a 1 for those, despite its name."""
    count, every = reader.positive_int("num_hidden_layers"), reader.positive_int("no_rope_layer_interval", 4)
    given = reader.config.get("no_rope_layers")
    if given is None:
        return tuple((i + 1) % every != 0 for i in range(count))
    if len(given) < count:
        reader.reject("no_rope_layers", f"names {len(given)} layers, but there are {count}")
        return (True,) * count
    return tuple(bool(has_rope) for has_rope in given[:count])


FAMILIES = (
    ModelFamily(
        model_type="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        models="SmolLM3",
        read=read,
    ),
)
