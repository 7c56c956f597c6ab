"""SmolVLM and Idefics3: Llama with a SigLIP tower over tiles of fixed size, and pixel shuffle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import llama
from miles.models.families.base import ModelFamily
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import (
    PositionTableSpec,
    ShuffleProjectorSpec,
    VisionMlpSpec,
    VisionSpec,
    VisionTowerSpec,
)

# transformers' defaults for a config that does not name them.
_IMAGE_TOKEN = 128257
_SCALE = 2
_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}

_NAMES = {
    "embedding": "model.text_model.embed_tokens",
    "layer": "model.text_model.layers.{}",
    "norm": "model.text_model.norm",
    "vision": "model.vision_model",
    "patch_embed": "embeddings.patch_embedding",
    "position_table": "embeddings.position_embedding.weight",
    "vision_block": "encoder.layers.{}",
    "vision_attention_norm": "layer_norm1",
    "vision_mlp_norm": "layer_norm2",
    "vision_q": "self_attn.q_proj",
    "vision_k": "self_attn.k_proj",
    "vision_v": "self_attn.v_proj",
    "vision_o": "self_attn.out_proj",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
    "vision_post_norm": "post_layernorm",
    "merger": "/model.connector",
    "merger_output": "modality_projection.proj",
}


def read(config: Mapping[str, Any], *, family: str) -> DecoderSpec:
    text = read_text_config(config, {}, family=family)
    if (kind := text.get("model_type", "llama")) != "llama":
        raise UsageError(f"text_config.model_type of config.json is {kind}, but only llama is supported ({family}).")
    decoder = replace(llama.read(text), family=family)
    reader = VisionConfigReader(config, family, _TOWER)
    hidden, patch = reader.positive_int("hidden_size"), reader.positive_int("patch_size")
    scale = config.get("scale_factor", _SCALE)
    if type(scale) is not int or scale < 1:
        reader.problems.append(f"scale_factor of config.json is {scale!r}, but must be a positive integer ({family}).")
    tower = VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=reader.heads("num_attention_heads", hidden),
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation=reader.activation()),
        norm="layer",
        norm_eps=reader.number("layer_norm_eps", 1e-6),
        patch_size=patch,
        channels=reader.positive_int("num_channels"),
        pixels="tiles",
        patch_bias=True,
        rope_theta=None,
        positions=PositionTableSpec(side=reader.positive_int("image_size") // patch, kind="fixed"),
        post_norm=True,
        projector=ShuffleProjectorSpec(kind="linear"),
    )
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
