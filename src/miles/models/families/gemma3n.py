"""Gemma 3n, the text model: AltUp, LAuReL, per-layer embeddings, shared keys and values, activation sparsity.

``altup_coef_clip`` is not read: transformers bounds AltUp's coefficients by it in training and not in evaluation. The
published bound is 120, and below it both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.gemma import NAMES, rope_by_layer_type
from miles.models.families.gemma4 import is_shared_kv, read_kv_sources
from miles.models.families.vision_config import read_text_config
from miles.models.residual_spec import AltUpSpec
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, PerLayerInputSpec

# transformers' defaults for a config that does not name them.
_TEXT = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 15,
    "pad_token_id": 0,
}
_WINDOW = 512
_SLIDING_WINDOW_PATTERN = 5
_LOGIT_SOFTCAP = 30.0
_LAUREL_RANK = 64
_STREAMS = 4
# Without a list of sparsities the first ten layers are sparse, if there are more.
_SPARSE_LAYERS = 10
_SPARSITY = 0.95

_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
_WRAPPED = "model.language_model."
_OUTER_NAMES = {
    "embedding": "embed_tokens",
    "layer": "layers.{}",
    "norm": "norm",
    "per_layer_table": "embed_tokens_per_layer",
    "per_layer_inputs": "per_layer_model_projection",
    "per_layer_inputs_norm": "per_layer_projection_norm",
    "altup_projection": "altup_projections.{}",
    "altup_unembed": "altup_unembed_projections.{}",
}


def read_text(config: Mapping[str, Any], family: str = "gemma3n_text") -> DecoderSpec:
    ropes = {"rope_parameters": rope_by_layer_type(config), "rope_scaling": None}
    reader = ConfigReader({**_TEXT, **config, **ropes}, family)
    reader.require("hidden_activation", "gelu_pytorch_tanh")
    reader.require("use_bidirectional_attention", False, None)
    reader.require("altup_correct_scale", True)
    common, heads = reader.common_args(tied=True), reader.attention_heads()
    bias = reader.flag("attention_bias")
    own = {**heads, "qk_norm": "head", "qkv_bias": bias, "output_bias": bias, "scale": 1.0, "value_norm": True}
    ropes = [reader.rope(layer_type=kind) for kind in ("full_attention", "sliding_attention")]
    windows = reader.sliding_windows(
        always=True, default=_WINDOW, sliding=lambda i: (i + 1) % _SLIDING_WINDOW_PATTERN != 0
    )
    mixers = [AttentionSpec(**own, rope=ropes[window is not None], window=window) for window in windows]
    altup, per_layer = _read_altup(reader), _read_per_layer_input(reader)
    rank = reader.positive_int("laurel_rank", _LAUREL_RANK)
    parts = zip(mixers, read_kv_sources(reader, windows), _read_mlps(reader), strict=True)
    layers = [
        LayerSpec(
            mixer=replace(mixer, kv_source=source),
            ffn=mlp,
            post_norms=True,
            per_layer_size=per_layer.size,
            laurel_rank=rank,
            altup=altup,
        )
        for mixer, source, mlp in parts
    ]
    return reader.build_spec(
        common,
        layers,
        per_layer_input=per_layer,
        altup=altup,
        embedding_scale=common["hidden_size"] ** 0.5,
        logit_softcap=reader.optional_positive("final_logit_softcapping", _LOGIT_SOFTCAP),
    )


def _read_altup(reader: ConfigReader) -> AltUpSpec:
    streams, active = reader.positive_int("altup_num_inputs", _STREAMS), reader.layer_index("altup_active_idx", 0)
    if active >= streams:
        reader.reject("altup_active_idx", f"is {active}, which is none of the {streams} streams")
        active = 0
    return AltUpSpec(streams=streams, active=active)


def _read_per_layer_input(reader: ConfigReader) -> PerLayerInputSpec:
    vocabulary, rows = reader.positive_int("vocab_size"), reader.positive_int("vocab_size_per_layer_input")
    return PerLayerInputSpec(
        size=reader.positive_int("hidden_size_per_layer_input"),
        vocab_size=rows,
        pad_token_id=reader.config.get("pad_token_id"),
        # The last tokens are placeholders of images and audio, which the towers replace.
        beyond_token_id=0 if rows < vocabulary else None,
    )


def _read_mlps(reader: ConfigReader) -> tuple[MlpSpec, ...]:
    """Read each layer's MLP: sizes and sparsities are lists, or the same for all."""
    count = reader.positive_int("num_hidden_layers")
    sizes = _list_for_layers(reader.config.get("intermediate_size"), count)
    sparsities = _list_for_layers(reader.config.get("activation_sparsity_pattern"), count)
    if sparsities == count * [None]:
        first = _SPARSE_LAYERS if count > _SPARSE_LAYERS else 0
        sparsities = first * [_SPARSITY] + (count - first) * [0.0]
    if len(sizes) != count or not all(type(size) is int and size > 0 for size in sizes):
        reader.reject("intermediate_size", f"is {sizes!r}, but must be a positive integer for each of {count} layers")
        sizes = count * [1]
    if len(sparsities) != count or not all(isinstance(part, int | float) and 0 <= part < 1 for part in sparsities):
        why = f"is {sparsities!r}, but must be from 0 to below 1 for each of {count} layers"
        reader.reject("activation_sparsity_pattern", why)
        sparsities = count * [0.0]
    pairs = zip(sizes, sparsities, strict=True)
    return tuple(MlpSpec(size=size, activation="gelu_tanh", sparsity=float(part)) for size, part in pairs)


def _list_for_layers(value: Any, count: int) -> list[Any]:
    return value if isinstance(value, list) else count * [value]


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """The language model of a checkpoint with towers for images and audio, which are not computed."""
    return read_text(read_text_config(config, {}, family="gemma3n"), "gemma3n")


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """Whether a tensor is one of a tower or its projector, or of keys and values that a layer does not use."""
    return hf_name.startswith(_TOWERS) or is_shared_kv(spec, hf_name)


FAMILIES = (
    ModelFamily(
        model_type="gemma3n_text",
        architectures=("Gemma3nForCausalLM",),
        models="Gemma 3n, the text model alone",
        read=read_text,
        names=NAMES,
        is_unused=_is_unused,
    ),
    ModelFamily(
        model_type="gemma3n",
        architectures=("Gemma3nForConditionalGeneration",),
        models="Gemma 3n E2B, E4B, the text model",
        read=read,
        names=NAMES | {key: _WRAPPED + name for key, name in _OUTER_NAMES.items()},
        is_unused=_is_unused,
    ),
)
