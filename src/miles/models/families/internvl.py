"""InternVL 2.5, 3 and 3.5 in the layout of transformers: tiles of fixed size, a class token, and pixel shuffle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import llama, qwen2, qwen3
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

_FAMILY = "internvl"
_TEXTS: Mapping[str, Callable[[Mapping[str, Any]], DecoderSpec]] = {
    "qwen2": qwen2.read_dense,
    "qwen3": qwen3.read_dense,
    "qwen3_moe": qwen3.read_moe,
    "llama": llama.read,
}
# transformers' defaults for a config that does not name them.
_IMAGE_TOKEN = 151667
_TOWER = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-6,
    "image_size": 448,
    "patch_size": 14,
    "num_channels": 3,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}

_NAMES = {
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
    "vision": "vision_tower",
    "patch_embed": "embeddings.patch_embeddings.projection",
    "position_table": "embeddings.position_embeddings",
    "class_token": "embeddings.cls_token",
    "vision_block": "encoder.layer.{}",
    "vision_attention_norm": "layernorm_before",
    "vision_mlp_norm": "layernorm_after",
    "vision_q": "attention.q_proj",
    "vision_k": "attention.k_proj",
    "vision_v": "attention.v_proj",
    "vision_o": "attention.projection_layer",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
    "merger": "/multi_modal_projector",
    "merger_norm": "layer_norm",
    "merger_up": "linear_1",
    "merger_output": "linear_2",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    text = read_text_config(config, {}, family=_FAMILY)
    kind = text.get("model_type", "qwen2")
    if kind not in _TEXTS:
        raise UsageError(
            f"text_config.model_type of config.json is {kind}, but only {', '.join(_TEXTS)} are supported."
        )
    decoder = replace(_TEXTS[kind](text), family=_FAMILY)
    reader = VisionConfigReader(config, _FAMILY, _TOWER)
    for key, value in (("use_qk_norm", False), ("norm_type", "layer_norm"), ("use_mean_pooling", True)):
        reader.require(key, value)
    reader.require("use_absolute_position_embeddings", True)
    for key, value in (("downsample_ratio", 0.5), ("projector_hidden_act", "gelu"), ("vision_feature_layer", -1)):
        if config.get(key, value) != value:
            reader.problems.append(f"{key} of config.json is {config[key]!r}, but only {value!r} is implemented.")
    hidden = reader.positive_int("hidden_size")
    patch = _read_side(reader, "patch_size")
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
        qkv_bias=reader.flag("attention_bias"),
        rope_theta=None,
        positions=PositionTableSpec(side=_read_side(reader, "image_size") // patch, kind="fixed", batched=True),
        class_token="first",
        layer_scale=True,
        projector=ShuffleProjectorSpec(kind="mlp"),
    )
    token = read_token_id(config, "image_token_id", _IMAGE_TOKEN, _FAMILY)
    vision = VisionSpec(image_token_id=token, tower=tower, merge_size=2)
    reader.raise_problems()
    return replace(decoder, vision=vision)


def _read_side(reader: VisionConfigReader, key: str) -> int:
    """Read a height and width, which must be equal."""
    value = reader.config[key]
    sides = set(value) if isinstance(value, list | tuple) else {value}
    side = next(iter(sides))
    if len(sides) > 1 or type(side) is not int or side < 1:
        reader.reject(key, f"is {value!r}, but must be one positive integer for height and width")
        return 1
    return side


FAMILIES = (
    ModelFamily(
        model_type=_FAMILY,
        architectures=("InternVLForConditionalGeneration",),
        models="InternVL 2.5, 3, 3.5 (the `-HF` checkpoints)",
        read=read,
        names=_NAMES,
    ),
)
