"""Gemma 2 and the text model of Gemma 3: pre and post norms, sliding windows, soft-capping (2) or QK-norm (3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec

# transformers' defaults for a config that leaves these out, whatever the sizes. Published Gemma 3 configs that wrap a
# text model with a vision tower leave out many keys.
_HEAD_DIM = 256
_QUERY_SCALAR = 256.0
_WINDOW = 4096
_SCORE_SOFTCAP = 50.0
_LOGIT_SOFTCAP = 30.0
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
_SLIDING_WINDOW_PATTERN = 6

NAMES = {"mlp_norm": "pre_feedforward_layernorm"}


def _build_spec(
    reader: ConfigReader,
    attention: Mapping[str, Any],
    *,
    ropes: tuple[RopeSpec, RopeSpec],
    sliding: Callable[[int], bool],
    logit_softcap: float | None,
) -> DecoderSpec:
    """Build the spec of either; ``ropes`` are those of global and of sliding-window layers."""
    common, bias = reader.common_args(tied=True), reader.flag("attention_bias")
    reader.require("hidden_activation", "gelu_pytorch_tanh")
    reader.require("use_bidirectional_attention", False, None)
    scale = (reader.optional_positive("query_pre_attn_scalar", _QUERY_SCALAR) or _QUERY_SCALAR) ** -0.5
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"), activation="gelu_tanh")
    layers: list[LayerSpec] = []
    for window in reader.sliding_windows(always=True, default=_WINDOW, sliding=sliding):
        rope = ropes[window is not None]
        mixer = AttentionSpec(**attention, rope=rope, qkv_bias=bias, output_bias=bias, scale=scale, window=window)
        layers.append(LayerSpec(mixer=mixer, ffn=mlp, post_norms=True))
    embedding_scale = common["hidden_size"] ** 0.5
    return reader.build_spec(
        common, layers, norm_offset=1.0, embedding_scale=embedding_scale, logit_softcap=logit_softcap
    )


def read_gemma2(config: Mapping[str, Any]) -> DecoderSpec:
    """Gemma 2: soft-capped attention scores and logits, a sliding window in every other layer."""
    reader = ConfigReader(config, "gemma2")
    heads, rope = reader.attention_heads(head_dim=_HEAD_DIM), reader.rope()
    softcap = reader.optional_positive("attn_logit_softcapping", _SCORE_SOFTCAP)
    return _build_spec(
        reader,
        {**heads, "softcap": softcap},
        ropes=(rope, rope),
        sliding=lambda i: i % 2 == 0,
        logit_softcap=reader.optional_positive("final_logit_softcapping", _LOGIT_SOFTCAP),
    )


def read_gemma3(config: Mapping[str, Any], family: str = "gemma3_text") -> DecoderSpec:
    """Gemma 3: QK-norm in place of soft-capping, and a RoPE base of their own for sliding-window layers."""
    ropes = {"rope_parameters": rope_by_layer_type(config), "rope_scaling": None}
    reader = ConfigReader({**_GEMMA3_DEFAULTS, **config, **ropes}, family)
    reader.require("attn_logit_softcapping", None)
    every = reader.positive_int("sliding_window_pattern", _SLIDING_WINDOW_PATTERN)
    return _build_spec(
        reader,
        {**reader.attention_heads(), "qk_norm": "head"},
        ropes=(reader.rope(layer_type="full_attention"), reader.rope(layer_type="sliding_attention")),
        sliding=lambda i: (i + 1) % every != 0,
        logit_softcap=reader.optional_positive("final_logit_softcapping"),
    )


def rope_by_layer_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters by layer type, as in newer configs; ``rope_scaling`` of older ones is the global type's."""
    given = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", _GLOBAL_THETA)}
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)}
    return {
        "full_attention": full | (given.get("full_attention") or {}) | (config.get("rope_scaling") or {}),
        "sliding_attention": local | (given.get("sliding_attention") or {}),
    }


FAMILIES = (
    ModelFamily(
        model_type="gemma2",
        architectures=("Gemma2ForCausalLM",),
        models="Gemma 2",
        read=read_gemma2,
        names=NAMES,
    ),
    ModelFamily(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        models="Gemma 3 270M, 1B",
        read=read_gemma3,
        names=NAMES,
    ),
)
