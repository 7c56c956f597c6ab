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
class MtpLayout:
    """How a checkpoint stores multi-token-prediction layers, and what differs between families in computing them.

    ``block`` is the prefix of a layer's own tensors, ``layer`` that of its decoder layer, both formatted with the
    number of the MTP layer, which is counted from the number of decoder layers if ``after_layers``. The four names
    are those of its norms and its projection inside ``block``. ``hidden_first``: the projection's input begins with
    the hidden state instead of the embedding.
    """

    block: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    after_layers: bool = False
    hidden_first: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """One model family. ``models`` lists the well-known models that belong to it.

    ``write`` builds a config from a spec, for families that can be created from scratch; a loaded model is saved with
    its own config. The first of ``architectures`` is written. ``names`` overrides ``HF_NAMES``. ``is_unused`` says
    which tensors a checkpoint may contain that this decoder does not compute. ``mtp`` says how its checkpoints store
    multi-token-prediction layers, for families whose layers of that kind can be used as a draft. ``prefixes`` are
    prefixes of tensor names that some checkpoints have, and those of published ones, which are written; ``renames`` are
    such parts anywhere in a name.
    """

    model_type: str
    architectures: tuple[str, ...]
    models: str
    read: Callable[[Mapping[str, Any]], DecoderSpec]
    write: Callable[[DecoderSpec], dict[str, Any]] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    is_unused: Callable[[DecoderSpec, str], bool] = nothing
    mtp: MtpLayout | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)

    def published_name(self, hf_name: str) -> str:
        """Return the name that published checkpoints have for a tensor."""
        for prefix, published in self.prefixes.items():
            if hf_name.startswith(prefix) and not (published and hf_name.startswith(published)):
                hf_name = published + hf_name.removeprefix(prefix)
                break
        for part, published in self.renames.items():
            hf_name = hf_name.replace(part, published)
        return hf_name
