"""Checkpoints in and out of a model, whoever computes it."""

from __future__ import annotations

from collections.abc import Mapping
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
from miles.models.spec import DecoderSpec


def load(
    folder: Path | str,
    spec: DecoderSpec,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> Model:
    """The model in ``folder``, computed by whom ``spec`` is for (``choice.chosen_spec``)."""
    if isinstance(spec, ForeignSpec):
        return foreign.load(folder, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    return hub.load(folder, device=device, dtype=dtype)


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


def tensors(model: Model, folder: Path) -> Mapping[str, Tensor]:
    """What a checkpoint of the same architecture holds, by the names of ``model``'s parameters, on the host."""
    dtype = model.head().dtype
    if isinstance(model, ForeignDecoder):
        return foreign.tensors(folder, like=model, dtype=dtype)
    return dict(hub.load(folder, device="cpu", dtype=dtype).named_parameters())
