"""Parameters filled from a checkpoint a tile at a time: read ahead by a few threads, converted here, never held twice.

Shapes: R rows and C columns of a matrix, r and c its blocks, G groups of a row, b bytes of a group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from miles.models.files import ITEM_BYTES, Stored
from miles.models.reader import Reader
from miles.models.sources import Fill, Fp8, Mxfp4, Plain
from miles.precision import fp8, mxfp4

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STORED = {**DTYPES, "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8}

# Bytes read at a time, and how many such reads are under way: their product bounds what is held beside parameters.
# What is read straight to where it stays is held nowhere else, and may be more.
_TILE = 4 << 20
_DIRECT = 16 << 20
_THREADS = 4
_AHEAD = 6
_ALIGNED = 64


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of values of a stored tensor."""

    name: str
    stored: Stored
    first: int
    shape: tuple[int, ...]

    @property
    def start(self) -> int:
        return self.stored.start + self.first * ITEM_BYTES[self.stored.dtype]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.stored.dtype]

    @property
    def dtype(self) -> torch.dtype:
        return _STORED[self.stored.dtype]


@dataclass(frozen=True, slots=True)
class _Tile:
    """What is read together, where it goes, and how it becomes that; ``put`` None is a plain conversion."""

    spans: tuple[_Span, ...]
    into: Tensor
    put: Callable[..., None] | None = None

    @property
    def direct(self) -> bool:
        """Are the bytes on disk the very bytes wanted in memory?"""
        return self.put is None and _same(self.into, self.spans[0].stored)


def _same(view: Tensor, stored: Stored) -> bool:
    return view.device.type == "cpu" and view.dtype == _STORED[stored.dtype] and view.is_contiguous()


def cut(length: int, rank: int, world: int) -> tuple[int, int]:
    """The rows of ``rank``: equal runs rounded up, so that the last ranks may have fewer or none.

    >>> [cut(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-length // world)
    return min(rank * each, length), min((rank + 1) * each, length)


def slices(
    plan: Mapping[str, Sequence[Fill]],
    parameters: Mapping[str, Tensor],
    *,
    rank: int,
    world: int,
    device: torch.device | str,
    reader: Reader,
) -> Iterator[tuple[str, Tensor]]:
    """The rows of each parameter that are ``rank``'s, in the order of ``plan``; ``parameters`` gives shapes and dtypes.

    Only the bytes of those rows are read, but for a matrix that lies transposed on disk, which is read whole. A tensor
    is given out as soon as it is complete; the reader is closed at the end.
    """
    with reader, ThreadPoolExecutor(_THREADS, thread_name_prefix="load") as pool:
        stream = _Stream(reader, pool, torch.device(device))
        for name, fills in plan.items():
            whole = parameters[name]
            first, last = cut(len(whole), rank, world)
            target = torch.empty((last - first, *whole.shape[1:]), dtype=whole.dtype, device=device)
            stream.run([tile for fill in fills for tile in _tiles(fill, target, first, stream)])
            yield name, target


# -- tiles ------------------------------------------------------------------------------------


def _tiles(fill: Fill, target: Tensor, first: int, stream: _Stream) -> Iterator[_Tile]:
    """What must be read of one piece for ``target``, which is the rows of ours from ``first`` on."""
    piece = fill.piece
    if piece.expert is not None:
        inside = first <= piece.expert < first + len(target)
        if inside:
            slab = target[piece.expert - first]
            yield from _matrices(fill, _turned(slab[piece.start : piece.stop], fill), 0)
        return
    low, high = max(piece.start, first), min(piece.stop, first + len(target))
    if low >= high:
        return
    part = target[low - first : high - first]
    if fill.turned and part.dim() == 2 and high - low < piece.stop - piece.start:
        # Our rows are columns there, of which every line has some.
        whole = part.new_empty((piece.stop - piece.start, part.shape[1]))
        stream.run(list(_matrices(fill, _turned(whole, fill), 0)))
        part.copy_(whole[low - piece.start : high - piece.start])
        return
    yield from _matrices(fill, _turned(part, fill), low - piece.start)


def _turned(part: Tensor, fill: Fill) -> Tensor:
    """Our part as it lies on disk."""
    return part.transpose(-1, -2) if fill.turned else part


def _matrices(fill: Fill, view: Tensor, first: int) -> Iterator[_Tile]:
    """Tiles of ``view``, which is the stored tensor from its row ``first`` on."""
    name, source = fill.piece.hf_name, fill.source
    if isinstance(source, Plain):
        most = _DIRECT if _same(view, source.stored) else _TILE
        for part, at in _runs(view, first * prod(view.shape[1:]), most // ITEM_BYTES[source.stored.dtype]):
            yield _Tile((_Span(name, source.stored, at, tuple(part.shape)),), part)
    elif view.dim() == 2:
        yield from _matrix(name, source, view, 0, first)
    else:
        for number, matrix_RC in enumerate(view, first):
            yield from _matrix(name, source, matrix_RC, number, 0)


def _runs(view: Tensor, first: int, most: int) -> Iterator[tuple[Tensor, int]]:
    """Parts of at most that many values, each without a gap on disk, and the number of its first value there."""
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


def _matrix(name: str, source: Fp8 | Mxfp4, view_RC: Tensor, number: int, first: int) -> Iterator[_Tile]:
    """Tiles of rows from ``first`` on of a tensor's matrix ``number``."""
    step = _step(source, view_RC.shape[1])
    for start in range(0, len(view_RC), step):
        into = view_RC[start : start + step]
        if isinstance(source, Fp8):
            yield _fp8_tile(name, source, into, number, first + start)
        else:
            yield _mxfp4_tile(name, source, into, number, first + start)


