"""Mistral, Ministral and Ministral 3: Llama with sliding windows, and query temperature over long contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_WINDOW = 4096
_HEAD_DIM = 128
_YARN_DEFAULTS = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _read(reader: ConfigReader, *, head_dim: int | None, window: int | None, eps: float = 1e-6) -> DecoderSpec:
    common = reader.common_args(eps=eps)
    heads = reader.attention_heads(head_dim=head_dim)
    rope = reader.rope()
    reader.require("hidden_act", "silu")
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    temperature = read_temperature(reader) if reader.family == "ministral3" else None
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=size, temperature=temperature), ffn=mlp)
        for size in reader.sliding_windows(always=True, default=window)
    )
    return reader.build_spec(common, layers)


def read_temperature(reader: ConfigReader) -> tuple[float, float, float]:
    """Queries are scaled up at every multiple of the original context length."""
    key, given = reader.rope_group()
    slope, floor = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    if not isinstance(slope, int | float) or not isinstance(floor, int):
        reader.reject(key, "lacks llama_4_scaling_beta or original_max_position_embeddings, which this family needs")
        return 1.0, 0.0, 0.0
    return float(floor), float(slope), 0.0


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """Mistral has one window for all layers; a config with ``layer_types`` is a Ministral under an older name."""
    return _read(ConfigReader(config, "mistral"), head_dim=None, window=_WINDOW)


def read_ministral(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(ConfigReader(config, "ministral"), head_dim=None, window=_WINDOW)


def read_ministral3(config: Mapping[str, Any]) -> DecoderSpec:
    config = {**config, "rope_parameters": config.get("rope_parameters") or _YARN_DEFAULTS}
    return _read(ConfigReader(config, "ministral3"), head_dim=_HEAD_DIM, window=None, eps=1e-5)


FAMILIES = (
    ModelFamily(
        model_type="mistral",
        architectures=("MistralForCausalLM",),
        models="Mistral 7B, Nemo, Small, Large",
        read=read,
    ),
    ModelFamily(
        model_type="ministral",
        architectures=("MinistralForCausalLM",),
        models="Ministral 8B",
        read=read_ministral,
    ),
    ModelFamily(
        model_type="ministral3",
        architectures=("Ministral3ForCausalLM",),
        models="Ministral 3, text",
        read=read_ministral3,
    ),
)
