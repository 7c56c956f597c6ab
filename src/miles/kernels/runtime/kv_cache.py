"""Paged KV cache, and the pool of recurrent states (one row per request slot).

Shapes: T new tokens, G key-value heads, d channels of a key, e of a value, i of an index key, L layers of one shape, P
pages of p slots each, S = P * p slots in all, B sequences of a step.
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
    """What a token stores in a layer. With a ``value_dim`` of 0 (MLA) values are the first channels of the keys."""

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0


class PagedTensor:
    """One tensor of a layer's cache: ``pages`` [P, p * G * d] to read whole pages, ``slots`` [S, G, d] to write."""

    __slots__ = ("_shape", "pages", "slots")

    def __init__(self, pages_PpGd: Tensor) -> None:
        self.pages = pages_PpGd.flatten(1)
        self.slots = pages_PpGd.flatten(0, 1)
        self._shape = (-1, *pages_PpGd.shape[2:])

    def read(self, pages: Tensor, rows: int, context: int) -> Tensor:
        """The first ``context`` tokens of each row of pages, [rows, context, G, d]."""
        return self.pages.index_select(0, pages).view(rows, *self._shape)[:, :context]


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """KV cache of one layer. Without ``values`` (MLA) they are the first channels of the keys.

    ``equal_dims``: keys and values are as wide.
    """

    keys: PagedTensor
    values: PagedTensor | None
    index: PagedTensor | None
    equal_dims: bool


class PagedKVCache:
    """Keys and values of every attention layer. Pages start as zeros: a masked slot must still hold a finite number.

    Layers of one shape share one tensor, of which ``layers`` are views. ``zeros`` allocates such a tensor.
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
        self._tensors: list[Tensor] = []
        self.layers: dict[int, LayerKVCache] = {}

        def allocate(layers: int, *vector: int) -> list[PagedTensor]:
            shape = (layers, pages, page_size, *vector)
            pages_LPpGd = _zeros(shape, device, dtype) if zeros is None else zeros(shape, dtype)
            self._tensors.append(pages_LPpGd)
            return [PagedTensor(tensor) for tensor in pages_LPpGd.unbind(0)]

        for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
            layers = [i for i, each in enumerate(shapes) if each == shape]
            no_tensors = [None] * len(layers)
            keys = allocate(len(layers), shape.heads, shape.key_dim)
            values = allocate(len(layers), shape.heads, shape.value_dim) if shape.value_dim else no_tensors
            index = allocate(len(layers), shape.index_dim) if shape.index_dim else no_tensors
            equal_dims = shape.value_dim in (0, shape.key_dim)
            for layer, k, v, i in zip(layers, keys, values, index, strict=True):
                self.layers[layer] = LayerKVCache(k, v, i, equal_dims)

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages, all at once: a target may be another copy's source."""
        for tensor in self._tensors:
            source, target = torch.from_numpy(sources).to(tensor.device), torch.from_numpy(targets).to(tensor.device)
            tensor[:, target] = tensor[:, source]


# -- recurrent states ---------------------------------------------------------------------------------


@dataclass(slots=True)
class PooledRecurrentState:
    """Recurrent state of one layer for the sequences of a step, backed by the pool."""

    lengths: Sequence[int]
    state: tuple[Tensor, ...] | None
    _tensors: tuple[Tensor, ...]
    _req_slots_B: Tensor

    def update(self, state: tuple[Tensor, ...]) -> None:
        """Write these states back, rows in the same order."""
        for tensor, rows in zip(self._tensors, state, strict=True):
            tensor.index_copy_(0, self._req_slots_B, rows.to(tensor.dtype))


class RecurrentStatePool:
    """States of recurrent layers: per layer, tensors with a row for every request slot."""

    def __init__(
        self,
        shapes: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]],
        *,
        slots: int,
        device: torch.device,
    ) -> None:
        self.layers = {
            layer: tuple(_zeros((slots, *shape), device, dtype) for shape, dtype in each)
            for layer, each in shapes.items()
        }
        self._device = device

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy the states of request slots to others, all at once: a target may be another copy's source."""
        source, target = (torch.from_numpy(slots).to(self._device) for slots in (sources, targets))
        for tensor in (tensor for layer in self.layers.values() for tensor in layer):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def select(self, req_slots_B: Ints, starts_B: Ints, counts_B: Ints) -> StepStates:
        """States of the sequences of a step, each in a request slot and with ``starts_B`` tokens so far."""
        fresh = np.flatnonzero(starts_B == 0)
        return StepStates(
            self.layers,
            counts_B.tolist(),
            torch.from_numpy(req_slots_B).to(self._device),
            torch.from_numpy(fresh).to(self._device) if len(fresh) else None,
        )


@dataclass(frozen=True, slots=True)
class StepStates:
    """Recurrent states of a step: rows of ``fresh`` sequences are zeros, whatever their slots still hold."""

    layers: Mapping[int, tuple[Tensor, ...]]
    lengths: Sequence[int]
    req_slots_B: Tensor
    fresh: Tensor | None

    def recurrent_state(self, layer: int) -> PooledRecurrentState:
        """The state of this layer."""
        tensors = self.layers[layer]
        state = tuple(tensor.index_select(0, self.req_slots_B) for tensor in tensors)
        if self.fresh is not None:
            for rows in state:
                rows.index_fill_(0, self.fresh, 0)
        return PooledRecurrentState(self.lengths, state, tensors, self.req_slots_B)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    # numpy leaves zeroing to the operating system: unused pages take no memory and no time.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