def _step(source: Fp8 | Mxfp4, columns: int) -> int:
    """Rows a tile: whole blocks where they fit, so that no scale is read twice."""
    if isinstance(source, Mxfp4):
        return max(1, 2 * _TILE // columns)
    rows = max(1, _TILE // columns)
    return rows - rows % source.block[0] or rows


def _fp8_tile(name: str, source: Fp8, into: Tensor, number: int, first: int) -> _Tile:
    rows, columns = source.stored.shape[-2:]
    high, wide = source.block
    r, c = -(-rows // high), -(-columns // wide)
    top, bottom = first // high, -(-(first + len(into)) // high)

    def put(out_RC: Tensor, weight_RC: Tensor, scale_rc: Tensor) -> None:
        fp8.dequantise(weight_RC, scale_rc, source.block, out_RC, first=first)

    weight = _Span(name, source.stored, (number * rows + first) * columns, (len(into), columns))
    scale = _Span(f"{name}_scale_inv", source.scale, (number * r + top) * c, (bottom - top, c))
    return _Tile((weight, scale), into, put)


def _mxfp4_tile(name: str, source: Mxfp4, into: Tensor, number: int, first: int) -> _Tile:
    rows, groups, each = source.blocks.shape[-3:]
    at = (number * rows + first) * groups
    blocks = _Span(f"{name}_blocks", source.blocks, at * each, (len(into), groups, each))
    scales = _Span(f"{name}_scales", source.scales, at, (len(into), groups))
    return _Tile((blocks, scales), into, _put_mxfp4)


def _put_mxfp4(out_RC: Tensor, blocks_RGb: Tensor, scales_RG: Tensor) -> None:
    mxfp4.dequantise(blocks_RGb, scales_RG, out_RC)


# -- the stream -------------------------------------------------------------------------------


class _Stream:
    """Tiles in, their bytes read ahead by the pool's threads and put in place by the caller's.

    Only the caller's thread computes, so that torch's own threads are not multiplied.
    """

    def __init__(self, reader: Reader, pool: ThreadPoolExecutor, device: torch.device) -> None:
        self._reader, self._pool, self._device = reader, pool, device
        self._spare: list[Tensor] = []

    def run(self, tiles: Sequence[_Tile]) -> None:
        """Returns when all are in place."""
        if len(tiles) == 1 and tiles[0].direct:  # not worth waking a thread for
            self._read(tiles[0], None)
            return
        pending: deque[tuple[Future[None], _Tile, Tensor | None]] = deque()
        for tile in tiles:
            if len(pending) == _AHEAD:
                self._settle(*pending.popleft())
            held = None if tile.direct else self._buffer(tile)
            pending.append((self._pool.submit(self._read, tile, held), tile, held))
        while pending:
            self._settle(*pending.popleft())

    def _buffer(self, tile: _Tile) -> Tensor:
        wanted = _offsets(tile)[-1]
        if self._spare and len(self._spare[-1]) >= wanted:
            return self._spare.pop()
        pinned = self._device.type == "cuda"  # the device fetches from pinned memory by itself
        return torch.empty(max(wanted, _TILE + _TILE // 8), dtype=torch.uint8, pin_memory=pinned)

    def _read(self, tile: _Tile, held: Tensor | None) -> None:
        if held is None:
            self._fetch(tile.spans[0], tile.into.view(-1).view(torch.uint8))
            return
        for span, start in zip(tile.spans, _offsets(tile), strict=False):
            self._fetch(span, held[start : start + span.nbytes])

    def _fetch(self, span: _Span, memory: Tensor) -> None:
        self._reader.read(span.name, span.stored.file, span.start, memory.numpy().data)

    def _settle(self, done: Future[None], tile: _Tile, held: Tensor | None) -> None:
        done.result()
        if held is None:
            return
        parts = [
            held[start : start + span.nbytes].to(self._device).view(span.dtype).view(span.shape)
            for span, start in zip(tile.spans, _offsets(tile), strict=False)
        ]
        if tile.put is None:
            tile.into.copy_(parts[0])
        else:
            tile.put(tile.into, *parts)
        self._spare.append(held)


def _offsets(tile: _Tile) -> list[int]:
    """Where each span lies in a buffer, and the buffer's length."""
    places = [0]
    for span in tile.spans:
        places.append(places[-1] + -(-span.nbytes // _ALIGNED) * _ALIGNED)
    return places
