"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR: GLM-4, dense or MoE, with multimodal RoPE and a tower of merged patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from miles.models.families import glm
from miles.models.families.base import ModelFamily
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import DecoderSpec
from miles.models.vision.spec import ConvMergerSpec, PositionTableSpec, VisionMlpSpec, VisionSpec, VisionTowerSpec

# transformers' defaults for a config that does not name them.
_TEXT = {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768}
_MOE_TEXT = {"rms_norm_eps": 1e-5, "max_position_embeddings": 65536, "attention_bias": True}
_MROPE = (8, 12, 12)
_TOWER = {
    "depth": 24,
    "hidden_size": 1536,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_heads": 12,
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
}
_OCR_TEXT = {"rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "attention_bias": False}
_OCR_TOWER = _TOWER | {
    "hidden_size": 1024,
    "attention_bias": True,
    "num_heads": 16,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
}
_IMAGE_TOKEN = 151343
_MOE_IMAGE_TOKEN = 151363
_OCR_IMAGE_TOKEN = 59280

_NAMES = {
    "embedding": "model.language_model.embed_tokens",
    "layer": "model.language_model.layers.{}",
    "norm": "model.language_model.norm",
    "vision_qkv": "attn.qkv",
    "vision_up": "mlp.up_proj",
    "vision_down": "mlp.down_proj",
    "position_table": "embeddings.position_embedding.weight",
    "vision_pre_norm": "post_conv_layernorm",
    "vision_post_norm": "post_layernorm",
    "merger_norm": "post_projection_norm",
    "merger_up": "up_proj",
    "merger_down": "down_proj",
}
_DENSE_NAMES = {
    **_NAMES,
    "gate_up": "gate_up_proj",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}


def _read_vision(config: Mapping[str, Any], decoder: DecoderSpec, image_token: int) -> DecoderSpec:
    is_ocr = decoder.family == "glm_ocr"
    reader = VisionConfigReader(config, decoder.family, _OCR_TOWER if is_ocr else _TOWER)
    hidden, activation = reader.positive_int("hidden_size"), reader.activation()
    out = reader.positive_int("out_hidden_size")
    if out != decoder.hidden_size:
        reader.reject("out_hidden_size", f"is {out}, but the text model has {decoder.hidden_size} channels")
    patch, inner = reader.positive_int("patch_size"), reader.positive_int("intermediate_size")
    channels, bias = reader.positive_int("in_channels"), reader.flag("attention_bias")
    if is_ocr:
        own: dict[str, Any] = {
            "mlp": VisionMlpSpec(size=inner, activation=activation, gated=True, bias=bias),
            "output_bias": bias,
            "scaled_qk_norm": True,
            "projector": ConvMergerSpec(size=out * channels, activation=activation),
        }
    else:
        own = {
            "mlp": VisionMlpSpec(size=out, activation=activation, gated=True, bias=False),
            "output_bias": False,
            "positions": PositionTableSpec(side=reader.positive_int("image_size") // patch, kind="bicubic"),
            "pre_norm": True,
            "norm_first": True,
            "projector": ConvMergerSpec(size=inner, activation=activation),
        }
    tower = VisionTowerSpec(
        **own,
        hidden_size=hidden,
        num_layers=reader.positive_int("depth"),
        num_heads=reader.heads("num_heads", hidden, multiple=4),
        norm="rms",
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        patch_size=patch,
        temporal_patch_size=reader.positive_int("temporal_patch_size"),
        channels=channels,
        patch_bias=True,
        qkv_bias=bias,
        post_norm=True,
    )
    token = read_token_id(config, "image_token_id", image_token, decoder.family)
    # The frames of a video are marked with the token of images.
    vision = VisionSpec(
        image_token_id=token,
        video_token_id=token,
        tower=tower,
        positions="mrope",
        merge_size=reader.positive_int("spatial_merge_size"),
    )
    reader.raise_problems()
    return replace(decoder, vision=vision)


def read_dense(config: Mapping[str, Any], *, family: str) -> DecoderSpec:
    """GLM-4.1V and GLM-4.6V-Flash."""
    text = read_text_config(config, _TEXT, family=family)
    return _read_vision(config, glm.read_glm4(text, family, mrope=_MROPE), _IMAGE_TOKEN)


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """GLM-4.5V and GLM-4.6V."""
    text = read_text_config(config, _MOE_TEXT, family="glm4v_moe")
    return _read_vision(config, glm.read_glm4_moe(text, "glm4v_moe", mrope=_MROPE), _MOE_IMAGE_TOKEN)


def read_ocr(config: Mapping[str, Any]) -> DecoderSpec:
    """GLM-OCR: no biases in the attention of the text model, QK-norm and no position table in the tower."""
    text = read_text_config(config, _OCR_TEXT, family="glm_ocr")
    return _read_vision(config, glm.read_glm4(text, "glm_ocr", mrope=_MROPE), _OCR_IMAGE_TOKEN)


def _is_mtp_layer(spec: DecoderSpec, hf_name: str) -> bool:
    """The multi-token-prediction layer behind the last one."""
    return hf_name.startswith(f"model.language_model.layers.{spec.num_layers}.")


FAMILIES = (
    ModelFamily(
        model_type="glm4v",
        architectures=("Glm4vForConditionalGeneration",),
        models="GLM-4.1V 9B",
        read=partial(read_dense, family="glm4v"),
        names=_DENSE_NAMES,
    ),
    ModelFamily(
        model_type="glm46v",
        architectures=("Glm46VForConditionalGeneration",),
        models="GLM-4.6V-Flash",
        read=partial(read_dense, family="glm46v"),
        names=_DENSE_NAMES,
    ),
    ModelFamily(
        model_type="glm_ocr",
        architectures=("GlmOcrForConditionalGeneration",),
        models="GLM-OCR",
        read=read_ocr,
        names=_DENSE_NAMES | {"vision_q_norm": "attn.q_norm", "vision_k_norm": "attn.k_norm"},
        is_unused=_is_mtp_layer,
    ),
    ModelFamily(
        model_type="glm4v_moe",
        architectures=("Glm4vMoeForConditionalGeneration",),
        models="GLM-4.5V, GLM-4.6V",
        read=read_moe,
        names=_NAMES,
    ),
)
