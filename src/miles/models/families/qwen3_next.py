"""Qwen3-Next, Qwen3.5 and Qwen3.6: three Gated DeltaNet layers to one gated attention layer, dense or MoE.

Qwen3.5 stores the DeltaNet projections separately. Its published checkpoints also have a vision tower, that of Qwen3-VL
without deepstack features. For text the three components of a token's multimodal position are equal, so the RoPE of the
text model alone is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import qwen_vl
from miles.models.families.base import ModelFamily, MtpLayout
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, GatedDeltaNetSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_HEAD_DIM = 256
_PARTIAL_ROTARY = 0.25
_FULL_ATTENTION_INTERVAL = 4
_KERNEL = 4
_DELTA_DIM = 128
_KEY_HEADS = 16
_VALUE_HEADS = 32
_EXPERT_SIZE = 512

_MROPE = (11, 11, 10)
_IMAGE_TOKEN, _VIDEO_TOKEN = 248056, 248057
_TOWER = {**qwen_vl.TOWER3, "deepstack_visual_indexes": ()}

_MTP_LAYOUT = MtpLayout(
    block="mtp",
    layer="mtp.layers.{}",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    norm="norm",
)

_MOE_NAMES = {"shared": "shared_expert"}
_WRAPPED_NAMES = {
    "embedding": "model.language_model.embed_tokens",
    "layer": "model.language_model.layers.{}",
    "norm": "model.language_model.norm",
    "vision_qkv": "attn.qkv",
}


def read_mixer_kinds(
    reader: ConfigReader, *, fused: bool, mrope: tuple[int, int, int] | None = None, partial: float = _PARTIAL_ROTARY
) -> tuple[AttentionSpec, GatedDeltaNetSpec, tuple[str, ...]]:
    """Read both mixers, and the kind of each layer; ``partial`` is the rotated part of a head by default."""
    heads, bias = reader.attention_heads(head_dim=_HEAD_DIM), reader.flag("attention_bias")
    rope = reader.rope(head_dim=heads["head_dim"], partial=partial, mrope=mrope, mrope_interleaved=mrope is not None)
    attention = AttentionSpec(**heads, rope=rope, qk_norm="head", qkv_bias=bias, output_bias=bias, gated=True)
    delta = GatedDeltaNetSpec(
        key_heads=reader.positive_int("linear_num_key_heads", _KEY_HEADS),
        value_heads=reader.positive_int("linear_num_value_heads", _VALUE_HEADS),
        key_dim=reader.positive_int("linear_key_head_dim", _DELTA_DIM),
        value_dim=reader.positive_int("linear_value_head_dim", _DELTA_DIM),
        kernel=reader.positive_int("linear_conv_kernel_dim", _KERNEL),
        fused=fused,
    )
    if delta.value_heads % delta.key_heads and not reader.problems:
        why = f"is {delta.key_heads}, which does not divide the {delta.value_heads} value heads"
        reader.reject("linear_num_key_heads", why)
    every = reader.positive_int("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    kinds = ("full_attention", "linear_attention")
    layer_types = reader.layer_types(lambda i: kinds[(i + 1) % every != 0], *kinds)
    reader.require("hidden_act", "silu")
    reader.require("attn_output_gate", True)
    return attention, delta, layer_types


def _read_mixers(
    reader: ConfigReader, *, fused: bool, mrope: tuple[int, int, int] | None = None
) -> tuple[AttentionSpec | GatedDeltaNetSpec, ...]:
    attention, delta, layer_types = read_mixer_kinds(reader, fused=fused, mrope=mrope)
    return tuple(attention if kind == "full_attention" else delta for kind in layer_types)


def read_experts(reader: ConfigReader, *, norm_topk_prob: bool) -> MoeSpec:
    """Read the experts and the shared expert."""
    return MoeSpec(
        **reader.expert_counts("num_experts"),
        size=reader.positive_int("moe_intermediate_size", _EXPERT_SIZE),
        norm_topk_prob=norm_topk_prob,
        shared=MlpSpec(size=reader.positive_int("shared_expert_intermediate_size", _EXPERT_SIZE)),
        shared_gate=True,
    )


def read_next(config: Mapping[str, Any]) -> DecoderSpec:
    """Qwen3-Next."""
    reader = ConfigReader(config, "qwen3_next")
    common, mixers = reader.common_args(), _read_mixers(reader, fused=True)
    moe = read_experts(reader, norm_topk_prob=reader.flag("norm_topk_prob", True))
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    sparse = reader.sparse_step_layers()
    layers = tuple(LayerSpec(mixer=m, ffn=moe if s else mlp) for m, s in zip(mixers, sparse, strict=True))
    return reader.build_spec(common, layers, norm_offset=1.0)


def read_text(
    config: Mapping[str, Any], *, family: str, sparse: bool, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """Qwen3.5, the config of the text model alone; ``mrope`` if it has a vision tower beside it."""
    reader = ConfigReader(config, family)
    common, mixers = reader.common_args(), _read_mixers(reader, fused=False, mrope=mrope)
    if sparse:
        ffn = read_experts(reader, norm_topk_prob=True)
        reader.require("norm_topk_prob", True)
    else:
        ffn = MlpSpec(size=reader.positive_int("intermediate_size"))
    return reader.build_spec(common, (LayerSpec(mixer=mixer, ffn=ffn) for mixer in mixers), norm_offset=1.0)


def read_wrapped(config: Mapping[str, Any], *, family: str, sparse: bool) -> DecoderSpec:
    """Qwen3.5, the config of text model and vision tower; the outer config says whether the head is tied."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError(f"text_config of config.json is missing, and the text model is described there ({family}).")
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    inner = {"eos_token_id": config.get("eos_token_id"), **text, **tied}
    if config.get("vision_config") is None:
        return read_text(inner, family=family, sparse=sparse)
    decoder = read_text(inner, family=family, sparse=sparse, mrope=_MROPE)
    return qwen_vl.read_vision3(config, decoder, _TOWER, image_token=_IMAGE_TOKEN, video_token=_VIDEO_TOKEN)


