"""Tensor sources: the file position and quantization format of each slice of each parameter, checked on headers. No
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.core.errors import CheckpointError, UsageError
from miles.models.checkpoint import param_map
from miles.models.checkpoint.param_slices import HfSlice, Shape, param_shape
from miles.models.checkpoint.safetensors_io import StoredTensor
from miles.models.spec import DecoderSpec

FLOATS = ("F32", "F16", "BF16")
_FP8 = "F8_E4M3"
# Values that share a scale in MXFP4, and their size in bytes.
_GROUP, _GROUP_BYTES = 32, 16
# Suffixes of the tensors of a quantized weight.
_QUANT_SUFFIXES = ("_scale_inv", "_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor in a plain float dtype."""

    stored: StoredTensor


@dataclass(frozen=True, slots=True)
class Fp8Tensor:
    """An FP8 tensor with one scale for each ``block`` (rows, columns) of a matrix."""

    stored: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor:
    """An MXFP4 tensor: groups of 32 four-bit floats, with one power-of-two scale each.

    transformers keeps such a matrix transposed relative to its rows on disk.
    """

    blocks: StoredTensor
    scales: StoredTensor


TensorFormat = PlainTensor | Fp8Tensor | Mxfp4Tensor


@dataclass(frozen=True, slots=True)
class ParamSource:
    """A slice of a decoder parameter and where it is read from."""

    piece: HfSlice
    tensor: TensorFormat

    @property
    def is_transposed(self) -> bool:
        """Whether its last two dimensions are swapped on disk."""
        return self.piece.transposed != isinstance(self.tensor, Mxfp4Tensor)

    @property
    def place(self) -> tuple[Path, int]:
        """The file and the byte where reading it begins."""
        stored = self.tensor.blocks if isinstance(self.tensor, Mxfp4Tensor) else self.tensor.stored
        return stored.file, stored.start


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How a config says the weights are quantized; ``block`` None is one scale per tensor."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None = None


def read_quant_config(config: Mapping[str, Any]) -> QuantConfig | None:
    """Read how the weights are quantized, or None; unsupported methods are a UsageError."""
    inner = config.get("text_config") or {}
    quant = config.get("quantization_config") or inner.get("quantization_config") or config.get("compression_config")
    if not quant:
        return None
    method = quant.get("quant_method")
    if method == "mxfp4":
        return QuantConfig("mxfp4")
    if method != "fp8":
        raise UsageError(
            f"quantization_config.quant_method of config.json is {method!r}, but only 'fp8' and 'mxfp4' are supported: "
            "use a checkpoint in one of these or in bfloat16."
        )
    block = quant.get("weight_block_size")
    if block is None:
        return QuantConfig("fp8")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise UsageError(
            f"quantization_config.weight_block_size of config.json is {block!r}, but must be two positive integers."
        )
    return QuantConfig("fp8", (block[0], block[1]))


def locate_tensors(
    spec: DecoderSpec, stored: Mapping[str, StoredTensor], quant: QuantConfig | None, folder: Path
) -> dict[str, tuple[ParamSource, ...]]:
    """Return what to read for each parameter, in the order of the files.

    Anything missing, unknown, mis-shaped or in an undeclared format is a CheckpointError.
    """
    search = _Search(stored, quant, folder)
    stacked = param_map.stacked_expert_names(spec)
    found: dict[str, tuple[ParamSource, ...]] = {}
    for param, pieces in param_map.build_param_map(spec).items():
        if stacked.get(param) in stored:
            shape = param_shape(pieces)
            pieces = (HfSlice(stacked[param], shape, 0, shape[0]),)
        found[param] = tuple(ParamSource(piece, search.find(piece)) for piece in pieces)
    search.check_unused(spec)
    return dict(sorted(found.items(), key=lambda item: min(source.place for source in item[1])))


