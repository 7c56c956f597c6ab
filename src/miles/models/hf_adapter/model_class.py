"""transformers' model class of a config: the class that ``architectures`` names, else an auto class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def find_hf_class(config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Any:
    """A class with ``from_pretrained``; the auto class of causal language models where code of a checkpoint runs."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if trust_remote_code and config.get("auto_map"):
        return AutoModelForCausalLM
    if (named := find_named_class(config)) is not None:
        return named
    model_type = str(config.get("model_type"))
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or model_type not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return AutoModelForCausalLM
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type], AutoModelForImageTextToText)


def find_named_class(config: Mapping[str, Any]) -> Any | None:
    """The class of transformers that ``architectures`` names; None where it has none of that name."""
    import transformers

    named = str(next(iter(config.get("architectures") or ()), ""))
    return getattr(transformers, named, None) if named.isidentifier() else None
