"""How a parameter of ours lies in a Hugging Face checkpoint: one tensor there, or several joined. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]
Parts = dict[str, "tuple[Piece, ...]"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor of ``shape`` and what it fills of ours.

    That is rows ``start`` to ``stop`` (of one expert's slab where ``expert`` is set); ``transposed`` tensors have
    their last two dimensions the other way round on disk.
    """

    hf_name: str
    shape: Shape
    start: int
    stop: int
    expert: int | None = None
    transposed: bool = False

    def of(self, tensor: Any) -> Any:
        """The part of our ``tensor`` that this piece is: a view, shaped as it is on disk."""
        slab = tensor if self.expert is None else tensor[self.expert]
        part = slab if self.stop - self.start == len(slab) else slab[self.start : self.stop]
        return part.transpose(-1, -2) if self.transposed else part


def shape_of(pieces: tuple[Piece, ...]) -> Shape:
    """The shape of the tensor of ours that the pieces fill."""
    last = pieces[-1]
    shape = (*last.shape[:-2], last.shape[-1], last.shape[-2]) if last.transposed else last.shape
    inner = (max(p.stop for p in pieces), *shape[1:])
    return inner if last.expert is None else (last.expert + 1, *inner)


def joined(*tensors: tuple[str, Shape], expert: int | None = None) -> tuple[Piece, ...]:
    """Tensors (name, shape) one below the other."""
    pieces: list[Piece] = []
    start = 0
    for hf_name, shape in tensors:
        pieces.append(Piece(hf_name, shape, start, start + shape[0], expert))
        start += shape[0]
    return tuple(pieces)


def whole(hf_name: str, shape: Shape, *, transposed: bool = False) -> tuple[Piece, ...]:
    """One tensor that is all of ours; ``shape`` is ours."""
    if transposed:
        return (Piece(hf_name, (*shape[:-2], shape[-1], shape[-2]), 0, shape[0], None, True),)
    return (Piece(hf_name, shape, 0, shape[0]),)


@dataclass(frozen=True, slots=True)
class Place:
    """A module: its name here and there, and what its parts are called there (``names``, by what they are)."""

    ours: str
    theirs: str
    names: Mapping[str, str]

    def within(self, ours: str, key: str) -> Place:
        """A module inside this one."""
        return Place(f"{self.ours}.{ours}", f"{self.theirs}.{self.names[key]}", self.names)

    def hf(self, key: str, leaf: str = "weight") -> str:
        """Their name of a part; a name given in full has no ``leaf``."""
        return f"{self.theirs}.{self.names[key]}" + (f".{leaf}" if leaf else "")

    def linear(self, ours: str, keys: Mapping[str, int], width: int, *, bias: bool, fused: str | None = None) -> Parts:
        """A linear layer of ``width`` inputs whose rows are those of ``keys`` (part -> rows), one below the other.

        Where their names know the part ``fused``, it is one tensor there too.
        """
        rows = {fused: sum(keys.values())} if fused is not None and fused in self.names else keys
        parts: Parts = {f"{self.ours}.{ours}.weight": joined(*((self.hf(k), (n, width)) for k, n in rows.items()))}
        if bias:
            parts[f"{self.ours}.{ours}.bias"] = joined(*((self.hf(k, "bias"), (n,)) for k, n in rows.items()))
        return parts

    def tensor(self, ours: str, key: str, shape: Shape, *, leaf: str = "weight", transposed: bool = False) -> Parts:
        """One tensor, of ``shape`` here."""
        return {f"{self.ours}.{ours}": whole(self.hf(key, leaf), shape, transposed=transposed)}


def merged(parts: Iterable[Parts]) -> Parts:
    """All of them, in order."""
    return {name: pieces for part in parts for name, pieces in part.items()}
