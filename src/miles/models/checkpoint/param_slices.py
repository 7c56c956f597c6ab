"""Slices of Hugging Face tensors that make up one decoder parameter: one tensor, or several concatenated. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
ParamMap = dict[str, "tuple[HfSlice, ...]"]
"""Decoder parameter name -> the Hugging Face tensors it consists of."""


@dataclass(frozen=True, slots=True)
class HfSlice:
    """A Hugging Face tensor of ``shape`` and the part of the decoder parameter that it fills.

    That part is rows ``start`` to ``stop``, of one expert's matrix if ``expert`` is set. The last two dimensions of a
    ``transposed`` tensor are swapped on disk. A ``row`` is a vector that has a first dimension of one on disk. Of
    stacked experts whose gates and ups are two tensors, ``matrix_rows`` are the rows that it fills of every matrix.
    An ``integer`` tensor holds integers on disk.
    """

    hf_name: str
    shape: Shape
    start: int
    stop: int
    expert: int | None = None
    transposed: bool = False
    row: bool = False
    matrix_rows: tuple[int, int] | None = None
    integer: bool = False

    def view(self, tensor: Any) -> Any:
        """Return the part of the decoder parameter ``tensor`` that this slice is: a view, shaped as on disk."""
        matrix = tensor if self.expert is None else tensor[self.expert]
        if not self.shape:  # one number, which the decoder may hold as a vector
            return matrix.reshape(()) if tuple(matrix.shape) == (1,) else matrix
        if self.row:
            return matrix.unsqueeze(0)
        part = matrix if self.stop - self.start == len(matrix) else matrix[self.start : self.stop]
        part = part if self.matrix_rows is None else part[:, slice(*self.matrix_rows)]
        return part.transpose(-1, -2) if self.transposed else part


def param_shape(slices: tuple[HfSlice, ...]) -> Shape:
    """Compute the shape of the decoder parameter that the slices fill."""
    last = slices[-1]
    if last.row:
        return last.shape[1:]
    shape = (*last.shape[:-2], last.shape[-1], last.shape[-2]) if last.transposed else last.shape
    if last.matrix_rows is not None:
        shape = (shape[0], max(s.matrix_rows[1] for s in slices if s.matrix_rows is not None), *shape[2:])
    inner = (max(s.stop for s in slices), *shape[1:])
    return inner if last.expert is None else (last.expert + 1, *inner)


def weight_segments(slices: tuple[HfSlice, ...]) -> tuple[int, ...]:
    """Return the rows of the checkpoint's matrices that one matrix of the decoder parameter is fused of.

    >>> weight_segments(concat_slices(("q", (8, 4)), ("k", (2, 4)), ("v", (2, 4))))
    (8, 2, 2)
    """
    first = slices[0]
    if first.matrix_rows is not None:
        return tuple(s.matrix_rows[1] - s.matrix_rows[0] for s in slices if s.matrix_rows is not None)
    if len(first.shape) > 2:
        return (first.shape[-1 if first.transposed else -2],)
    return tuple(s.stop - s.start for s in slices if s.expert == first.expert)


def concat_slices(*tensors: tuple[str, Shape], expert: int | None = None) -> tuple[HfSlice, ...]:
    """Build the slices of tensors (name, shape) concatenated along dimension 0."""
    slices: list[HfSlice] = []
    start = 0
    for hf_name, shape in tensors:
        slices.append(HfSlice(hf_name, shape, start, start + shape[0], expert))
        start += shape[0]
    return tuple(slices)


@dataclass(frozen=True, slots=True)
class ModuleNames:
    """A module: its prefix in the decoder, its prefix in the checkpoint, and the Hugging Face ``names`` by role."""

    prefix: str
    hf_prefix: str
    names: Mapping[str, str]

    def submodule(self, name: str, key: str) -> ModuleNames:
        """Return the names of a module inside this one; without a name its tensors are this one's in a checkpoint.

        A name that begins with ``../`` is beside this module in a checkpoint.
        """
        if self.names[key].startswith("../"):
            beside = f"{self.hf_prefix.rpartition('.')[0]}.{self.names[key].removeprefix('../')}"
            return ModuleNames(f"{self.prefix}.{name}", beside, self.names)
        inner = f".{self.names[key]}" if self.names[key] else ""
        return ModuleNames(f"{self.prefix}.{name}", f"{self.hf_prefix}{inner}", self.names)

    def hf_name(self, key: str, suffix: str = "weight") -> str:
        """Return the Hugging Face name of a tensor; roles that already name a full tensor take no ``suffix``."""
        return f"{self.hf_prefix}.{self.names[key]}" + (f".{suffix}" if suffix else "")

    def linear(
        self, name: str, keys: Mapping[str, int], width: int, *, bias: bool, fused: str | None = None
    ) -> ParamMap:
        """Map a linear layer of ``width`` inputs whose output rows are those of ``keys`` (role -> rows), concatenated.

        If the family names the role ``fused``, the checkpoint also keeps it as one tensor.
        """
        rows = {fused: sum(keys.values())} if fused is not None and fused in self.names else keys
        weights = concat_slices(*((self.hf_name(k), (n, width)) for k, n in rows.items()))
        params: ParamMap = {f"{self.prefix}.{name}.weight": weights}
        if bias:
            biases = concat_slices(*((self.hf_name(k, "bias"), (n,)) for k, n in rows.items()))
            params[f"{self.prefix}.{name}.bias"] = biases
        return params

    def tensor(
        self,
        name: str,
        key: str,
        shape: Shape,
        *,
        suffix: str = "weight",
        transposed: bool = False,
        row: bool = False,
        integer: bool = False,
    ) -> ParamMap:
        """Map one tensor; ``shape`` is the decoder's."""
        hf_shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        hf_shape = (1, *shape) if row else hf_shape
        hf_slice = HfSlice(self.hf_name(key, suffix), hf_shape, 0, shape[0], None, transposed, row, integer=integer)
        return {f"{self.prefix}.{name}": (hf_slice,)}
