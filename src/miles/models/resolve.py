"""Choice of the model implementation: the native decoder, or the transformers adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from miles.core.errors import UsageError
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.hf_adapter.spec import build_hf_adapter_spec
from miles.models.spec import DecoderSpec

ModelImpl = Literal["auto", "native", "transformers"]


def resolve_spec(folder: Path | str, impl: ModelImpl) -> DecoderSpec:
    """Return the spec of the checkpoint in ``folder``; an HfAdapterSpec if transformers computes it.

    ``auto`` never falls back to transformers by itself: it rejects unknown architectures and says what to do.
    """
    config = read_config(folder)
    if impl == "transformers":
        return build_hf_adapter_spec(config, folder)
    try:
        return spec_from_config(config)
    except UsageError as error:
        if impl == "native":
            raise
        raise UsageError([*error.problems[:-1], f"{error.problems[-1]} {_suggest_alternative(config)}"]) from error


def _suggest_alternative(config: Mapping[str, Any]) -> str:
    """Say what a user can do with an architecture that has no spec."""
    advice = "--model-impl transformers runs transformers' own module instead, more slowly"
    if config.get("auto_map"):
        return f"The checkpoint has its own code: with --trust-remote-code, {advice}."
    if is_known_to_transformers(str(config.get("model_type"))):
        return f"{advice}."
    from importlib.metadata import version

    installed = version("transformers")
    return f"The installed transformers {installed} does not support it either: upgrade it, and then {advice}."


def is_known_to_transformers(model_type: str) -> bool:
    """Return whether the installed transformers has a folder for the model type, without importing it."""
    from importlib.util import find_spec

    found = find_spec("transformers")
    if found is None or found.origin is None or not model_type.replace("-", "_").isidentifier():
        return False
    return (Path(found.origin).parent / "models" / model_type.replace("-", "_")).is_dir()
