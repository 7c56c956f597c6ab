"""Save plan: the files and tensors of a model's Hugging Face folder, known before any tensor is gathered or written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models.checkpoint import load, param_map
from miles.models.checkpoint.hf_layouts import HfLayout, QuantLayout, choose_layout
from miles.models.checkpoint.param_slices import HfSlice, weight_segments
from miles.models.checkpoint.safetensors_io import (
    INDEX,
    WEIGHTS,
    StoredTensor,
    TensorHeader,
    copy_tokenizer_files,
    read_config,
    stored_tensors,
    write_json,
)
from miles.models.checkpoint.tensor_sources import FLOATS, read_quant_config
from miles.models.checkpoint.write_quant_config import build_quantization_config
from miles.models.decoder import Decoder
from miles.models.families import config_from_spec, spec_from_config
from miles.models.families.registry import find_family
from miles.models.spec import DecoderSpec
from miles.precision.formats import WeightFormat
from miles.precision.quantize import quantize
from miles.precision.quantized_tensor import QuantizedTensor
from miles.precision.segments import split_segments, unstack

CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in load.DTYPES.items()} | {
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
"""Safetensors' names of torch dtypes."""

DTYPES = {code: dtype for dtype, code in CODES.items()}
PACKED_DTYPES = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8, "e2m1": torch.uint8}
"""Dtypes of packed values by their element type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveUnit:
    """A full decoder parameter: name, shape, dtype on disk, and the Hugging Face tensors it is written as.

    With ``layouts``, one for each piece, it is written quantized: ``dtype`` is that of the packed values, and the
    parameter is rounded to ``wide_dtype`` first, in which it is published.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[HfSlice, ...]
    layouts: tuple[HfLayout, ...] = ()
    wide_dtype: torch.dtype | None = None

    def headers(self) -> tuple[TensorHeader, ...]:
        """Return the headers of the tensors on disk, in order."""
        if self.layouts:
            return tuple(header for layout in self.layouts for header in layout.headers())
        size = self.dtype.itemsize
        return tuple(TensorHeader(p.hf_name, CODES[self.dtype], p.shape, prod(p.shape) * size) for p in self.pieces)

    def views(self, param: Tensor | QuantizedTensor) -> list[Tensor]:
        """Return the tensors that ``headers`` describes from the parameter, which may have a wider dtype.

        A parameter that is written quantized may be packed already.
        """
        if self.layouts:
            return self._quantized_views(param)
        assert isinstance(param, Tensor), f"{self.name} is packed, but is to be written in {self.dtype}"
        narrow = param.detach().to(self.dtype)
        return [piece.view(narrow) for piece in self.pieces]

    def _quantized_views(self, param: Tensor | QuantizedTensor) -> list[Tensor]:
        format, segments = self.layouts[0].format, weight_segments(self.pieces)
        if isinstance(param, Tensor):
            param = quantize(param.detach().to(self.wide_dtype), format, segments)
        parts = split_segments(param, segments)
        if len(self.layouts) == 1:
            return self.layouts[0].tensors(parts[0])
        if len(self.shape) == 3:  # the matrices of an expert are one after the other
            parts = [part for expert in zip(*map(unstack, parts), strict=True) for part in expert]
        return [t for layout, part in zip(self.layouts, parts, strict=True) for t in layout.tensors(part)]


def single_tensor_unit(name: str, tensor: Tensor) -> SaveUnit:
    """Build the unit of a tensor with the same name and shape on disk."""
    shape = tuple(tensor.shape)
    return SaveUnit(name=name, shape=shape, dtype=tensor.dtype, pieces=(HfSlice(name, shape, 0, shape[0]),))


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """The folder: ``units`` and ``extra_tensors`` are its weights, ``extra_files`` are further small safetensors files.

    ``extra_tensors`` are stored in ``like`` and not part of the model; ``config`` is the content of config.json, and
    ``json_files`` that of other JSON files by path. ``gather_unit`` returns the full tensor of one of the ``units``,
    where that is not the parameter of this name; all ranks call it in one order. A plan without ``units`` is of a
    folder that is no model: it has neither weights nor a config.
    """

    units: tuple[SaveUnit, ...]
    config: Mapping[str, Any]
    extra_tensors: tuple[tuple[str, StoredTensor], ...] = ()
    extra_files: Mapping[str, tuple[SaveUnit, ...]]
    like: Path | None = None
    json_files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    gather_unit: Callable[[str], Tensor] | None = None

    def full_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the unsharded shape of every parameter."""
        every = [*self.units, *(unit for units in self.extra_files.values() for unit in units)]
        return {unit.name: unit.shape for unit in every}

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of every parameter on disk."""
        every = [*self.units, *(unit for units in self.extra_files.values() for unit in units)]
        return {unit.name: unit.dtype for unit in every}

    def write_metadata(self, folder: Path) -> None:
        """Write everything except tensors: tokenizer files of ``like``, and ``config.json`` last."""
        if self.like is not None:
            copy_tokenizer_files(self.like, folder)
        for path, content in self.json_files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            write_json(folder / path, content)
        if self.units:
            write_json(folder / "config.json", self.config)


