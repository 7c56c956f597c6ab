"""Mistral 4: MLA with query temperature over long contexts, and a mixture of softmax experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isclose
from typing import Any

from miles.models.families import mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.mistral import read_temperature
from miles.models.spec import DecoderSpec

# transformers' RoPE for a config that leaves it out.
_YARN_DEFAULTS = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    """Groups of experts, if there are several, are scored by their best two."""
    given = config.get("rope_parameters") or _YARN_DEFAULTS
    part = given.get("partial_rotary_factor") if isinstance(given, Mapping) else None
    # It is the rotated part of a head, which the sizes say as well.
    rope = {key: value for key, value in given.items() if key != "partial_rotary_factor"} if part else given
    reader = ConfigReader({**config, "rope_parameters": rope}, "mistral4")
    mixer = mla.read_mla(reader, interleaved=reader.flag("rope_interleave", True))
    if part and not (isinstance(part, int | float) and isclose(part, mixer.rope_dim / mixer.head_dim)):
        reader.reject("rope_parameters", f"has partial_rotary_factor {part!r}, which the sizes of a head contradict")
    kind = None if mixer.rope is None else mixer.rope.kind
    if kind == "yarn":
        mixer = replace(mixer, temperature=read_temperature(reader))
    else:
        reader.reject("rope_parameters", f"has rope type {kind}, but only yarn is implemented")
    sparse = mla.read_moe_layers(reader, default=0)
    moe = mla.read_experts(reader, group_top=2, norm_topk_prob=reader.flag("norm_topk_prob", True))
    return mla.build_decoder_spec(reader, len(sparse) * (mixer,), moe, sparse)


FAMILIES = (
    ModelFamily(
        model_type="mistral4",
        architectures=("Mistral4ForCausalLM",),
        models="Mistral Small 4, text",
        read=read,
        names={"stacked": "rows"},
    ),
)
