"""Mistral, Ministral and Ministral 3: Llama with sliding windows, and queries that sharpen over long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_WINDOW = 4096
_HEAD_DIM = 128
_STRETCHED = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read(fields: Fields, *, head_dim: int | None, window: int | None, eps: float = 1e-6) -> DecoderSpec:
    common, heads, rope = fields.common(eps=eps), fields.heads(head_dim=head_dim), fields.rope()
    fields.only("hidden_act", "silu")
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    temperature = _temperature(fields) if fields.family == "ministral3" else None
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=size, temperature=temperature), ffn=mlp)
        for size in fields.windows(always=True, default=window)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def _temperature(fields: Fields) -> tuple[float, float, float]:
    """Queries sharpen with every multiple of the length the model was first trained for."""
    key, given = fields.rotary()
    slope, floor = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if not isinstance(slope, int | float) or not isinstance(floor, int):
        fields.refuse(key, "lacks llama_4_scaling_beta or original_max_position_embeddings, which this family needs")
        return 1.0, 0.0, 0.0
    return float(floor), float(slope), 0.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """Mistral names one window for all layers; a config with ``layer_types`` is a Ministral under an older name."""
    return _read(Fields(config, "mistral"), head_dim=None, window=_WINDOW)


def read_ministral(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(Fields(config, "ministral"), head_dim=None, window=_WINDOW)


def read_ministral3(config: Mapping[str, Any]) -> DecoderSpec:
    config = {**config, "rope_parameters": config.get("rope_parameters") or _STRETCHED}
    return _read(Fields(config, "ministral3"), head_dim=_HEAD_DIM, window=None, eps=1e-5)


FAMILIES = (
    Family(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        models="Mistral 7B, Nemo, Small, Large",
        read=read,
    ),
    Family(
        model_type="ministral",
        architectures=("MinistralForCausalLM",),
        models="Ministral 8B",
        read=read_ministral,
    ),
    Family(
        model_type="ministral3",
        architectures=("Ministral3ForCausalLM",),
        models="Ministral 3, text",
        read=read_ministral3,
    ),
)
