"""Paged KV cache, in the model's dtype or FP8, and the pool of recurrent states (one row per request slot).

Shapes: T new tokens, G key-value heads, d channels of a key, e of a value, i of an index key, L layers of one shape, P
pages of p slots each, S = P * p slots in all, B sequences of a step; N rows of pages, C tokens of each.

FP8 pages hold E4M3 bytes, and beside them the scale of every token and head: ``scales`` [P, G, p], so that those of a
head's tokens in one page are contiguous. MLA has two scales per token, of the latent and of the RoPE channels: they
take the place of two heads. Index keys are never quantized.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.fused.kv_cache_fp8 import quantize_and_write
from miles.kernels.numerics import KVCacheDtype
from miles.kernels.runtime.triton_compat import use_triton_inference
from miles.precision.kv_cache import dequantize_kv, quantize_kv

Ints = NDArray[np.int64]


class KvShape(NamedTuple):
    """What a token stores in a layer. With a ``value_dim`` of 0 (MLA) values are the first channels of the keys, of
    which the last ``rope_dim`` have an FP8 scale of their own.
    """

    heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    rope_dim: int = 0


class PagedTensor:
    """One tensor of a layer's cache: ``pages`` [P, p * G * d] to read whole pages, ``slots`` [S, G, d] to write.

    With ``scales`` it is FP8: bytes of E4M3, one scale for each head (or of ``parts`` of the channels of one head), and
    reads return ``dtype``.
    """

    __slots__ = ("_dtype", "_page_size", "_parts", "_shape", "pages", "scales", "slots")

    def __init__(
        self,
        pages_PpGd: Tensor,
        scales_PGp: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        parts: tuple[int, ...] = (),
    ) -> None:
        self.pages = pages_PpGd.flatten(1)
        self.slots = pages_PpGd.flatten(0, 1)
        self.scales = scales_PGp
        self._shape = (-1, *pages_PpGd.shape[2:])
        self._page_size = pages_PpGd.shape[1]
        self._dtype = pages_PpGd.dtype if dtype is None else dtype
        self._parts = parts or (pages_PpGd.shape[-1],)

    def read(self, pages: Tensor, rows: int, context: int) -> Tensor:
        """The first ``context`` tokens of each row of pages, [rows, context, G, d]."""
        x_NCGd = self.pages.index_select(0, pages).view(rows, *self._shape)[:, :context]
        if self.scales is None:
            return x_NCGd
        scale_NCG = self.scales.index_select(0, pages).mT.reshape(rows, -1, self.scales.shape[1])[:, :context]
        return self._dequantize(x_NCGd, scale_NCG)

    def read_slots(self, slots_T: Tensor) -> Tensor:
        """The tokens in these slots, [T, G, d]."""
        x_TGd = self.slots.index_select(0, slots_T)
        if self.scales is None:
            return x_TGd
        return self._dequantize(x_TGd, self.scales[slots_T // self._page_size, :, slots_T % self._page_size])

    def write(self, slots_T: Tensor, x_TGd: Tensor) -> None:
        """Store tokens in their slots, quantized if the cache is FP8."""
        if self.scales is None:
            self.slots.index_copy_(0, slots_T, x_TGd)
            return
        write_fp8(self.slots, self.scales, slots_T, x_TGd, self._parts if len(self._parts) > 1 else None)

    def _dequantize(self, x_TGd: Tensor, scale_TG: Tensor) -> Tensor:
        data_TGd = x_TGd.view(torch.float8_e4m3fn)
        if len(self._parts) == 1:
            return dequantize_kv(data_TGd, scale_TG, self._dtype)
        parts = zip(data_TGd.float().split(self._parts, -1), scale_TG.split(1, -1), strict=True)
        return torch.cat([dequantize_kv(data, scale, self._dtype) for data, scale in parts], -1)


def write_fp8(
    codes_SGd: Tensor, scales_PGp: Tensor, slots_T: Tensor, x_TGd: Tensor, parts: tuple[int, ...] | None = None
) -> None:
    """Quantize tokens and store their E4M3 bytes and scales; ``parts`` of the channels have scales of their own."""
    if use_triton_inference(x_TGd):
        quantize_and_write(codes_SGd, scales_PGp, slots_T, x_TGd, parts or (x_TGd.shape[-1],))
        return
    quantized = [quantize_kv(part) for part in x_TGd.split(parts or (x_TGd.shape[-1],), -1)]
    data_TGd = torch.cat([data for data, _ in quantized], -1) if parts else quantized[0][0]
    scale_TG = torch.cat([scale for _, scale in quantized], -1) if parts else quantized[0][1]
    page_size = scales_PGp.shape[-1]
    codes_SGd.index_copy_(0, slots_T, data_TGd.view(torch.uint8))
    scales_PGp[slots_T // page_size, :, slots_T % page_size] = scale_TG


class KVScales(NamedTuple):
    """Scales of a layer's FP8 keys and values, [P, G, p] each; with MLA both are those of the keys, [P, 2, p]."""

    keys_PGp: Tensor
    values_PGp: Tensor


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """KV cache of one layer. Without ``values`` (MLA) they are the first channels of the keys.

    ``equal_dims``: keys and values are as wide.
    """

    keys: PagedTensor
    values: PagedTensor | None
    index: PagedTensor | None
    equal_dims: bool

    @property
    def scales(self) -> KVScales | None:
        """Scales of keys and values, if they are FP8."""
        if self.keys.scales is None:
            return None
        values_PGp = self.keys.scales if self.values is None else self.values.scales
        assert values_PGp is not None, "FP8 keys need FP8 values"
        return KVScales(self.keys.scales, values_PGp)


