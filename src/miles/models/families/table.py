"""Which families there are, by the architecture a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import llama, qwen2, qwen3, qwen3_moe
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one family's config is read and written."""

    model_type: str
    architecture: str
    read: Callable[[Mapping[str, Any]], DecoderSpec]
    write: Callable[[DecoderSpec], dict[str, Any]]


FAMILIES: tuple[Family, ...] = (
    Family(model_type="llama", architecture="LlamaForCausalLM", read=llama.read, write=llama.write),
    Family(model_type="qwen2", architecture="Qwen2ForCausalLM", read=qwen2.read, write=qwen2.write),
    Family(model_type="qwen3", architecture="Qwen3ForCausalLM", read=qwen3.read, write=qwen3.write),
    Family(model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", read=qwen3_moe.read, write=qwen3_moe.write),
)


def spec_of(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a Hugging Face config; a UsageError says what in it this decoder does not do."""
    architectures = config.get("architectures") or ()
    named = architectures[0] if architectures else config.get("model_type")
    for family in FAMILIES:
        if named in (family.architecture, family.model_type):
            return family.read(config)
    known = ", ".join(f.architecture for f in FAMILIES)
    key = "architectures" if architectures else "model_type"
    raise UsageError(f"{key} of config.json is {named}, which is not supported; the supported ones are {known}.")


def config_of(spec: DecoderSpec) -> dict[str, Any]:
    """A Hugging Face config for a spec, without a dtype (that is the weights' to say)."""
    for family in FAMILIES:
        if spec.family == family.model_type:
            return {"architectures": [family.architecture], "model_type": family.model_type} | family.write(spec)
    raise UsageError(f"family {spec.family!r} is not one of {', '.join(f.model_type for f in FAMILIES)}.")
