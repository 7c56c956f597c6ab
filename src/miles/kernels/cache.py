"""Where an engine keeps its past: pages of what every token left, and a row of states for every seat.

Shapes: T new tokens, G key-value heads, d channels of a key, e of a value, i of an index key, L layers of one shape,
P pages of p slots each, S = P * p slots in all, B sequences of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]


class KvShape(NamedTuple):
    """What a token leaves in a layer. A ``value_dim`` of 0 reads values off the first channels of the keys."""

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0


class Paged:
    """One tensor of a layer, a vector a token: ``pages`` [P, p * G * d] to be read whole, ``slots`` [S, G, d]."""

    __slots__ = ("_shape", "pages", "slots")

    def __init__(self, held_PpGd: Tensor) -> None:
        self.pages = held_PpGd.flatten(1)
        self.slots = held_PpGd.flatten(0, 1)
        self._shape = (-1, *held_PpGd.shape[2:])

    def read(self, pages: Tensor, rows: int, context: int) -> Tensor:
        """The first ``context`` tokens of each row of pages, [rows, context, G, d]."""
        return self.pages.index_select(0, pages).view(rows, *self._shape)[:, :context]


@dataclass(frozen=True, slots=True)
class Held:
    """What a layer keeps. Without ``values`` they are the first channels of the keys; ``even`` if both are as wide."""

    keys: Paged
    values: Paged | None
    index: Paged | None
    even: bool


class PagedCache:
    """Keys and values of every layer that has any. Pages start as zeros: a masked slot must still hold a finite number.

    Layers of one shape lie in one tensor; ``layers`` are views of it. ``zeros`` makes such a tensor.
    """

    def __init__(
        self,
        shapes: Sequence[KvShape | None],
        *,
        pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        self._all: list[Tensor] = []
        self.layers: dict[int, Held] = {}

        def take(layers: int, *vector: int) -> list[Paged]:
            shape = (layers, pages, page_size, *vector)
            held_LPpGd = _zeros(shape, device, dtype) if zeros is None else zeros(shape, dtype)
            self._all.append(held_LPpGd)
            return [Paged(held) for held in held_LPpGd.unbind(0)]

        for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
            layers = [i for i, each in enumerate(shapes) if each == shape]
            none = [None] * len(layers)
            keys = take(len(layers), shape.heads, shape.key_dim)
            values = take(len(layers), shape.heads, shape.value_dim) if shape.value_dim else none
            index = take(len(layers), shape.index_dim) if shape.index_dim else none
            even = shape.value_dim in (0, shape.key_dim)
            for layer, k, v, i in zip(layers, keys, values, index, strict=True):
                self.layers[layer] = Held(k, v, i, even)

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages, all at once: a target may be another's source."""
        for held in self._all:
            source, target = torch.from_numpy(sources).to(held.device), torch.from_numpy(targets).to(held.device)
            held[:, target] = held[:, source]


# -- states ---------------------------------------------------------------------------------


@dataclass(slots=True)
class SeatedCarry:
    """What one recurrent layer remembers of the sequences of a step (a ``Carry``)."""

    lengths: Sequence[int]
    state: tuple[Tensor, ...] | None
    _held: tuple[Tensor, ...]
    _seats_B: Tensor

    def keep(self, state: tuple[Tensor, ...]) -> None:
        """Remember these instead, rows in the same order."""
        for held, rows in zip(self._held, state, strict=True):
            held.index_copy_(0, self._seats_B, rows.to(held.dtype))


class States:
    """The states of recurrent layers: for each, tensors with a row for every seat."""

    def __init__(
        self,
        shapes: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]],
        *,
        seats: int,
        device: torch.device,
    ) -> None:
        self.layers = {
            layer: tuple(_zeros((seats, *shape), device, dtype) for shape, dtype in each)
            for layer, each in shapes.items()
        }
        self._device = device

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Give seats the states of other seats, all at once: a target may be another's source."""
        source, target = (torch.from_numpy(seats).to(self._device) for seats in (sources, targets))
        for held in (tensor for layer in self.layers.values() for tensor in layer):
            held.index_copy_(0, target, held.index_select(0, source))

    def seated(self, seats_B: Ints, starts_B: Ints, counts_B: Ints) -> Seated:
        """The states of the sequences of a step, each in a seat and ``starts_B`` tokens old."""
        fresh = np.flatnonzero(starts_B == 0)
        return Seated(
            self.layers,
            counts_B.tolist(),
            torch.from_numpy(seats_B).to(self._device),
            torch.from_numpy(fresh).to(self._device) if len(fresh) else None,
        )


@dataclass(frozen=True, slots=True)
class Seated:
    """The states of a step: rows of ``fresh`` sequences are zeros, whatever their seats still hold."""

    layers: Mapping[int, tuple[Tensor, ...]]
    lengths: Sequence[int]
    seats_B: Tensor
    fresh: Tensor | None

    def carry(self, layer: int) -> SeatedCarry:
        """What this layer left behind."""
        held = self.layers[layer]
        state = tuple(tensor.index_select(0, self.seats_B) for tensor in held)
        if self.fresh is not None:
            for rows in state:
                rows.index_fill_(0, self.fresh, 0)
        return SeatedCarry(self.lengths, state, held, self.seats_B)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy leaves zeroing to the operating system: pages nobody uses take no memory and no time.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
