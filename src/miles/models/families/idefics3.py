"""SmolVLM and Idefics3: Llama with a SigLIP tower over tiles of fixed size, and pixel shuffle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import llama
from miles.models.families.base import ModelFamily
from miles.models.families.siglip import SIGLIP_DEFAULTS, SIGLIP_NAMES, read_siglip_tower
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import ShuffleProjectorSpec, VisionSpec

# transformers' defaults for a config that does not name them.
_IMAGE_TOKEN = 128257
_SCALE = 2
_TOWER = {**SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}

_NAMES = {
    **SIGLIP_NAMES,
    "embedding": "model.text_model.embed_tokens",
    "layer": "model.text_model.layers.{}",
    "norm": "model.text_model.norm",
    "vision": "model.vision_model",
    "merger": "/model.connector",
    "merger_output": "modality_projection.proj",
}


def read(config: Mapping[str, Any], *, family: str) -> DecoderSpec:
    text = read_text_config(config, {}, family=family)
    if (kind := text.get("model_type", "llama")) != "llama":
        raise UsageError(f"text_config.model_type of config.json is {kind}, but only llama is supported ({family}).")
    decoder = replace(llama.read(text), family=family)
    reader = VisionConfigReader(config, family, _TOWER)
    scale = config.get("scale_factor", _SCALE)
    if type(scale) is not int or scale < 1:
        reader.problems.append(f"scale_factor of config.json is {scale!r}, but must be a positive integer ({family}).")
    tower = read_siglip_tower(reader, ShuffleProjectorSpec(kind="linear"))
    token = read_token_id(config, "image_token_id", _IMAGE_TOKEN, family)
    reader.raise_problems()
    return replace(decoder, vision=VisionSpec(image_token_id=token, tower=tower, merge_size=scale))


FAMILIES = (
    ModelFamily(
        model_type="smolvlm",
        architectures=("SmolVLMForConditionalGeneration",),
        models="SmolVLM2",
        read=partial(read, family="smolvlm"),
        names=_NAMES,
    ),
    ModelFamily(
        model_type="idefics3",
        architectures=("Idefics3ForConditionalGeneration",),
        models="SmolVLM, Idefics3 8B",
        read=partial(read, family="idefics3"),
        names=_NAMES,
    ),
)