class _Search:
    """Looks up tensors by name and tracks which were used."""

    def __init__(self, stored: Mapping[str, StoredTensor], quant: QuantConfig | None, folder: Path) -> None:
        self._stored = stored
        self._quant = quant
        self._folder = folder
        self._used: set[str] = set()

    def find(self, piece: HfSlice) -> TensorFormat:
        name, shape = piece.hf_name, piece.shape
        if self._quant == QuantConfig("mxfp4") and name not in self._stored and f"{name}_blocks" in self._stored:
            return self._mxfp4(name, shape)
        stored = self._take(name, shape, "config.json requires it")
        if stored.dtype in FLOATS:
            return PlainTensor(stored)
        if stored.dtype != _FP8:
            raise CheckpointError(f"{name} in {stored.file} is stored as {stored.dtype}, not {', '.join(FLOATS)}.")
        if self._quant is None or self._quant.method != "fp8" or len(shape) not in (2, 3):
            raise CheckpointError(
                f"{name} in {stored.file} is stored as {_FP8}, but config.json has no such quantization_config."
            )
        return self._fp8(name, shape, stored)

    def _fp8(self, name: str, shape: Shape, stored: StoredTensor) -> Fp8Tensor:
        assert self._quant is not None
        scale = f"{name}_scale_inv"
        *lead, rows, columns = shape
        why = f"{name} in {stored.file} is stored as {_FP8} and needs it"
        if self._quant.block is None:
            found = self._take(scale, None, why)
            if math.prod(found.shape) != math.prod(lead):
                raise CheckpointError(
                    f"{scale} in {found.file} has shape {found.shape}, but {name} needs one scale a matrix."
                )
            block = (rows, columns)
        else:
            block = self._quant.block
            grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
            found = self._take(scale, grid, why)
        if found.dtype not in (*FLOATS, "F8_E8M0"):
            raise CheckpointError(
                f"{scale} in {found.file} is stored as {found.dtype}, but scales are {', '.join(FLOATS)} or F8_E8M0."
            )
        return Fp8Tensor(stored, found, block)

    def _mxfp4(self, name: str, shape: Shape) -> Mxfp4Tensor:
        *lead, columns, rows = shape
        if columns % _GROUP:
            raise CheckpointError(
                f"{name}_blocks in {self._folder} hold rows of {columns} values, which is not a multiple of 32."
            )
        groups = (*lead, rows, columns // _GROUP)
        blocks = self._take(f"{name}_blocks", (*groups, _GROUP_BYTES), "config.json requires it")
        scales = self._take(f"{name}_scales", groups, f"{name}_blocks needs it")
        for part, found in ((f"{name}_blocks", blocks), (f"{name}_scales", scales)):
            if found.dtype != "U8":
                raise CheckpointError(f"{part} in {found.file} is stored as {found.dtype}, but MXFP4 is U8.")
        return Mxfp4Tensor(blocks, scales)

    def _take(self, name: str, shape: Shape | None, why: str) -> StoredTensor:
        """Return the tensor of that name; of that shape, if one is given."""
        if name not in self._stored:
            expected = "" if shape is None else f", shape {shape}"
            raise CheckpointError(f"{name} is missing from {self._folder}: {why}{expected}.")
        stored = self._stored[name]
        if shape is not None and stored.shape != shape:
            raise CheckpointError(f"{name} in {stored.file} has shape {stored.shape}, but config.json says {shape}.")
        self._used.add(name)
        return stored

    def check_unused(self, spec: DecoderSpec) -> None:
        """Raise an error for any unused tensor that carries information."""
        for name, stored in self._stored.items():
            if name not in self._used and not self._is_ignorable(spec, name):
                raise CheckpointError(f"{name} in {stored.file} belongs to no part of a {spec.family} decoder.")

    def _is_ignorable(self, spec: DecoderSpec, name: str) -> bool:
        if param_map.is_ignorable(spec, name):
            return True
        if self._quant is None:
            return False
        module, _, suffix = name.rpartition(".")
        if suffix in ("activation_scale", "input_scale"):  # scales of quantized inputs, which are not used
            return f"{module}.weight" in self._used or param_map.is_ignorable(spec, f"{module}.weight")
        return any(
            name.endswith(end) and param_map.is_ignorable(spec, name.removesuffix(end)) for end in _QUANT_SUFFIXES
        )
