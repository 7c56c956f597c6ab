"""Llama 4: most layers have RoPE and chunked attention, router weights multiply the experts' inputs.

Its vision tower encodes tiles of fixed size with a class token and two-dimensional RoPE, and shuffles pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import VisionConfigReader, read_token_id
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec
from miles.models.vision.spec import (
    PositionTableSpec,
    ShuffleProjectorSpec,
    VisionMlpSpec,
    VisionSpec,
    VisionTowerSpec,
)

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_THETA = 500_000.0
_CHUNK = 8192
_FLOOR_SCALE = 8192
_ATTN_SCALE = 0.1
_NO_ROPE_INTERVAL = 4
_MLP_SIZE = 16_384
_IMAGE_TOKEN = 200092
_TOWER = {
    "hidden_size": 768,
    "hidden_act": "gelu",
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5632,
    "vision_output_dim": 7680,
    "image_size": 448,
    "patch_size": 14,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
_TOWER_EPS = 1e-5
_TOWER_THETA = 10_000.0

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
    "vision": "vision_model",
    "patch_embed": "patch_embedding.linear",
    "position_table": "positional_embedding_vlm",
    "class_token": "class_embedding",
    "vision_pre_norm": "layernorm_pre",
    "vision_post_norm": "layernorm_post",
    "vision_block": "model.layers.{}",
    "vision_attention_norm": "input_layernorm",
    "vision_mlp_norm": "post_attention_layernorm",
    "vision_q": "self_attn.q_proj",
    "vision_k": "self_attn.k_proj",
    "vision_v": "self_attn.v_proj",
    "vision_o": "self_attn.o_proj",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
    "merger": "/multi_modal_projector",
    "merger_up": "vision_adapter.mlp.fc1",
    "merger_down": "vision_adapter.mlp.fc2",
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
    """The config of a text model and a vision model; the latter may be missing."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError("text_config of config.json is missing, and Llama 4 is described there (llama4).")
    kept = ("eos_token_id", "tie_word_embeddings")
    decoder = read({**{key: config[key] for key in kept if key in config}, **text}, family="llama4")
    return decoder if config.get("vision_config") is None else _read_vision(config, decoder)


def _read_vision(config: Mapping[str, Any], decoder: DecoderSpec) -> DecoderSpec:
    reader = VisionConfigReader(config, "llama4", _TOWER)
    reader.require("pixel_shuffle_ratio", 0.5)
    hidden, patch = reader.positive_int("hidden_size"), reader.positive_int("patch_size")
    inner, outer = reader.positive_int("projector_input_dim"), reader.positive_int("projector_output_dim")
    for key in ("vision_output_dim", "projector_input_dim"):
        if reader.positive_int(key) != outer:
            reader.reject(key, f"is not the projector_output_dim of {outer}")
    if reader.positive_int("intermediate_size") != 4 * hidden:
        reader.reject("intermediate_size", f"is not four times the hidden_size of {hidden}")
    rope = reader.config.get("rope_parameters") or {}
    tower = VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=reader.heads("num_attention_heads", hidden, multiple=4),
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation="gelu"),
        norm="layer",
        norm_eps=_TOWER_EPS,
        patch_size=patch,
        channels=reader.positive_int("num_channels"),
        pixels="tiles",
        patch_linear=True,
        rope_theta=float(rope.get("rope_theta", reader.number("rope_theta", _TOWER_THETA))),
        rope="complex",
        positions=PositionTableSpec(side=reader.positive_int("image_size") // patch, kind="fixed"),
        class_token="last",
        pre_norm=True,
        post_norm=True,
        projector=ShuffleProjectorSpec(kind="adapter", inner=inner, outer=outer),
    )
    key = "image_token_index" if "image_token_index" in config else "image_token_id"
    token = read_token_id(config, key, _IMAGE_TOKEN, "llama4")
    reader.raise_problems()
    return replace(decoder, vision=VisionSpec(image_token_id=token, tower=tower, merge_size=2))


def _is_vision(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision model and its projector, of a model that is read without them."""
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
        models="Llama 4 Scout and Maverick",
        read=read_wrapped,
        names=_NAMES | _WRAPPED_NAMES,
        is_unused=_is_vision,
    ),
)
