"""Kimi-K2.5 and K2.6: Kimi-K2 with a vision tower (MoonViT) that takes images of any size; videos are not supported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import deepseek, mla
from miles.models.families.base import ModelFamily
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import MergerSpec, PositionTableSpec, VisionMlpSpec, VisionSpec, VisionTowerSpec

_FAMILY = "kimi_k25"
# transformers' defaults for a config that does not name them.
_IMAGE_TOKEN = 163605
_EPS = 1e-5
_TOWER = {
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": (2, 2),
}

_NAMES = {
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
    "vision": "vision_tower",
    "position_table": "patch_embed.pos_emb.weight",
    "vision_block": "encoder.blocks.{}",
    "vision_attention_norm": "norm0",
    "vision_mlp_norm": "norm1",
    "vision_qkv": "wqkv",
    "vision_o": "wo",
    "vision_up": "mlp.fc0",
    "vision_down": "mlp.fc1",
    "vision_post_norm": "encoder.final_layernorm",
    "merger": "/mm_projector",
    "merger_norm": "pre_norm",
    "merger_up": "proj.0",
    "merger_down": "proj.2",
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    text = read_text_config(config, {}, family=_FAMILY)
    if (kind := text.get("model_type", "deepseek_v3")) not in ("deepseek_v3", "kimi_k2"):
        raise UsageError(f"text_config.model_type of config.json is {kind}, but only deepseek_v3 is supported.")
    decoder = deepseek.read_v3(text, _FAMILY)
    reader = VisionConfigReader(config, _FAMILY, _TOWER)
    hidden, side = reader.positive_int("hidden_size"), reader.positive_int("pos_emb_height")
    reader.require("pos_emb_width", side)
    merge = reader.config["merge_kernel_size"]
    if not isinstance(merge, list | tuple) or len(merge) != 2 or merge[0] != merge[1]:
        reader.reject("merge_kernel_size", f"is {merge!r}, but must be two equal numbers")
        merge = (1, 1)
    if config.get("projection_hidden_size", hidden) != hidden:
        reader.reject("hidden_size", f"is {hidden}, but projection_hidden_size {config['projection_hidden_size']}")
    rope = reader.config.get("rope_parameters") or {}
    tower = VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=reader.heads("num_attention_heads", hidden, multiple=4),
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation=reader.activation()),
        norm="layer",
        norm_eps=_EPS,
        patch_size=reader.positive_int("patch_size"),
        pixels="rows",
        patch_bias=True,
        rope_theta=float(rope.get("rope_theta", 10_000.0)),
        rope="pairs",
        positions=PositionTableSpec(side=side, kind="bicubic", layout="square"),
        post_norm=True,
        projector=MergerSpec(norm="layer", norm_eps=float(config.get("projection_layer_norm_eps", _EPS))),
    )
    token = read_token_id(config, "image_token_id", _IMAGE_TOKEN, _FAMILY)
    reader.raise_problems()
    return replace(decoder, vision=VisionSpec(image_token_id=token, tower=tower, merge_size=merge[0]))


FAMILIES = (
    ModelFamily(
        model_type=_FAMILY,
        architectures=("Kimi_K25ForConditionalGeneration", "KimiK25ForConditionalGeneration"),
        models="Kimi-K2.5, K2.6",
        read=read,
        names=_NAMES,
        is_unused=mla.is_mtp_layer,
    ),
)
