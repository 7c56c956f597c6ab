"""Qwen3.5 and Qwen3.6, dense and with experts: Qwen3-Next's layers, their projections kept apart.

The published ones look at pictures too; the text model is what is read of them. On text alone the three positions of
a token are one, and its rotation is the plain one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import qwen3_next
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec, LayerSpec, MlpSpec

_INSIDE = {
    "embedding": "model.language_model.embed_tokens",
    "layer": "model.language_model.layers.{}",
    "norm": "model.language_model.norm",
}


def _read(config: Mapping[str, Any], family: str, *, sparse: bool) -> DecoderSpec:
    fields = Fields(config, family)
    common, mixed = fields.common(), qwen3_next.mixers(fields, fused=False)
    if sparse:
        ffn = qwen3_next.experts(fields, norm_topk_prob=True)
        fields.only("norm_topk_prob", True)
    else:
        ffn = MlpSpec(size=fields.whole("intermediate_size"))
    fields.settle()
    layers = tuple(LayerSpec(mixer=mixer, ffn=ffn) for mixer in mixed)
    return DecoderSpec(**common, layers=layers, norm_offset=1.0)


def _inner(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """The text model's own config; whether its head is tied, the whole model says."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError(f"text_config of config.json is missing, and the text model is described there ({family}).")
    tied = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {"eos_token_id": config.get("eos_token_id"), **text, **tied}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(config, "qwen3_5_text", sparse=False)


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(config, "qwen3_5_moe_text", sparse=True)


def read_whole(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(_inner(config, "qwen3_5"), "qwen3_5", sparse=False)


def read_whole_moe(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(_inner(config, "qwen3_5_moe"), "qwen3_5_moe", sparse=True)


def _unused(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision tower, and the layers that predict several tokens ahead."""
    return hf_name.startswith("model.visual.") or qwen3_next.ahead(spec, hf_name)


FAMILIES = (
    Family(
        model_type="qwen3_5_text",
        architectures=("Qwen3_5ForCausalLM",),
        models="Qwen3.5, Qwen3.6, dense, the text model alone",
        read=read,
        spare=_unused,
    ),
    Family(
        model_type="qwen3_5_moe_text",
        architectures=("Qwen3_5MoeForCausalLM",),
        models="Qwen3.5, Qwen3.6 with experts, the text model alone",
        read=read_moe,
        names=qwen3_next.NAMES,
        spare=_unused,
    ),
    Family(
        model_type="qwen3_5",
        architectures=("Qwen3_5ForConditionalGeneration",),
        models="Qwen3.5, Qwen3.6, dense (0.8B to 27B), their text model",
        read=read_whole,
        names=_INSIDE,
        spare=_unused,
    ),
    Family(
        model_type="qwen3_5_moe",
        architectures=("Qwen3_5MoeForConditionalGeneration",),
        models="Qwen3.5, Qwen3.6 with experts (35B-A3B to 397B-A17B), their text model",
        read=read_whole_moe,
        names={**qwen3_next.NAMES, **_INSIDE},
        spare=_unused,
    ),
)
