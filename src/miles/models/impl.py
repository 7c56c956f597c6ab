"""Checkpoints in and out of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.models import hub
from miles.models.decoder import Decoder
from miles.models.door import Model
from miles.models.foreign import hub as foreign
from miles.models.foreign.decoder import ForeignDecoder
from miles.models.foreign.spec import ForeignSpec
from miles.models.outline import Outline, outline_of
from miles.models.spec import DecoderSpec


def load(
    folder: Path | str,
    spec: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> Model:
    """The model in ``folder``, computed by whom ``spec`` is for (``choice.chosen_spec``), for contexts so long."""
    if isinstance(spec, ForeignSpec):
        return foreign.load(folder, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    decoder = hub.load(folder, device=device, dtype=dtype)
    decoder.spec = replace(decoder.spec, max_positions=spec.max_positions)
    return decoder


def unfilled(model: Model) -> Model | None:
    """The instance an engine fills with published tensors; None where it makes one from the spec by itself."""
    return model.twin() if isinstance(model, ForeignDecoder) else None


def export(model: Model, folder: Path, *, like: Path | None, config: Mapping[str, Any] | None) -> None:
    """Write a folder that transformers loads, with ``like``'s tokenizer files."""
    if isinstance(model, ForeignDecoder):
        foreign.export(model, folder, like=like, config=config)
        return
    assert isinstance(model, Decoder)
    hub.export(model, folder, like=like, config=config)


def outline(model: Model, *, like: Path | None, config: Mapping[str, Any] | None) -> Outline | None:
    """What ``export`` would write; None where transformers writes its own."""
    return outline_of(model, like=like, config=config) if isinstance(model, Decoder) else None


def tensors(model: Model, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint of the same architecture holds, by the names of ``model``'s parameters, one at a time."""
    head = model.head()
    if isinstance(model, ForeignDecoder):
        found, own = foreign.tensors(folder, like=model, dtype=head.dtype), dict(model.named_parameters())
        return ((name, tensor) for name, tensor in found.items() if name in own)  # a tied head is there twice
    return hub.load_slices(folder, rank=0, world=1, device=head.device, dtype=head.dtype)
