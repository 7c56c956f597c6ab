"""Gemma 4: proportional RoPE, normalized values, and a tower of images of any aspect ratio.

26B-A4B has experts beside an MLP. E2B and E4B have embeddings for each layer, and their last layers attend to the keys
and values of earlier ones, with an MLP twice as wide. Their audio tower is kept in checkpoints and not computed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.gemma import NAMES
from miles.models.families.vision_config import VisionConfigReader, read_text_config, read_token_id
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, PerLayerInputSpec, RopeSpec
from miles.models.vision.spec import (
    PositionTableSpec,
    ScaledPoolProjectorSpec,
    VisionMlpSpec,
    VisionSpec,
    VisionTowerSpec,
)

# transformers' defaults for a config that does not name them.
_TEXT = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_size_per_layer_input": 256,
}
_GLOBAL_HEAD_DIM = 512
_WINDOW = 512
_SLIDING_WINDOW_PATTERN = 6
_GLOBAL_THETA = 1_000_000.0
_GLOBAL_PART = 0.25
_TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10_240,
}
_TOWER_THETA = 100.0
_IMAGE_TOKEN, _VIDEO_TOKEN = 258_880, 258_884
_PER_LAYER_VOCABULARY = 262_144

_TEXT_NAMES = NAMES | {"moe": "", "router": "router.proj", "shared": "mlp", "stacked": "rows"}
_NAMES = _TEXT_NAMES | {
    "embedding": "model.language_model.embed_tokens",
    "layer": "model.language_model.layers.{}",
    "norm": "model.language_model.norm",
    "per_layer_table": "model.language_model.embed_tokens_per_layer",
    "per_layer_inputs": "model.language_model.per_layer_model_projection",
    "per_layer_inputs_norm": "model.language_model.per_layer_projection_norm",
    "vision": "model.vision_tower",
    "patch_embed": "patch_embedder.input_proj",
    "position_table": "patch_embedder.position_embedding_table",
    "vision_block": "encoder.layers.{}",
    "vision_attention_norm": "input_layernorm",
    "vision_mlp_norm": "pre_feedforward_layernorm",
    "vision_q": "self_attn.q_proj.linear",
    "vision_k": "self_attn.k_proj.linear",
    "vision_v": "self_attn.v_proj.linear",
    "vision_o": "self_attn.o_proj.linear",
    "vision_gate": "mlp.gate_proj.linear",
    "vision_up": "mlp.up_proj.linear",
    "vision_down": "mlp.down_proj.linear",
    "merger": "/model.embed_vision",
    "merger_output": "embedding_projection",
}


def read_text(config: Mapping[str, Any], family: str = "gemma4_text") -> DecoderSpec:
    """The language model; images attend in both directions in layers with a sliding window only."""
    reader = ConfigReader({**_TEXT, **config}, family)
    reader.require("hidden_activation", "gelu_pytorch_tanh")
    reader.require("use_bidirectional_attention", None, "vision")
    common, heads = reader.common_args(tied=True), reader.attention_heads()
    bias = reader.flag("attention_bias")
    shared = {"qk_norm": "head", "qkv_bias": bias, "output_bias": bias, "scale": 1.0, "value_norm": True}
    local = AttentionSpec(**heads, **shared, rope=reader.rope(layer_type="sliding_attention"))
    ffn: MlpSpec | MoeSpec = MlpSpec(size=reader.positive_int("intermediate_size"), activation="gelu_tanh")
    if reader.flag("enable_moe_block"):
        ffn = MoeSpec(
            num_experts=reader.positive_int("num_experts"),
            experts_per_token=reader.positive_int("top_k_experts"),
            size=reader.positive_int("moe_intermediate_size"),
            norm_topk_prob=True,
            activation="gelu_tanh",
            shared=ffn,
            beside_mlp=True,
        )
    last = reader.positive_int("num_hidden_layers") - 1
    windows = reader.sliding_windows(
        always=True, default=_WINDOW, sliding=lambda i: i != last and (i + 1) % _SLIDING_WINDOW_PATTERN != 0
    )
    if windows[-1] is not None:
        reader.reject("layer_types", "ends with a layer that has a sliding window, but the last one must have none")
    full = [number for number, window in enumerate(windows) if window is None]
    wide = AttentionSpec(**_read_global_heads(reader, heads, full), **shared, ignores_spans=True)
    sources = read_kv_sources(reader, windows)
    per_layer = _read_per_layer_input(reader)
    double = reader.flag("use_double_wide_mlp")
    layers = (
        LayerSpec(
            mixer=replace(wide if window is None else replace(local, window=window), kv_source=source),
            ffn=replace(ffn, size=2 * ffn.size) if double and source is not None else ffn,
            post_norms=True,
            output_scale=True,
            per_layer_size=0 if per_layer is None else per_layer.size,
        )
        for window, source in zip(windows, sources, strict=True)
    )
    return reader.build_spec(
        common,
        layers,
        per_layer_input=per_layer,
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_softcap=reader.optional_positive("final_logit_softcapping"),
    )


def read_kv_sources(reader: ConfigReader, windows: Sequence[int | None]) -> list[int | None]:
    """The layer whose keys and values each of the last layers attends to: the last of its kind that has its own."""
    shared = reader.config.get("num_kv_shared_layers") or 0
    first = len(windows) - shared
    if shared and first < 1:
        reader.reject("num_kv_shared_layers", f"is {shared}, of {len(windows)} layers")
        return [None] * len(windows)
    found: list[int | None] = [None] * len(windows)
    for number in range(first, len(windows)):
        own = [i for i in range(first) if (windows[i] is None) == (windows[number] is None)]
        if not own:
            reader.reject("num_kv_shared_layers", f"is {shared}, but no earlier layer is like layer {number}")
            break
        found[number] = own[-1]
    if shared and reader.flag("use_double_wide_mlp") and reader.flag("enable_moe_block"):
        reader.reject("use_double_wide_mlp", "is true for layers with experts, which is not implemented")
    return found


def _read_per_layer_input(reader: ConfigReader) -> PerLayerInputSpec | None:
    if not reader.config.get("hidden_size_per_layer_input"):
        return None
    return PerLayerInputSpec(
        size=reader.positive_int("hidden_size_per_layer_input"),
        vocab_size=reader.positive_int("vocab_size_per_layer_input", _PER_LAYER_VOCABULARY),
        pad_token_id=reader.config.get("pad_token_id"),
    )


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """Whether a tensor is one of the audio tower, or of keys and values that a layer has but does not use."""
    return hf_name.startswith(("model.audio_tower.", "model.embed_audio.")) or is_shared_kv(spec, hf_name)


def is_shared_kv(spec: DecoderSpec, hf_name: str) -> bool:
    """Whether a tensor makes keys or values of a layer that attends to those of an earlier one."""
    found = re.fullmatch(r".*layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\.weight", hf_name)
    if found is None or "vision_tower" in hf_name or int(found[1]) >= spec.num_layers:
        return False
    mixer = spec.layers[int(found[1])].mixer
    return isinstance(mixer, AttentionSpec) and mixer.kv_source is not None


def _read_global_heads(reader: ConfigReader, heads: Mapping[str, Any], full: list[int]) -> dict[str, Any]:
    """Heads and RoPE of the layers without a window, which may have heads of another size, and no value projection.

    Published configs have keys for them, those that transformers writes a group of overrides for each layer.
    """
    from_key, key = reader.flag("attention_k_eq_v"), "num_global_key_value_heads"
    overrides = reader.config.get("per_layer_config")
    if overrides is None:
        head_dim = reader.positive_int("global_head_dim", _GLOBAL_HEAD_DIM)
        kv_heads = reader.positive_int(key, heads["num_kv_heads"]) if from_key else heads["num_kv_heads"]
    else:
        key, same = "per_layer_config", next(iter(overrides.values()), {})
        if {int(number) for number in overrides} != set(full) or any(each != same for each in overrides.values()):
            reader.reject(key, "overrides other layers than those without a sliding window, or these not all alike")
        if set(same) - {"head_dim", "num_key_value_heads"}:
            reader.reject(key, f"overrides {', '.join(same)}, but only head_dim and num_key_value_heads may differ")
        head_dim = same.get("head_dim", heads["head_dim"])
        kv_heads = same.get("num_key_value_heads", heads["num_kv_heads"])
    if heads["num_heads"] % kv_heads:
        reader.reject(key, f"gives {kv_heads} key-value heads, which do not divide the attention heads")
        kv_heads = heads["num_heads"]
    rope = _read_global_rope(reader, head_dim)
    return {**heads, "head_dim": head_dim, "num_kv_heads": kv_heads, "value_from_key": from_key, "rope": rope}


def _read_global_rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    key, given = reader.rope_group("full_attention")
    if given.get("rope_type", "proportional") != "proportional":
        return reader.rope(layer_type="full_attention", head_dim=head_dim)
    values = {"rope_theta": _GLOBAL_THETA, "factor": 1.0, "partial_rotary_factor": _GLOBAL_PART if not given else 1.0}
    theta, factor, part = (given.get(name, value) for name, value in values.items())
    if not all(isinstance(value, int | float) and value > 0 for value in (theta, factor, part)) or part > 1:
        reader.reject(
            key, f"has the proportional RoPE {dict(given)!r}, whose numbers must be above 0, and the part 1 at most"
        )
        return RopeSpec(theta=_GLOBAL_THETA)
    pairs = int(part * head_dim // 2)
    return RopeSpec(theta=float(theta), kind="proportional", factor=float(factor), rotated_pairs=pairs)


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The language model with its vision tower; without one, if the config describes none."""
    text = read_text_config(config, {}, family="gemma4")
    decoder = read_text(text, "gemma4")
    reader = VisionConfigReader(config, "gemma4", _TOWER)
    hidden, heads = reader.positive_int("hidden_size"), reader.positive_int("num_attention_heads")
    reader.require("num_key_value_heads", heads)
    reader.require("head_dim", hidden // heads)
    reader.require("attention_bias", False, None)
    key, rope = reader.rope_group()
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        reader.reject(key, f"asks for rope type {rope['rope_type']!r}, but only 'axial' is implemented")
    eps = reader.number("rms_norm_eps", 1e-6)
    merge = reader.positive_int("pooling_kernel_size")
    token = read_token_id(config, "image_token_id", _IMAGE_TOKEN, "gemma4")
    video_token = read_token_id(config, "video_token_id", _VIDEO_TOKEN, "gemma4")
    mlp = VisionMlpSpec(
        size=reader.positive_int("intermediate_size"),
        activation=reader.activation("hidden_activation"),
        gated=True,
        bias=False,
    )
    reader.raise_problems()
    tower = VisionTowerSpec(
        hidden_size=hidden,
        num_layers=reader.positive_int("num_hidden_layers"),
        num_heads=heads,
        mlp=mlp,
        norm="rms",
        norm_eps=eps,
        patch_size=reader.positive_int("patch_size"),
        pixels="padded",
        patch_linear=True,
        qkv_bias=False,
        output_bias=False,
        rope_theta=float(rope.get("rope_theta", _TOWER_THETA)),
        rope="halves",
        positions=PositionTableSpec(side=reader.positive_int("position_embedding_size"), kind="axes"),
        qk_norm=True,
        block_post_norms=True,
        clipped=reader.flag("use_clipped_linears"),
        projector=ScaledPoolProjectorSpec(norm_eps=eps, standardize=reader.flag("standardize")),
    )
    is_bidirectional = text.get("use_bidirectional_attention") == "vision"
    vision = VisionSpec(
        image_token_id=token,
        video_token_id=video_token,
        tower=tower,
        merge_size=merge,
        bidirectional_spans=is_bidirectional,
    )
    return replace(decoder, vision=vision)


FAMILIES = (
    ModelFamily(
        model_type="gemma4_text",
        architectures=("Gemma4ForCausalLM",),
        models="Gemma 4 without its vision tower",
        read=read_text,
        names=_TEXT_NAMES,
        is_unused=_is_unused,
    ),
    ModelFamily(
        model_type="gemma4",
        architectures=("Gemma4ForConditionalGeneration",),
        models="Gemma 4 31B, 26B-A4B, E4B, E2B",
        read=read,
        names=_NAMES,
        is_unused=_is_unused,
    ),
)
