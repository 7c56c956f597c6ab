"""Model family: how its config is read and written, and the Hugging Face names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.models.spec import DecoderSpec


def nothing(spec: DecoderSpec, hf_name: str) -> bool:
    """Every tensor of the checkpoint is used."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One model family. ``models`` lists the well-known models that belong to it.

    ``write`` builds a config from a spec, for families that can be created from scratch; a loaded model is saved with
    its own config. The first of ``architectures`` is written. ``names`` overrides ``HF_NAMES``. ``is_unused`` says
    which tensors a checkpoint may contain that this decoder does not compute. ``prefixes`` are prefixes of tensor names
    that some checkpoints have, and those of published ones, which are written.
    """

    model_type: str
    architectures: tuple[str, ...]
    models: str
    read: Callable[[Mapping[str, Any]], DecoderSpec]
    write: Callable[[DecoderSpec], dict[str, Any]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    is_unused: Callable[[DecoderSpec, str], bool] = nothing
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def published_name(self, hf_name: str) -> str:
        """Return the name that published checkpoints have for a tensor."""
        for prefix, published in self.prefixes.items():
            if hf_name.startswith(prefix) and not hf_name.startswith(published):
                return published + hf_name.removeprefix(prefix)
        return hf_name