def plan_save(
    spec: DecoderSpec,
    *,
    dtype: torch.dtype,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    formats: Mapping[str, WeightFormat] | None = None,
) -> SavePlan:
    """Plan the folder of a decoder of ``spec`` in ``dtype``; parameters that are always float32 stay so.

    The config is the one given, else that of ``like``, else built from the spec. Parameters in ``formats`` are written
    quantized; a CheckpointError names a tensor whose shape does not allow that.
    """
    return _build_plan(Decoder(spec, device="meta", dtype=dtype), dtype, like, config, formats or {})


def plan_decoder_save(
    decoder: Decoder,
    *,
    like: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
    formats: Mapping[str, WeightFormat] | None = None,
) -> SavePlan:
    """Plan the folder of an existing decoder, in the dtypes it has; ``formats`` as in ``plan_save``."""
    return _build_plan(decoder, decoder.head().dtype, like, config, formats or {})


def _build_plan(
    decoder: Decoder,
    dtype: torch.dtype,
    like: Path | str | None,
    config: Mapping[str, Any] | None,
    formats: Mapping[str, WeightFormat],
) -> SavePlan:
    spec, parameters = decoder.spec, dict(decoder.named_parameters())
    config_json = dict(config or (config_from_spec(spec) if like is None else read_config(like)))
    if _weights_spec(spec_from_config(config_json)) != _weights_spec(spec):
        raise CheckpointError(
            "The config to be written describes another model than the weights; check the config that is passed."
        )
    pieces = param_map.build_param_map(spec)
    method = quant_method(pieces, formats)
    units = tuple(
        plan_unit(name, own, dtype if name in formats else parameters[name].dtype, formats.get(name), method)
        for name, own in pieces.items()
    )
    extra = tuple(_unused_tensors(spec, like))
    config_json = _config_for_dtype(config_json, dtype)
    if formats:
        linear = [name for name, stored in extra if name.endswith(".weight") and len(stored.shape) == 2]
        config_json["quantization_config"] = build_quantization_config(method, pieces, formats, linear)
    return SavePlan(
        units=units,
        config=config_json,
        extra_tensors=extra,
        extra_files={},
        like=None if like is None else Path(like),
    )


def quant_method(pieces: Mapping[str, Sequence[HfSlice]], formats: Mapping[str, WeightFormat]) -> QuantLayout:
    """Return the ``quant_method`` under which the parameters in ``formats`` are written."""
    stacked = any(len(piece.shape) == 3 and piece.transposed for name in formats for piece in pieces[name])
    return choose_layout(set(formats.values()), stacked=stacked)


def plan_unit(
    name: str, pieces: tuple[HfSlice, ...], dtype: torch.dtype, format: WeightFormat | None, method: QuantLayout
) -> SaveUnit:
    """Build the unit of a parameter: in ``dtype``, or quantized if a format is given."""
    shape = param_map.param_shape(pieces)
    if format is None:
        return SaveUnit(name=name, shape=shape, dtype=dtype, pieces=pieces)
    layouts = tuple(HfLayout(piece, format, method) for piece in pieces)
    packed = PACKED_DTYPES[format.element]
    return SaveUnit(name=name, shape=shape, dtype=packed, pieces=pieces, layouts=layouts, wide_dtype=dtype)


def _config_for_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the config with the current dtype and without quantization keys."""
    removed = ("torch_dtype", "quantization_config", "compression_config")
    config_json = {key: value for key, value in config.items() if key not in removed}
    if isinstance(config_json.get("text_config"), Mapping):
        config_json["text_config"] = _config_for_dtype(config_json["text_config"], dtype)
    return config_json | {"dtype": str(dtype).removeprefix("torch.")}


def _weights_spec(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec without what does not affect the saved weights: context length, EOS tokens, quantization."""
    return replace(spec, eos_token_ids=(), max_positions=0, quantization=None, adapters=None)


def _unused_tensors(spec: DecoderSpec, like: Path | str | None) -> list[tuple[str, StoredTensor]]:
    """List the tensors of ``like`` that this decoder does not use but that are to be copied.

    Of a quantized checkpoint these are parts that are not quantized, such as a vision tower.
    """
    if like is None or not any((Path(like) / name).exists() for name in (WEIGHTS, INDEX)):
        return []
    own = {piece.hf_name for pieces in param_map.build_param_map(spec).values() for piece in pieces}
    own |= set(param_map.stacked_expert_names(spec).values())
    family = find_family(spec.family)
    names = {family.published_name(name): stored for name, stored in stored_tensors(like).items()}
    unused = [(name, stored) for name, stored in names.items() if name not in own and family.is_unused(spec, name)]
    if read_quant_config(read_config(like)) is None:
        return unused
    quantized = {_part_of_model(name) for name, stored in unused if stored.dtype not in FLOATS}
    return [(name, stored) for name, stored in unused if _part_of_model(name) not in quantized]


def _part_of_model(hf_name: str) -> str:
    """The layer that a tensor belongs to, or the first two words of its name.

    >>> _part_of_model("model.layers.61.eh_proj.weight"), _part_of_model("model.vision_tower.norm.weight")
    ('model.layers.61', 'model.vision_tower')
    """
    match = re.match(r"[^.]+\.layers\.\d+", hf_name)
    return match[0] if match else ".".join(hf_name.split(".")[:2])
