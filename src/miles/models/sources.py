"""Where each piece of each parameter lies in a checkpoint and in what format, all checked on headers. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.core.errors import CheckpointError, UsageError
from miles.models import names
from miles.models.files import Stored
from miles.models.pieces import Piece, Shape, shape_of
from miles.models.spec import DecoderSpec

FLOATS = ("F32", "F16", "BF16")
_FP8 = "F8_E4M3"
# Values that share a scale in MXFP4, and the bytes they take.
_GROUP, _GROUP_BYTES = 32, 16
# What is stored in place of a weight or beside it, after its name.
_BESIDE = ("_scale_inv", "_blocks", "_scales")


@dataclass(frozen=True, slots=True)
class Plain:
    """A tensor stored as it is."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class Fp8:
    """Eight-bit floats, and a scale for each ``block`` (rows, columns) of a matrix."""

    stored: Stored
    scale: Stored
    block: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Four-bit floats by 32, and a power of two for each such group.

    Transformers holds such a matrix the other way round than its rows lie on disk.
    """

    blocks: Stored
    scales: Stored


Source = Plain | Fp8 | Mxfp4


@dataclass(frozen=True, slots=True)
class Fill:
    """A piece of a parameter of ours and where it is read from."""

    piece: Piece
    source: Source

    @property
    def turned(self) -> bool:
        """Do its last two dimensions lie the other way round on disk than here?"""
        return self.piece.transposed != isinstance(self.source, Mxfp4)

    @property
    def place(self) -> tuple[Path, int]:
        """Where reading it begins."""
        stored = self.source.blocks if isinstance(self.source, Mxfp4) else self.source.stored
        return stored.file, stored.start


@dataclass(frozen=True, slots=True)
class Quantised:
    """What a config says of how its weights are stored; ``block`` None is one scale a tensor."""

    method: Literal["fp8", "mxfp4"]
    block: tuple[int, int] | None = None


def quantised(config: Mapping[str, Any]) -> Quantised | None:
    """How a config says the weights are quantised, if they are; methods that are not read are refused."""
    inner = config.get("text_config") or {}
    given = config.get("quantization_config") or inner.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    method = given.get("quant_method")
    if method == "mxfp4":
        return Quantised("mxfp4")
    if method != "fp8":
        raise UsageError(
            f"quantization_config.quant_method of config.json is {method!r}, but only 'fp8' and 'mxfp4' are read: "
            "use a checkpoint in one of these or in bfloat16."
        )
    block = given.get("weight_block_size")
    if block is None:
        return Quantised("fp8")
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise UsageError(
            f"quantization_config.weight_block_size of config.json is {block!r}, but must be two positive integers."
        )
    return Quantised("fp8", (block[0], block[1]))


def sources(
    spec: DecoderSpec, stored: Mapping[str, Stored], how: Quantised | None, folder: Path
) -> dict[str, tuple[Fill, ...]]:
    """What to read for each parameter of ours, ordered as the files are laid out.

    Anything missing, unknown, mis-shaped or in a format not announced is a CheckpointError.
    """
    search = _Search(stored, how, folder)
    together = names.stacked(spec)
    found: dict[str, tuple[Fill, ...]] = {}
    for ours, pieces in names.pieces(spec).items():
        if together.get(ours) in stored:
            shape = shape_of(pieces)
            pieces = (Piece(together[ours], shape, 0, shape[0]),)
        found[ours] = tuple(Fill(piece, search.find(piece)) for piece in pieces)
    search.refuse_rest(spec)
    return dict(sorted(found.items(), key=lambda item: min(fill.place for fill in item[1])))


class _Search:
    """Looks tensors up by name and remembers which were used."""

    def __init__(self, stored: Mapping[str, Stored], how: Quantised | None, folder: Path) -> None:
        self._stored, self._how, self._folder = stored, how, folder
        self._used: set[str] = set()

    def find(self, piece: Piece) -> Source:
        name, shape = piece.hf_name, piece.shape
        if self._how == Quantised("mxfp4") and name not in self._stored and f"{name}_blocks" in self._stored:
            return self._mxfp4(name, shape)
        here = self._take(name, shape, "config.json asks for it")
        if here.dtype in FLOATS:
            return Plain(here)
        if here.dtype != _FP8:
            raise CheckpointError(f"{name} in {here.file} is stored as {here.dtype}, not {', '.join(FLOATS)}.")
        if self._how is None or self._how.method != "fp8" or len(shape) not in (2, 3):
            raise CheckpointError(
                f"{name} in {here.file} is stored as {_FP8}, but quantization_config of config.json does not say how."
            )
        return self._fp8(name, shape, here)

    def _fp8(self, name: str, shape: Shape, here: Stored) -> Fp8:
        assert self._how is not None
        scale = f"{name}_scale_inv"
        *lead, rows, columns = shape
        why = f"{name} in {here.file} is stored as {_FP8} and has no values without it"
        if self._how.block is None:
            found = self._take(scale, None, why)
            if math.prod(found.shape) != math.prod(lead):
                raise CheckpointError(
                    f"{scale} in {found.file} has shape {found.shape}, but {name} needs one scale a matrix."
                )
            block = (rows, columns)
        else:
            block = self._how.block
            grid = (*lead, -(-rows // block[0]), -(-columns // block[1]))
            found = self._take(scale, grid, why)
        if found.dtype not in (*FLOATS, "F8_E8M0"):
            raise CheckpointError(
                f"{scale} in {found.file} is stored as {found.dtype}, but scales are {', '.join(FLOATS)} or F8_E8M0."
            )
        return Fp8(here, found, block)

    def _mxfp4(self, name: str, shape: Shape) -> Mxfp4:
        *lead, columns, rows = shape
        if columns % _GROUP:
            raise CheckpointError(f"{name}_blocks in {self._folder} hold rows of {columns} values, which is not by 32.")
        groups = (*lead, rows, columns // _GROUP)
        blocks = self._take(f"{name}_blocks", (*groups, _GROUP_BYTES), "config.json asks for it")
        scales = self._take(f"{name}_scales", groups, f"{name}_blocks has no values without it")
        for part, found in ((f"{name}_blocks", blocks), (f"{name}_scales", scales)):
            if found.dtype != "U8":
                raise CheckpointError(f"{part} in {found.file} is stored as {found.dtype}, but MXFP4 is U8.")
        return Mxfp4(blocks, scales)

    def _take(self, name: str, shape: Shape | None, why: str) -> Stored:
        """The tensor of that name; of that shape, where one is given."""
        if name not in self._stored:
            asked = "" if shape is None else f", shape {shape}"
            raise CheckpointError(f"{name} is missing from {self._folder}: {why}{asked}.")
        here = self._stored[name]
        if shape is not None and here.shape != shape:
            raise CheckpointError(f"{name} in {here.file} has shape {here.shape}, but config.json says {shape}.")
        self._used.add(name)
        return here

    def refuse_rest(self, spec: DecoderSpec) -> None:
        """Every tensor left over must be one that says nothing new."""
        for name, here in self._stored.items():
            if name not in self._used and not self._says_nothing(spec, name):
                raise CheckpointError(f"{name} in {here.file} belongs to no part of a {spec.family} decoder.")

    def _says_nothing(self, spec: DecoderSpec, name: str) -> bool:
        if names.ignorable(spec, name):
            return True
        if self._how is None:
            return False
        module, _, leaf = name.rpartition(".")
        if leaf in ("activation_scale", "input_scale"):  # of how inputs are rounded, which they are not here
            return f"{module}.weight" in self._used or names.ignorable(spec, f"{module}.weight")
        return any(name.endswith(end) and names.ignorable(spec, name.removesuffix(end)) for end in _BESIDE)
