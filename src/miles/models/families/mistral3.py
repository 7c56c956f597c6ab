"""Mistral 3 and Pixtral: Mistral with a vision tower that takes images of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import mistral
from miles.models.families.base import ModelFamily
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import MlpProjectorSpec, VisionMlpSpec, VisionSpec, VisionTowerSpec

_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "mistral": mistral.read,
    "ministral": mistral.read_ministral,
    "ministral3": mistral.read_ministral3,
}
# transformers' defaults for a config that does not name them.
_TOWER = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
_EPS = 1e-5
_THETA = 10_000.0
_ACTIVATIONS = ("gelu", "silu")

_NAMES = {
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
    "vision": "vision_tower",
    "patch_embed": "patch_conv",
    "vision_pre_norm": "ln_pre",
    "vision_block": "transformer.layers.{}",
    "vision_attention_norm": "attention_norm",
    "vision_mlp_norm": "ffn_norm",
    "vision_q": "attention.q_proj",
    "vision_k": "attention.k_proj",
    "vision_v": "attention.v_proj",
    "vision_o": "attention.o_proj",
    "vision_gate": "feed_forward.gate_proj",
    "vision_up": "feed_forward.up_proj",
    "vision_down": "feed_forward.down_proj",
    "merger": "/multi_modal_projector",
    "merger_up": "linear_1",
    "merger_down": "linear_2",
}


def read(config: Mapping[str, Any], *, family: str, image_token: int, merges: bool) -> DecoderSpec:
    """Mistral 3 ``merges`` the patches of a square, Pixtral does not."""
    text = read_text_config(config, {}, family=family)
    kind = text.get("model_type", "mistral")
    if kind not in _TEXTS:
        raise UsageError(
            f"text_config.model_type of config.json is {kind}, but only {', '.join(_TEXTS)} are supported."
        )
    decoder = replace(_TEXTS[kind](text), family=family)
    tower_kind = (config.get("vision_config") or {}).get("model_type", "pixtral")
    if tower_kind != "pixtral":
        raise UsageError(f"vision_config.model_type of config.json is {tower_kind}, but only pixtral is supported.")
    reader = VisionConfigReader(config, family, _TOWER)
    if config.get("vision_feature_layer", -1) != -1:
        reader.reject("vision_feature_layer", "takes features of an inner layer, which is not implemented")
    activation = config.get("projector_hidden_act", "gelu")
    if activation not in _ACTIVATIONS:
        reader.reject("projector_hidden_act", f"is {activation!r}, but only gelu or silu is implemented")
    hidden = reader.positive_int("hidden_size")
    theta = (reader.config.get("rope_parameters") or {}).get("rope_theta", reader.number("rope_theta", _THETA))
    tower = VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=reader.heads("num_attention_heads", hidden, multiple=4),
        mlp=VisionMlpSpec(
            size=reader.positive_int("intermediate_size"), activation=reader.activation(), gated=True, bias=False
        ),
        norm="rms",
        norm_eps=_EPS,
        patch_size=reader.positive_int("patch_size"),
        channels=reader.positive_int("num_channels"),
        pixels="tiles",
        qkv_bias=False,
        output_bias=False,
        rope_theta=float(theta),
        rope="alternating",
        pre_norm=True,
        projector=MlpProjectorSpec(
            activation=activation if activation in _ACTIVATIONS else "gelu",
            bias=bool(config.get("multimodal_projector_bias", not merges)),
            norm_eps=decoder.norm_eps if merges else None,
        ),
    )
    vision = VisionSpec(
        image_token_id=read_token_id(
            config, "image_token_index" if "image_token_index" in config else "image_token_id", image_token, family
        ),
        tower=tower,
        merge_size=int(config.get("spatial_merge_size", 2)) if merges else 1,
    )
    reader.raise_problems()
    return replace(decoder, vision=vision)


FAMILIES = (
    ModelFamily(
        model_type="mistral3",
        architectures=("Mistral3ForConditionalGeneration",),
        models="Mistral Small 3.1 and 3.2, Ministral 3",
        read=partial(read, family="mistral3", image_token=10, merges=True),
        names=_NAMES,
    ),
    ModelFamily(
        model_type="llava",
        architectures=("LlavaForConditionalGeneration",),
        models="Pixtral 12B",
        read=partial(read, family="llava", image_token=32000, merges=False),
        names=_NAMES,
    ),
)
