"""What a model's Hugging Face folder is to hold, told before a tensor of it is brought together or written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models import loading, names
from miles.models.decoder import Decoder
from miles.models.families import config_of, spec_of
from miles.models.families.table import family_of
from miles.models.files import (
    INDEX,
    WEIGHTS,
    Described,
    Stored,
    copy_companions,
    read_config,
    stored_tensors,
    write_json,
)
from miles.models.pieces import Piece
from miles.models.sources import quantised
from miles.models.spec import DecoderSpec

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in loading.DTYPES.items()} | {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Safetensors' names of what torch computes with."""

DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A whole tensor of ours, by name, shape and the dtype it has on disk, and the tensors that it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]

    def described(self) -> tuple[Described, ...]:
        """The tensors on disk, in order."""
        size = self.dtype.itemsize
        return tuple(Described(p.hf_name, CODES[self.dtype], p.shape, prod(p.shape) * size) for p in self.pieces)

    def views(self, whole: Tensor) -> list[Tensor]:
        """What ``described`` describes, out of the tensor itself, which may be of a wider dtype."""
        narrow = whole.detach().to(self.dtype)
        return [piece.of(narrow) for piece in self.pieces]


def lone_unit(name: str, tensor: Tensor) -> Unit:
    """A tensor that has one name and one shape here and on disk."""
    shape = tuple(tensor.shape)
    return Unit(name=name, shape=shape, dtype=tensor.dtype, pieces=(Piece(name, shape, 0, shape[0]),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The folder: ``units`` and ``spare`` are its weights, ``apart`` lies in small files of its own.

    ``spare`` is what lies in ``like`` and is no part of our model; ``config`` is what config.json will say, and
    ``beside`` what other such files will, by their paths.
    """

    units: tuple[Unit, ...]
    config: Mapping[str, Any]
    spare: tuple[tuple[str, Stored], ...] = ()
    apart: Mapping[str, tuple[Unit, ...]]
    like: Path | None = None
    beside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of ours before it was cut."""
        every = [*self.units, *(unit for units in self.apart.values() for unit in units)]
        return {unit.name: unit.shape for unit in every}

    def dtypes(self) -> dict[str, torch.dtype]:
        """What every tensor of ours is on disk."""
        every = [*self.units, *(unit for units in self.apart.values() for unit in units)]
        return {unit.name: unit.dtype for unit in every}

    def accompany(self, folder: Path) -> None:
        """Write all that is no tensor: ``like``'s tokenizer files, and ``config.json`` last."""
        if self.like is not None:
            copy_companions(self.like, folder)
        for path, told in self.beside.items():
            (folder / path).parent.mkdir(exist_ok=True)
            write_json(folder / path, told)
        write_json(folder / "config.json", self.config)


def outline(
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Outline:
    """The folder of a decoder of ``spec`` in ``dtype``; where that says float32 for a parameter, it stays so.

    The config is the one given, else ``like``'s, else made from the spec.
    """
    return _outline(Decoder(spec, device="meta", dtype=dtype), dtype, like, config)


def outline_of(decoder: Decoder, *, like: Path | str | None = None, config: Mapping[str, Any] | None = None) -> Outline:
    """The same of a decoder that is there, in the dtypes it has."""
    return _outline(decoder, decoder.head().dtype, like, config)


def _outline(
    decoder: Decoder, dtype: torch.dtype, like: Path | str | None, config: Mapping[str, Any] | None
) -> Outline:
    spec, parameters = decoder.spec, dict(decoder.named_parameters())
    told = dict(config or (config_of(spec) if like is None else read_config(like)))
    if _shape(spec_of(told)) != _shape(spec):
        raise CheckpointError("The config to be written with the weights describes another model than they are.")
    units = tuple(
        Unit(name=name, shape=names.shape_of(pieces), dtype=parameters[name].dtype, pieces=pieces)
        for name, pieces in names.pieces(spec).items()
    )
    return Outline(
        units=units,
        config=_written(told, dtype),
        spare=tuple(_spare(spec, like)),
        apart={},
        like=None if like is None else Path(like),
    )


def _written(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A config that says how the weights are stored now, and nothing of how they were."""
    gone = ("torch_dtype", "quantization_config", "compression_config")
    told = {key: value for key, value in config.items() if key not in gone}
    if isinstance(told.get("text_config"), Mapping):
        told["text_config"] = _written(told["text_config"], dtype)
    return told | {"dtype": str(dtype).removeprefix("torch.")}


def _shape(spec: DecoderSpec) -> DecoderSpec:
    """What the weights must agree on: how long a context and which tokens end it are a run's own choice."""
    return replace(spec, eos_token_ids=(), max_positions=0)


def _spare(spec: DecoderSpec, like: Path | str | None) -> list[tuple[str, Stored]]:
    """What ``like`` holds that is not this decoder's, and says something."""
    if like is None or not any((Path(like) / name).exists() for name in (WEIGHTS, INDEX)):
        return []
    if quantised(read_config(like)) is not None:
        return []
    own = {piece.hf_name for pieces in names.pieces(spec).values() for piece in pieces}
    own |= set(names.stacked(spec).values())
    spare = family_of(spec.family).spare
    return [(name, stored) for name, stored in stored_tensors(like).items() if name not in own and spare(spec, name)]
