"""Which families there are, by the architecture a config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    gemma2,
    gemma3,
    glm,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    llama,
    llama4,
    minimax_m2,
    mistral,
    mixtral,
    nemotron_h,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    smollm3,
)
from miles.models.families.family import Family
from miles.models.spec import DecoderSpec

FAMILIES: tuple[Family, ...] = (
    *deepseek_v2.FAMILIES,
    *deepseek_v3.FAMILIES,
    *deepseek_v32.FAMILIES,
    *gemma2.FAMILIES,
    *gemma3.FAMILIES,
    *glm.FAMILIES,
    *glm4_moe.FAMILIES,
    *glm4_moe_lite.FAMILIES,
    *glm_moe_dsa.FAMILIES,
    *gpt_oss.FAMILIES,
    *llama.FAMILIES,
    *llama4.FAMILIES,
    *minimax_m2.FAMILIES,
    *mistral.FAMILIES,
    *mixtral.FAMILIES,
    *nemotron_h.FAMILIES,
    *phi3.FAMILIES,
    *qwen2.FAMILIES,
    *qwen2_moe.FAMILIES,
    *qwen3.FAMILIES,
    *qwen3_5.FAMILIES,
    *qwen3_moe.FAMILIES,
    *qwen3_next.FAMILIES,
    *smollm3.FAMILIES,
)


def find(config: Mapping[str, Any]) -> Family | None:
    """The family a config belongs to, if it is one of ours; of several of one architecture, that of its model type."""
    architectures = config.get("architectures") or ()
    named = architectures[0] if architectures else config.get("model_type")
    found = [f for f in FAMILIES if named in (*f.architectures, f.model_type)]
    return next((f for f in found if f.model_type == config.get("model_type")), found[0] if found else None)


def family_of(name: str) -> Family:
    """The family of that name (a ``DecoderSpec.family``)."""
    for family in FAMILIES:
        if family.model_type == name:
            return family
    raise UsageError(f"family {name!r} is not one of {', '.join(f.model_type for f in FAMILIES)}.")


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Hugging Face config; a UsageError says what in it this decoder does not do."""
    family = find(config)
    if family is not None:
        return family.read(config)
    key = "architectures" if config.get("architectures") else "model_type"
    named = config["architectures"][0] if config.get("architectures") else config.get("model_type")
    known = ", ".join(dict.fromkeys(f.architectures[0] for f in FAMILIES))
    raise UsageError(f"{key} of config.json is {named}, which is not supported; the supported ones are {known}.")


def config_of(spec: DecoderSpec) -> dict[str, Any]:
    """A Hugging Face config for a spec, without a dtype (that is the weights' to say)."""
    family = family_of(spec.family)
    if family.write is None:
        raise UsageError(f"a {spec.family} model is saved with the config it was loaded with, and none was given.")
    return {"architectures": [family.architectures[0]], "model_type": family.model_type} | family.write(spec)
