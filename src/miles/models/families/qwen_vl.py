"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: Qwen2 and Qwen3 with multimodal RoPE, and a vision tower of merged patches.

Published Qwen3-VL-MoE checkpoints store stacked experts with inputs before outputs; newer transformers saves them the
other way, and reads both. They are read by their shape, and written as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from miles.models.families import qwen2, qwen3
from miles.models.families.base import ModelFamily
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import AttentionSpec, DecoderSpec
from miles.models.vision.spec import MergerSpec, PositionTableSpec, VisionMlpSpec, VisionSpec, VisionTowerSpec

_IMAGE_TOKEN, _VIDEO_TOKEN = 151655, 151656
_EPS = 1e-6

# transformers' defaults for a config that does not name them.
_TEXT2 = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 32768, "max_window_layers": 80}
_TEXT3 = {"rms_norm_eps": 1e-6, "rope_theta": 5e5, "max_position_embeddings": 128000, "head_dim": 128}
_TEXT3_MOE = {key: value for key, value in _TEXT3.items() if key != "head_dim"}
_MROPE2, _MROPE3 = (16, 24, 24), (24, 20, 20)
_PATCHES = {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_TOWER2 = _PATCHES | {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
}
_TOWER25 = _PATCHES | {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
TOWER3 = _PATCHES | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}

_NAMES2 = {
    "vision": "visual",
    "vision_qkv": "attn.qkv",
    "vision_up": "mlp.fc1",
    "vision_down": "mlp.fc2",
    "merger_norm": "ln_q",
    "merger_up": "mlp.0",
    "merger_down": "mlp.2",
}
_NAMES25 = _NAMES2 | {"vision_up": "mlp.up_proj", "vision_down": "mlp.down_proj"}
_NAMES3 = {
    "embedding": "model.language_model.embed_tokens",
    "layer": "model.language_model.layers.{}",
    "norm": "model.language_model.norm",
    "vision_qkv": "attn.qkv",
}


def _read_common(reader: VisionConfigReader, width: str, out: str, decoder: DecoderSpec) -> dict[str, Any]:
    """Read the tower's arguments that all of these families have; ``width`` and ``out`` are keys of its sizes."""
    hidden = reader.positive_int(width)
    if (found := reader.positive_int(out)) != decoder.hidden_size:
        reader.reject(out, f"is {found}, but the text model has {decoder.hidden_size} channels")
    return {
        "hidden_size": hidden,
        "num_layers": reader.positive_int("depth"),
        "num_heads": reader.heads("num_heads", hidden, multiple=4),
        "norm_eps": _EPS,
        "patch_size": reader.positive_int("patch_size"),
        "temporal_patch_size": reader.positive_int("temporal_patch_size"),
        "channels": reader.positive_int("in_channels"),
    }


def _build(
    config: Mapping[str, Any],
    decoder: DecoderSpec,
    reader: VisionConfigReader,
    tower: VisionTowerSpec,
    *,
    image_token: int = _IMAGE_TOKEN,
    video_token: int = _VIDEO_TOKEN,
    tokens_per_second: int | None = None,
) -> DecoderSpec:
    vision = VisionSpec(
        image_token_id=read_token_id(config, "image_token_id", image_token, decoder.family),
        video_token_id=read_token_id(config, "video_token_id", video_token, decoder.family),
        tower=tower,
        positions="mrope",
        merge_size=reader.positive_int("spatial_merge_size"),
        tokens_per_second=tokens_per_second,
    )
    reader.raise_problems()
    return replace(decoder, vision=vision)


def read_qwen2_vl(config: Mapping[str, Any]) -> DecoderSpec:
    family = "qwen2_vl"
    decoder = qwen2.read_dense(read_text_config(config, _TEXT2, flat=True, family=family), family, mrope=_MROPE2)
    reader = VisionConfigReader(config, family, _TOWER2)
    common = _read_common(reader, "embed_dim", "hidden_size", decoder)
    size = common["hidden_size"] * reader.positive_int("mlp_ratio")
    tower = VisionTowerSpec(
        **common,
        norm="layer",
        mlp=VisionMlpSpec(size=size, activation=reader.activation()),
        projector=MergerSpec(norm="layer"),
    )
    return _build(config, decoder, reader, tower)


def read_qwen2_5_vl(config: Mapping[str, Any]) -> DecoderSpec:
    family = "qwen2_5_vl"
    decoder = qwen2.read_dense(read_text_config(config, _TEXT2, flat=True, family=family), family, mrope=_MROPE2)
    reader = VisionConfigReader(config, family, _TOWER25)
    common = _read_common(reader, "hidden_size", "out_hidden_size", decoder)
    square = common["patch_size"] * reader.positive_int("spatial_merge_size")
    tower = VisionTowerSpec(
        **common,
        norm="rms",
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation=reader.activation(), gated=True),
        projector=MergerSpec(norm="rms"),
        window=max(1, reader.positive_int("window_size") // square),
        full_layers=reader.layer_numbers("fullatt_block_indexes", common["num_layers"]),
    )
    return _build(config, decoder, reader, tower, tokens_per_second=reader.positive_int("tokens_per_second"))


def read_vision3(
    config: Mapping[str, Any],
    decoder: DecoderSpec,
    defaults: Mapping[str, Any] = TOWER3,
    *,
    image_token: int = _IMAGE_TOKEN,
    video_token: int = _VIDEO_TOKEN,
) -> DecoderSpec:
    """Add Qwen3-VL's tower, which Qwen3.5 has too, to a decoder."""
    reader = VisionConfigReader(config, decoder.family, defaults)
    common = _read_common(reader, "hidden_size", "out_hidden_size", decoder)
    rows = reader.positive_int("num_position_embeddings")
    if isqrt(rows) ** 2 != rows:
        reader.reject("num_position_embeddings", f"is {rows}, but must be the square of a number")
    layers = reader.layer_numbers("deepstack_visual_indexes", common["num_layers"])
    if len(layers) > decoder.num_layers:
        reader.reject("deepstack_visual_indexes", f"has {len(layers)} layers, but the text model {decoder.num_layers}")
    tower = VisionTowerSpec(
        **common,
        norm="layer",
        patch_bias=True,
        positions=PositionTableSpec(side=isqrt(rows), kind="bilinear"),
        mlp=VisionMlpSpec(size=reader.positive_int("intermediate_size"), activation=reader.activation()),
        projector=MergerSpec(norm="layer"),
        deepstack_layers=layers,
        deepstack_projector=MergerSpec(norm="layer", norm_merged=True) if layers else None,
    )
    return _build(config, decoder, reader, tower, image_token=image_token, video_token=video_token)


def read_qwen3_vl(config: Mapping[str, Any]) -> DecoderSpec:
    text = read_text_config(config, _TEXT3, family="qwen3_vl")
    return read_vision3(config, qwen3.read_dense(text, "qwen3_vl", mrope=_MROPE3))


def read_qwen3_vl_moe(config: Mapping[str, Any]) -> DecoderSpec:
    # The weights of the chosen experts are always normalized.
    text = read_text_config(config, _TEXT3_MOE, family="qwen3_vl_moe") | {"norm_topk_prob": True}
    return read_vision3(config, qwen3.read_moe(text, "qwen3_vl_moe", mrope=_MROPE3))


# -- configs of models from scratch -----------------------------------------------------------


def _write(spec: DecoderSpec, text: Mapping[str, Any], tower: Mapping[str, Any]) -> dict[str, Any]:
    vision, mixer = spec.vision, spec.layers[0].mixer
    assert vision is not None and isinstance(mixer, AttentionSpec)
    common = {
        "depth": vision.tower.num_layers,
        "num_heads": vision.tower.num_heads,
        "patch_size": vision.tower.patch_size,
        "temporal_patch_size": vision.tower.temporal_patch_size,
        "in_channels": vision.tower.channels,
        "spatial_merge_size": vision.merge_size,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(vision.tower.mlp.activation, vision.tower.mlp.activation),
    }
    return {
        "text_config": {**text, "model_type": f"{spec.family}_text"},
        "vision_config": {**common, **tower, "model_type": f"{spec.family}_vision"},
        "image_token_id": vision.image_token_id,
        "video_token_id": vision.video_token_id,
        "eos_token_id": text["eos_token_id"],
        "tie_word_embeddings": spec.tie_embeddings,
    }


def write_qwen2_vl(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.vision is not None
    tower = spec.vision.tower
    sizes = {"embed_dim": tower.hidden_size, "mlp_ratio": tower.mlp.size // tower.hidden_size}
    return _write(spec, qwen2.write_dense(spec), {**sizes, "hidden_size": spec.hidden_size})


def write_qwen2_5_vl(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.vision is not None and spec.vision.tower.window is not None
    tower = spec.vision.tower
    own = {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.mlp.size,
        "out_hidden_size": spec.hidden_size,
        "window_size": spec.vision.tower.window * tower.patch_size * spec.vision.merge_size,
        "fullatt_block_indexes": list(tower.full_layers),
        "tokens_per_second": spec.vision.tokens_per_second,
    }
    return _write(spec, qwen2.write_dense(spec), own)


def _write_tower3(spec: DecoderSpec) -> dict[str, Any]:
    assert spec.vision is not None
    tower = spec.vision.tower
    assert tower.positions is not None
    return {
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.mlp.size,
        "out_hidden_size": spec.hidden_size,
        "num_position_embeddings": tower.positions.side**2,
        "deepstack_visual_indexes": list(tower.deepstack_layers),
    }


def write_qwen3_vl(spec: DecoderSpec) -> dict[str, Any]:
    return _write(spec, qwen3.write_dense(spec), _write_tower3(spec))


def write_qwen3_vl_moe(spec: DecoderSpec) -> dict[str, Any]:
    return _write(spec, qwen3.write_moe(spec), _write_tower3(spec))


FAMILIES = (
    ModelFamily(
        model_type="qwen2_vl",
        architectures=("Qwen2VLForConditionalGeneration",),
        models="Qwen2-VL",
        read=read_qwen2_vl,
        write=write_qwen2_vl,
        names=_NAMES2,
    ),
    ModelFamily(
        model_type="qwen2_5_vl",
        architectures=("Qwen2_5_VLForConditionalGeneration",),
        models="Qwen2.5-VL",
        read=read_qwen2_5_vl,
        write=write_qwen2_5_vl,
        names=_NAMES25,
    ),
    ModelFamily(
        model_type="qwen3_vl",
        architectures=("Qwen3VLForConditionalGeneration",),
        models="Qwen3-VL, dense",
        read=read_qwen3_vl,
        write=write_qwen3_vl,
        names=_NAMES3,
    ),
    ModelFamily(
        model_type="qwen3_vl_moe",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        models="Qwen3-VL-MoE (30B-A3B, 235B-A22B)",
        read=read_qwen3_vl_moe,
        write=write_qwen3_vl_moe,
        names={**_NAMES3, "stacked": "transposed"},
    ),
)