def _is_mtp(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers."""
    return hf_name.startswith("mtp.")


def _is_mtp_or_vision(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers, and the vision tower of a model that is read without it."""
    return hf_name.startswith(("model.visual.", "mtp."))


FAMILIES = (
    ModelFamily(
        model_type="qwen3_next",
        architectures=("Qwen3NextForCausalLM",),
        models="Qwen3-Next (80B-A3B), Qwen3-Coder-Next",
        read=read_next,
        names=_MOE_NAMES,
        is_unused=_is_mtp,
        mtp=_MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="qwen3_5_text",
        architectures=("Qwen3_5ForCausalLM",),
        models="Qwen3.5, Qwen3.6, dense, the text model alone",
        read=partial(read_text, family="qwen3_5_text", sparse=False),
        is_unused=_is_mtp_or_vision,
        mtp=_MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="qwen3_5_moe_text",
        architectures=("Qwen3_5MoeForCausalLM",),
        models="Qwen3.5, Qwen3.6 with experts, the text model alone",
        read=partial(read_text, family="qwen3_5_moe_text", sparse=True),
        names=_MOE_NAMES,
        is_unused=_is_mtp_or_vision,
        mtp=_MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        models="Qwen3.5, Qwen3.6, dense (0.8B to 27B)",
        read=partial(read_wrapped, family="qwen3_5", sparse=False),
        names=_WRAPPED_NAMES,
        is_unused=_is_mtp_or_vision,
        mtp=_MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        models="Qwen3.5, Qwen3.6 with experts (35B-A3B to 397B-A17B)",
        read=partial(read_wrapped, family="qwen3_5_moe", sparse=True),
        names={**_MOE_NAMES, **_WRAPPED_NAMES},
        is_unused=_is_mtp_or_vision,
        mtp=_MTP_LAYOUT,
    ),
)
