"""Gemma 3, text: Gemma 2 with normalised queries and keys for soft-caps, and a rotation of its own for windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import gemma2
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes; the published ones that wrap a text
# model beside a vision tower leave out much.
_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_SCALAR = 256.0
_WINDOW = 4096
_GLOBAL_THETA = 1_000_000.0
_LOCAL_THETA = 10_000.0
_WINDOWED_BUT_EVERY = 6


def _by_layer_type(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters by kind of layer, as newer configs have them; what older ones stretch is the global kind."""
    given = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta", _GLOBAL_THETA)}
    local = {"rope_theta": config.get("rope_local_base_freq", _LOCAL_THETA)}
    return {
        "full_attention": full | (given.get("full_attention") or {}) | (config.get("rope_scaling") or {}),
        "sliding_attention": local | (given.get("sliding_attention") or {}),
    }


def _read(config: Mapping[str, Any], family: str) -> DecoderSpec:
    ropes = {"rope_parameters": _by_layer_type(config), "rope_scaling": None}
    fields = Fields({**_DEFAULTS, **config, **ropes}, family)
    common, heads = fields.common(tied=True), fields.heads()
    local, wide = fields.rope(layer_type="sliding_attention"), fields.rope(layer_type="full_attention")
    bias = fields.flag("attention_bias")
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False, None)
    fields.only("attn_logit_softcapping", None)
    own = {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias}
    scale = (fields.bound("query_pre_attn_scalar", _SCALAR) or _SCALAR) ** -0.5
    every = fields.whole("sliding_window_pattern", _WINDOWED_BUT_EVERY)
    mlp = MlpSpec(size=fields.whole("intermediate_size"), activation="gelu_tanh")
    layers = tuple(
        LayerSpec(
            mixer=AttentionSpec(**heads, **own, rope=local if window else wide, scale=scale, window=window),
            ffn=mlp,
            post_norms=True,
        )
        for window in fields.windows(always=True, default=_WINDOW, sliding=lambda i: (i + 1) % every != 0)
    )
    cap = fields.bound("final_logit_softcapping")
    fields.settle()
    root = common["hidden_size"] ** 0.5
    return DecoderSpec(**common, layers=layers, norm_offset=1.0, embedding_scale=root, logit_softcap=cap)


def read(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(config, "gemma3_text")


def read_wrapped(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model beside a vision tower; how it ends and whether its head is tied, the whole model says."""
    outer = {key: config[key] for key in ("eos_token_id", "tie_word_embeddings") if key in config}
    return _read({**(config.get("text_config") or {}), **outer}, "gemma3")


def pictures(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision tower and what joins it to the text model."""
    return hf_name.startswith(("vision_tower.", "multi_modal_projector."))


FAMILIES = (
    Family(
        model_type="gemma3_text",
        architectures=("Gemma3ForCausalLM",),
        models="Gemma 3 270M, 1B",
        read=read,
        names=gemma2.NAMES,
    ),
    Family(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        models="Gemma 3 4B, 12B, 27B, text",
        read=read_wrapped,
        names={
            **gemma2.NAMES,
            "embedding": "language_model.model.embed_tokens",
            "layer": "language_model.model.layers.{}",
            "norm": "language_model.model.norm",
            "lm_head": "language_model.lm_head",
        },
        spare=pictures,
    ),
)
