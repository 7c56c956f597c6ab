"""Llama 4, text model: most layers have RoPE and chunked attention, router weights multiply the experts' inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_THETA = 500_000.0
_CHUNK = 8192
_FLOOR_SCALE = 8192
_ATTN_SCALE = 0.1
_NO_ROPE_INTERVAL = 4
_MLP_SIZE = 16_384

_NAMES = {
    "mlp": "feed_forward",
    "moe": "feed_forward",
    "router": "router",
    "shared": "shared_expert",
    "stacked": "transposed",
}
_WRAPPED_NAMES = {
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
}


def read(config: Mapping[str, Any], family: str = "llama4_text") -> DecoderSpec:
    reader = ConfigReader(config, family)
    common = reader.common_args(eps=_EPS)
    reader.require("hidden_act", "silu")
    size = reader.positive_int("intermediate_size")
    moe = MoeSpec(
        **reader.expert_counts("num_local_experts"),
        size=size,
        norm_topk_prob=False,
        score="sigmoid",
        weigh_input=True,
        shared=MlpSpec(size=size),
    )
    mlp = MlpSpec(size=reader.positive_int("intermediate_size_mlp", _MLP_SIZE))
    mixers = _attention(reader)
    step = reader.positive_int("interleave_moe_layer_step", 1)
    named = config.get("moe_layers")
    sparse = frozenset(range(step - 1, len(mixers), step) if named is None else named)
    layers = (LayerSpec(mixer=mixer, ffn=moe if i in sparse else mlp) for i, mixer in enumerate(mixers))
    return reader.build_spec(common, layers)


def _attention(reader: ConfigReader) -> tuple[AttentionSpec, ...]:
    """Each layer's attention: with RoPE and QK-norm, or without RoPE and with a position-dependent temperature."""
    count, bias = reader.positive_int("num_hidden_layers"), reader.flag("attention_bias")
    own = {**reader.attention_heads(head_dim=_HEAD_DIM), "qkv_bias": bias, "output_bias": bias}
    rope: RopeSpec = reader.rope(theta=_THETA, interleaved=True)
    every = reader.positive_int("no_rope_layer_interval", _NO_ROPE_INTERVAL)
    # An empty list counts as missing.
    has_rope = reader.config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if len(has_rope) < count:
        reader.reject("no_rope_layers", f"names {len(has_rope)} layers, but there are {count}")
        has_rope = count * [True]
    named = ("full_attention", "chunked_attention")
    chunks = [kind == named[1] for kind in reader.layer_types(lambda i: named[bool(has_rope[i])], *named)]
    chunk = reader.positive_int("attention_chunk_size", None if "attention_chunk_size" in reader.config else _CHUNK)
    with_rope = {"rope": rope, "qk_norm": "unit" if reader.flag("use_qk_norm", True) else "none"}
    # Some published configs have an integer instead of true.
    tempered = bool(reader.config.get("attn_temperature_tuning", True))
    slope = reader.number("floor_scale", _FLOOR_SCALE), reader.number("attn_scale", _ATTN_SCALE)
    no_rope = {"rope": None, "temperature": slope if tempered else None}
    return tuple(
        AttentionSpec(**own, **(with_rope if has_rope[i] else no_rope), chunk=chunk if chunks[i] else None)
        for i in range(count)
    )


def read_wrapped(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model of a config that also has a vision model."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError("text_config of config.json is missing, and Llama 4 is described there (llama4).")
    kept = ("eos_token_id", "tie_word_embeddings")
    return read({**{key: config[key] for key in kept if key in config}, **text}, family="llama4")


def _is_vision(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision model and its projector."""
    return hf_name.startswith(("vision_model.", "multi_modal_projector."))


FAMILIES = (
    ModelFamily(
        model_type="llama4_text",
        architectures=("Llama4ForCausalLM",),
        models="Llama 4, the text model alone",
        read=read,
        names=_NAMES,
    ),
    ModelFamily(
        model_type="llama4",
        architectures=("Llama4ForConditionalGeneration",),
        models="Llama 4 Scout and Maverick, their text model",
        read=read_wrapped,
        names=_NAMES | _WRAPPED_NAMES,
        is_unused=_is_vision,
    ),
)