class PagedKVCache:
    """Keys and values of every attention layer. Pages start as zeros: a masked slot must still hold a finite number.

    Layers of one shape share one tensor, of which ``layers`` are views. ``zeros`` allocates such a tensor. With a
    ``kv_dtype`` of fp8_e4m3 keys and values are stored so, and read as ``dtype``.
    """

    def __init__(
        self,
        shapes: Sequence[KvShape | None],
        *,
        pages: int,
        page_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: KVCacheDtype = "auto",
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        self._tensors: list[Tensor] = []
        self._device = device
        self.layers: dict[int, LayerKVCache] = {}

        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
            tensor = _zeros(shape, device, dtype) if zeros is None else zeros(shape, dtype)
            self._tensors.append(tensor)
            return list(tensor.unbind(0))

        def allocate_wide(layers: int, *vector: int) -> list[PagedTensor]:
            return [PagedTensor(tensor) for tensor in allocate((layers, pages, page_size, *vector), dtype)]

        def allocate_kv(layers: int, heads: int, *parts: int) -> list[PagedTensor]:
            if kv_dtype == "auto":
                return allocate_wide(layers, heads, sum(parts))
            data = allocate((layers, pages, page_size, heads, sum(parts)), torch.uint8)
            scales = allocate((layers, pages, heads * len(parts), page_size), torch.float32)
            return [PagedTensor(*each, dtype=dtype, parts=parts) for each in zip(data, scales, strict=True)]

        for shape in dict.fromkeys(shape for shape in shapes if shape is not None):
            layers = [i for i, each in enumerate(shapes) if each == shape]
            no_tensors = [None] * len(layers)
            assert not shape.rope_dim or shape.heads == 1, "RoPE channels have a scale of their own with one head (MLA)"
            parts = (shape.key_dim - shape.rope_dim, *((shape.rope_dim,) if shape.rope_dim else ()))
            keys = allocate_kv(len(layers), shape.heads, *parts)
            values = allocate_kv(len(layers), shape.heads, shape.value_dim) if shape.value_dim else no_tensors
            index = allocate_wide(len(layers), shape.index_dim) if shape.index_dim else no_tensors
            equal_dims = shape.value_dim in (0, shape.key_dim)
            for layer, k, v, i in zip(layers, keys, values, index, strict=True):
                self.layers[layer] = LayerKVCache(k, v, i, equal_dims)

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages of all layers, all at once: a target may be another copy's source."""
        source, target = torch.from_numpy(np.stack((sources, targets))).to(self._device)
        for tensor in self._tensors:
            tensor.index_copy_(1, target, tensor.index_select(1, source))


# -- recurrent states ---------------------------------------------------------------------------------


class StateRows(NamedTuple):
    """Where the sequences of a level read their states and write them: rows of the pool.

    ``tokens_T`` are the rows of their tokens in the step. Sequences where ``is_fresh_B`` start here and read zeros;
    None: none does.
    """

    tokens_T: Tensor
    lengths: Sequence[int]
    reads_B: Tensor
    writes_B: Tensor
    is_fresh_B: Tensor | None


class DecodeState(NamedTuple):
    """The state of one layer for sequences of one new token each: the pool's tensors, and the rows to read and write.

    A kernel may update the tensors in place: no sequence reads a row that another one writes.
    """

    tensors: tuple[Tensor, ...]
    reads_B: Tensor
    writes_B: Tensor
    is_fresh_B: Tensor | None


@dataclass(slots=True)
class PooledRecurrentState:
    """Recurrent state of one layer for sequences of a step, backed by the pool."""

    _tensors: tuple[Tensor, ...]
    _levels: Sequence[StateRows]

    @property
    def shard(self) -> None:
        """An engine splits no sequence over ranks."""
        return None

    @property
    def lengths(self) -> Sequence[int]:
        return self._levels[0].lengths

    @property
    def state(self) -> tuple[Tensor, ...]:
        """The states before this step; zeros for a sequence that starts here."""
        rows = self._levels[0]
        state = tuple(tensor.index_select(0, rows.reads_B) for tensor in self._tensors)
        if rows.is_fresh_B is not None:
            for each in state:
                each.masked_fill_(rows.is_fresh_B.view(-1, *[1] * (each.dim() - 1)), 0)
        return state

    @property
    def decode(self) -> DecodeState | None:
        """The rows of the pool, if every sequence of the step has one new token and continues no other one."""
        rows = self._levels[0]
        if len(self._levels) > 1 or len(rows.tokens_T) != len(rows.lengths):
            return None
        return DecodeState(self._tensors, rows.reads_B, rows.writes_B, rows.is_fresh_B)

    @property
    def levels(self) -> Sequence[tuple[Tensor, PooledRecurrentState]]:
        """The levels of a step with drafted tokens, which continue sequences of the levels before."""
        if len(self._levels) == 1:
            return ()
        return [(level.tokens_T, PooledRecurrentState(self._tensors, [level])) for level in self._levels]

    def update(self, state: tuple[Tensor, ...]) -> None:
        """Write these states back, rows in the same order."""
        for tensor, rows in zip(self._tensors, state, strict=True):
            tensor.index_copy_(0, self._levels[0].writes_B, rows.to(tensor.dtype))


class RecurrentStatePool:
    """States of recurrent layers: per layer, tensors with a row for every request slot.

    Behind them may be rows for the states after drafted tokens, which last until the next step, and for those of
    prefixes. ``zeros`` allocates such a tensor.
    """

    def __init__(
        self,
        shapes: Mapping[int, Sequence[tuple[tuple[int, ...], torch.dtype]]],
        *,
        slots: int,
        device: torch.device,
        zeros: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
    ) -> None:
        def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return _zeros(shape, device, dtype) if zeros is None else zeros(shape, dtype)

        self.layers = {
            layer: tuple(allocate((slots, *shape), dtype) for shape, dtype in each) for layer, each in shapes.items()
        }
        self.rows = slots
        self._device = device

    def copy(self, sources: Ints, targets: Ints) -> None:
        """Copy the states of request slots to others, all at once: a target may be another copy's source."""
        source, target = self._send(np.stack((sources, targets)))
        for tensor in (tensor for layer in self.layers.values() for tensor in layer):
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    def select(
        self, req_slots_B: Ints, starts_B: Ints, counts_B: Ints, drafts: tuple[Ints, Ints, Ints] | None = None
    ) -> StepStates:
        """States of the sequences of a step, each in a request slot and with ``starts_B`` tokens so far.

        With ``drafts`` (reads, writes, depths) a sequence reads its state in one row and writes it in another, after
        those of less depth.
        """
        reads_B, writes_B, depths_B = drafts or (req_slots_B, req_slots_B, np.zeros_like(req_slots_B))
        owner_T = np.repeat(np.arange(len(counts_B)), counts_B)
        levels: list[StateRows] = []
        for depth in range(int(depths_B.max(initial=0)) + 1):
            rows = np.flatnonzero(depths_B == depth)
            is_fresh_B = starts_B[rows] == 0
            tokens_T = np.flatnonzero(depths_B[owner_T] == depth)
            tensors = [self._send(each) for each in (tokens_T, reads_B[rows], writes_B[rows])]
            fresh = self._send(is_fresh_B) if is_fresh_B.any() else None
            levels.append(StateRows(tensors[0], counts_B[rows].tolist(), tensors[1], tensors[2], fresh))
        return StepStates(self.layers, levels)

    def select_rows(self, rows_B: Tensor, is_fresh_B: Tensor) -> StepStates:
        """States of sequences of one new token each, in these rows of the pool; nothing is copied to the device."""
        rows = StateRows(rows_B, [1] * len(rows_B), rows_B, rows_B, is_fresh_B)
        return StepStates(self.layers, [rows])

    def _send(self, array: NDArray[Any]) -> Tensor:
        """Copy an array to the device without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)


@dataclass(frozen=True, slots=True)
class StepStates:
    """Recurrent states of a step, by level: sequences of a level may continue those of the levels before."""

    layers: Mapping[int, tuple[Tensor, ...]]
    levels: Sequence[StateRows]

    def recurrent_state(self, layer: int) -> PooledRecurrentState:
        """The state of this layer."""
        return PooledRecurrentState(self.layers[layer], self.levels)


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, device=device, dtype=dtype)
    # The operating system zeroes pages when they are used: unused ones take no memory and no time. Memory of malloc may
    # have been used before, and is then zeroed whole.
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)
