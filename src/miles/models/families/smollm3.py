"""SmolLM3: Llama with every fourth layer blind to positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' base for a config that names none.
_THETA = 2_000_000.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "smollm3")
    common, heads, rope = fields.common(tied=True), fields.heads(), fields.rope(theta=_THETA)
    bias = fields.flag("attention_bias")
    fields.only("hidden_act", "silu")
    mlp = MlpSpec(size=fields.whole("intermediate_size"), bias=fields.flag("mlp_bias"))
    turned = _turned(fields)
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(
                **heads, rope=rope if turned[i] else None, qkv_bias=bias, output_bias=bias, window=window
            ),
            ffn=mlp,
        )
        for i, window in enumerate(fields.windows(sliding=lambda i: not turned[i]))
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def _turned(fields: Fields) -> tuple[bool, ...]:
    """Which layers know positions: ``no_rope_layers`` has a 1 for those, despite its name."""
    count, every = fields.whole("num_hidden_layers"), fields.whole("no_rope_layer_interval", 4)
    given = fields.config.get("no_rope_layers")
    if given is None:
        return tuple((i + 1) % every != 0 for i in range(count))
    if len(given) < count:
        fields.refuse("no_rope_layers", f"names {len(given)} layers, but there are {count}")
        return (True,) * count
    return tuple(bool(turned) for turned in given[:count])


FAMILIES = (
    Family(
        model_type="smollm3",
        architectures=("SmolLM3ForCausalLM",),
        models="SmolLM3",
        read=read,
    ),
)
