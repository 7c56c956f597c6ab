"""Checkpoint loading in tiles: read ahead by a few threads, converted in the calling thread, in place.

Shapes: R rows and C columns of a matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from types import TracebackType

import torch
from torch import Tensor

from miles.models.checkpoint.quantized_tiles import quantized_tiles
from miles.models.checkpoint.reader import FileReader
from miles.models.checkpoint.safetensors_io import ITEM_BYTES
from miles.models.checkpoint.tensor_formats import PlainTensor
from miles.models.checkpoint.tensor_sources import ParamSource
from miles.models.checkpoint.tiles import DTYPES, ByteRange, Tile, has_same_bytes

__all__ = ["DTYPES", "ParamReader", "load_params", "shard_bounds"]

# Bytes per read and reads in flight: their product bounds the memory beside the parameters.
# Reads straight into a parameter need no buffer, and may be larger.
_TILE = 4 << 20
_DIRECT_TILE = 16 << 20
_THREADS = 4
_READS_IN_FLIGHT = 6
_ALIGNMENT = 64


def shard_bounds(length: int, rank: int, world: int) -> tuple[int, int]:
    """Return the rows of ``rank``: equal runs rounded up, so that the last ranks may have fewer or none.

    >>> [shard_bounds(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-length // world)
    return min(rank * each, length), min((rank + 1) * each, length)


def load_params(
    plan: Mapping[str, Sequence[ParamSource]],
    parameters: Mapping[str, Tensor],
    *,
    rank: int,
    world: int,
    device: torch.device | str,
    reader: FileReader,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the rows of each parameter that belong to ``rank``, in the order of ``plan``; ``parameters`` gives shapes
    and dtypes.

    Only the bytes of those rows are read, except for a matrix that is transposed on disk, which is read in full. A
    tensor is yielded as soon as it is complete; the reader is closed at the end.
    """
    with ParamReader(device, reader) as params:
        for name, sources in plan.items():
            full = parameters[name]
            first, last = shard_bounds(len(full), rank, world)
            yield name, params.read(sources, (last - first, *full.shape[1:]), full.dtype, first=first)


class ParamReader:
    """Reads rows of decoder parameters into new tensors on ``device``; closes its reader at the end."""

    def __init__(self, device: torch.device | str, reader: FileReader | None = None) -> None:
        self.files = reader or FileReader()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="load")
        self._stream = _Stream(self.files, self._pool, torch.device(device))
        self.device = device

    def __enter__(self) -> ParamReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self.files.__exit__(kind, error, trace)

    def read(self, sources: Sequence[ParamSource], shape: tuple[int, ...], dtype: torch.dtype, *, first: int) -> Tensor:
        """Return ``shape[0]`` rows of a parameter (experts, if it has them), from ``first`` on."""
        target = torch.empty(shape, dtype=dtype, device=self.device)
        self._stream.run([tile for source in sources for tile in _tiles(source, target, first, self._stream)])
        return target


# -- tiles ------------------------------------------------------------------------------------


def _tiles(source: ParamSource, target: Tensor, first: int, stream: _Stream) -> Iterator[Tile]:
    """Yield what must be read of one slice for ``target``, which is the rows of the parameter from ``first`` on."""
    piece = source.piece
    if piece.expert is not None:
        inside = first <= piece.expert < first + len(target)
        if inside:
            slab = target[piece.expert - first]
            yield from _slice_tiles(source, _as_on_disk(slab[piece.start : piece.stop], source), 0)
        return
    low, high = max(piece.start, first), min(piece.stop, first + len(target))
    if low >= high:
        return
    part = target[low - first : high - first]
    part = part if piece.matrix_rows is None else part[:, slice(*piece.matrix_rows)]
    if source.is_transposed and part.dim() == 2 and high - low < piece.stop - piece.start:
        # The target's rows are columns on disk, spread over every row.
        full = part.new_empty((piece.stop - piece.start, part.shape[1]))
        stream.run(list(_slice_tiles(source, _as_on_disk(full, source), 0)))
        part.copy_(full[low - piece.start : high - piece.start])
        return
    yield from _slice_tiles(source, _as_on_disk(part, source), low - piece.start)


def _as_on_disk(part: Tensor, source: ParamSource) -> Tensor:
    """View a part of the parameter as it is laid out on disk."""
    return part.transpose(-1, -2) if source.is_transposed else part


def _slice_tiles(source: ParamSource, view: Tensor, first: int) -> Iterator[Tile]:
    """Yield tiles of ``view``, which is the stored tensor from its row ``first`` on."""
    name, tensor = source.piece.hf_name, source.tensor
    if isinstance(tensor, PlainTensor):
        most = _DIRECT_TILE if has_same_bytes(view, tensor.stored) else _TILE
        for part, at in _runs(view, first * prod(view.shape[1:]), most // ITEM_BYTES[tensor.stored.dtype]):
            yield Tile((ByteRange(name, tensor.stored, at, tuple(part.shape)),), part)
    elif view.dim() == 2:
        yield from quantized_tiles(name, tensor, view, 0, first, _TILE)
    else:
        for number, matrix_RC in enumerate(view, first):
            yield from quantized_tiles(name, tensor, matrix_RC, number, 0, _TILE)


def _runs(view: Tensor, first: int, most: int) -> Iterator[tuple[Tensor, int]]:
    """Split into parts of at most ``most`` values, each contiguous on disk, with the index of its first value there."""
    if view.numel() <= most:
        yield view, first
        return
    inner = prod(view.shape[1:])
    if inner > most:
        for i, part in enumerate(view):
            yield from _runs(part, first + i * inner, most)
        return
    step = most // inner
    for i in range(0, len(view), step):
        yield view[i : i + step], first + i * inner


# -- the stream -------------------------------------------------------------------------------


class _Stream:
    """Reads tiles ahead in the pool's threads and converts them in the calling thread.

    Only the calling thread computes, so that torch's own threads are not multiplied.
    """

    def __init__(self, reader: FileReader, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._reader = reader
        self._pool = pool
        self._device = device
        self._free_buffers: list[Tensor] = []

    def run(self, tiles: Sequence[Tile]) -> None:
        """Read and convert all tiles; returns when they are complete."""
        if len(tiles) == 1 and tiles[0].direct:  # a thread switch would cost more
            self._read(tiles[0], None)
            return
        pending: deque[tuple[Future[None], Tile, Tensor | None]] = deque()
        for tile in tiles:
            if len(pending) == _READS_IN_FLIGHT:
                self._finish(*pending.popleft())
            buffer = None if tile.direct else self._buffer(tile)
            pending.append((self._pool.submit(self._read, tile, buffer), tile, buffer))
        while pending:
            self._finish(*pending.popleft())

    def _buffer(self, tile: Tile) -> Tensor:
        wanted = _offsets(tile)[-1]
        if self._free_buffers and len(self._free_buffers[-1]) >= wanted:
            return self._free_buffers.pop()
        pinned = self._device.type == "cuda"  # DMA from pinned memory
        return torch.empty(max(wanted, _TILE + _TILE // 8), dtype=torch.uint8, pin_memory=pinned)

    def _read(self, tile: Tile, buffer: Tensor | None) -> None:
        if buffer is None:
            self._fetch(tile.ranges[0], tile.into.view(-1).view(torch.uint8))
            return
        for byte_range, start in zip(tile.ranges, _offsets(tile), strict=False):
            self._fetch(byte_range, buffer[start : start + byte_range.nbytes])

    def _fetch(self, byte_range: ByteRange, memory: Tensor) -> None:
        self._reader.read(byte_range.name, byte_range.stored.file, byte_range.start, memory.numpy().data)

    def _finish(self, done: Future[None], tile: Tile, buffer: Tensor | None) -> None:
        done.result()
        if buffer is None:
            return
        parts = [
            buffer[start : start + byte_range.nbytes].to(self._device).view(byte_range.dtype).view(byte_range.shape)
            for byte_range, start in zip(tile.ranges, _offsets(tile), strict=False)
        ]
        if tile.convert is None:
            tile.into.copy_(parts[0])
        else:
            tile.convert(tile.into, *parts)
        self._free_buffers.append(buffer)


def _offsets(tile: Tile) -> list[int]:
    """Return where each byte_range lies in a buffer, and the buffer's length."""
    offsets = [0]
    for byte_range in tile.ranges:
        offsets.append(offsets[-1] + -(-byte_range.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
