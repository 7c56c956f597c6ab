"""Gemma 3 with images: a SigLIP tower, average pooling, and images that attend to themselves in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.gemma import NAMES, read_gemma3
from miles.models.families.siglip import SIGLIP_DEFAULTS, SIGLIP_NAMES, read_siglip_tower
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import PoolProjectorSpec, VisionSpec

# transformers' defaults for a config that does not name them.
_IMAGE_TOKEN = 262_144
_FEATURES = 256
_TOWER = {**SIGLIP_DEFAULTS, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
_TOWER_TYPE = "siglip_vision_model"
_UNUSED = "vision_tower.vision_model.head."

_NAMES = {
    **NAMES,
    **SIGLIP_NAMES,
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
    "vision": "vision_tower.vision_model",
    "merger": "/multi_modal_projector",
    "merger_norm": "mm_soft_emb_norm",
    "merger_output": "mm_input_projection_weight",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    decoder = read_gemma3(read_text_config(config, {}, family="gemma3"), "gemma3")
    reader = VisionConfigReader(config, "gemma3", _TOWER)
    reader.require("model_type", _TOWER_TYPE)
    tower = read_siglip_tower(reader, PoolProjectorSpec(norm_eps=reader.number("layer_norm_eps", 1e-6)))
    assert tower.positions is not None
    side = tower.positions.side
    features = config.get("mm_tokens_per_image", _FEATURES)
    pooled = isqrt(features) if type(features) is int and features > 0 else 0
    if pooled < 1 or pooled**2 != features or side % pooled:
        reader.problems.append(
            f"mm_tokens_per_image of config.json is {features!r}, but an image of {side} x {side} patches is pooled to "
            "a square that divides it (gemma3)."
        )
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    token = read_token_id(config, key, _IMAGE_TOKEN, "gemma3")
    reader.raise_problems()
    vision = VisionSpec(image_token_id=token, tower=tower, merge_size=side // pooled, bidirectional_spans=True)
    return replace(decoder, vision=vision)


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """The attention pooling that SigLIP has behind its tower."""
    return hf_name.startswith(_UNUSED)


FAMILIES = (
    ModelFamily(
        model_type="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        models="Gemma 3 4B, 12B, 27B",
        read=read,
        names=_NAMES,
        is_unused=_is_unused,
        prefixes={"vision_tower.": "vision_tower.vision_model."},
    ),
)
