"""Registry of model families, by the architecture that a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import (
    deepseek,
    deepseek_v4,
    ernie4_5,
    gemma,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm5_next,
    glm_vl,
    gpt_oss,
    hunyuan,
    idefics3,
    inkling,
    internvl,
    kimi_k25,
    kimi_linear,
    lfm2,
    llama,
    llama4,
    minimax_m2,
    minimax_m3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nemotron_h,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
    qwen4_exp,
    qwen_vl,
    smollm3,
    step3p5,
)
from miles.models.families.base import ModelFamily
from miles.models.spec import DecoderSpec

_MODULES = (
    deepseek,
    deepseek_v4,
    ernie4_5,
    gemma,
    gemma3,
    gemma3n,
    gemma4,
    glm,
    glm5_next,
    glm_vl,
    gpt_oss,
    hunyuan,
    idefics3,
    inkling,
    internvl,
    kimi_k25,
    lfm2,
    kimi_linear,
    llama,
    llama4,
    minimax_m2,
    minimax_m3,
    mistral,
    mistral3,
    mistral4,
    mixtral,
    nemotron_h,
    phi3,
    qwen2,
    qwen3,
    qwen3_next,
    qwen4_exp,
    qwen_vl,
    smollm3,
    step3p5,
)
FAMILIES: tuple[ModelFamily, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)


def match_family(config: Mapping[str, Any]) -> ModelFamily | None:
    """Find the family of a config, or None; among several of one architecture, the one of its model type."""
    architectures = config.get("architectures") or ()
    named = architectures[0] if architectures else config.get("model_type")
    found = [f for f in FAMILIES if named in (*f.architectures, f.model_type)]
    return next((f for f in found if f.model_type == config.get("model_type")), found[0] if found else None)


def find_family(name: str) -> ModelFamily:
    """Return the family of that name (a ``DecoderSpec.family``)."""
    for family in FAMILIES:
        if family.model_type == name:
            return family
    raise UsageError(f"family {name!r} is not one of {', '.join(f.model_type for f in FAMILIES)}.")


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Build the spec of a Hugging Face config; a UsageError lists what in it this decoder does not support."""
    family = match_family(config)
    if family is not None:
        return family.read(config)
    key = "architectures" if config.get("architectures") else "model_type"
    named = config["architectures"][0] if config.get("architectures") else config.get("model_type")
    known = ", ".join(dict.fromkeys(f.architectures[0] for f in FAMILIES))
    raise UsageError(f"{key} of config.json is {named}, which is not supported; the supported ones are {known}.")


def config_from_spec(spec: DecoderSpec) -> dict[str, Any]:
    """Build a Hugging Face config from a spec, without the dtype, which depends on the weights."""
    family = find_family(spec.family)
    if family.write is None:
        raise UsageError(f"a {spec.family} model is saved with the config it was loaded with, but no config was given.")
    return {"architectures": [family.architectures[0]], "model_type": family.model_type} | family.write(spec)
