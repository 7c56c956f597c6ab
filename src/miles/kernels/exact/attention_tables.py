"""How large the tiles of exact attention are on a card, and what its kernels are told.

Shapes: H query heads, G key-value heads, d channels of a key, e of a value.

The block of keys is part of the arithmetic: one number for every kernel of a dtype. All else here changes the speed and
no bit, as long as products of half precision are made of one kind of instruction: at least 64 rows for four warps.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.terms import Terms
from miles.kernels.tiling import How, Look, how, power

LOG2E = 1.4426950408889634
# Keys of a block.
BLOCK, WIDE_BLOCK = 64, 32


class Tile(NamedTuple):
    """Queries of a tile, warps and stages of a program, and the most channels of a value that one program takes."""

    queries: int
    warps: int
    stages: int
    channels: int = 128


class Decode(NamedTuple):
    """Warps and stages of a program, programs of a processor, and the registers of a thread that leave them room."""

    warps: int
    stages: int
    resident: int
    registers: int | None = None


# By channels of a key (64, 128, 256); the wide ones for four bytes a number.
TILES: dict[int, Tile] = {64: Tile(128, 8, 3), 128: Tile(128, 8, 3), 256: Tile(64, 4, 2)}
# Where tokens lie is loaded before they are: it takes two more stages to have one more block under way.
PAGED_TILES: dict[int, Tile] = {64: Tile(128, 8, 5), 128: Tile(128, 8, 5), 256: Tile(64, 4, 3)}
WIDE_TILE = Tile(16, 8, 2)
# By channels of a key and queries of a tile.
DECODE: dict[tuple[int, int], Decode] = {
    (64, 16): Decode(4, 4, 4, 128),
    (64, 32): Decode(4, 4, 3),
    (64, 64): Decode(4, 4, 2),
    (128, 16): Decode(4, 4, 3, 168),
    (128, 32): Decode(4, 5, 2),
    (128, 64): Decode(4, 3, 2),
    (256, 16): Decode(4, 3, 1),
    (256, 32): Decode(4, 3, 1),
    (256, 64): Decode(4, 3, 1),
}
WIDE_DECODE = Decode(8, 2, 1)


class Back(NamedTuple):
    """Queries and keys of a tile, warps and stages of a program, programs that share the channels of the gradients."""

    queries: int
    keys: int
    warps: int
    stages: int
    parts: int = 1


# By the most channels of a key or a value: the pass over keys, and the one over queries.
KEYS_BACK: dict[int, Back] = {64: Back(64, 128, 8, 3), 128: Back(64, 128, 8, 3), 256: Back(64, 64, 4, 1, 2)}
QUERIES_BACK: dict[int, Back] = {64: Back(128, 64, 8, 3), 128: Back(128, 64, 8, 3), 256: Back(64, 64, 4, 1)}
WIDE_BACK = Back(16, 32, 8, 1)


class Numbers(NamedTuple):
    """What makes an exponent of a score, what bends a score under its cap, and the cap."""

    factor: float
    bend: float
    cap: float


def numbers(terms: Terms) -> Numbers:
    """The numbers of a layer, rounded once and the same for every kernel."""
    if terms.softcap is None:
        return Numbers(terms.scale * LOG2E, 0.0, 0.0)
    return Numbers(LOG2E, 2 * LOG2E * terms.scale / terms.softcap, terms.softcap)


def told(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, terms: Terms, sinks_H: Tensor | None, *, page_size: int = 0
) -> How:
    """What kernels over these are compiled for, but for their tiles; ``page_size`` 0 is no pages."""
    look = Look(page_size, terms.scale, terms.window, terms.chunk, terms.softcap, sinks_H)
    made = how(q_THd, k_SGd, v_SGe, look)
    assert max(made.D, power(made.e)) <= 256, "heads have no more than 256 channels"
    return made._replace(N=WIDE_BLOCK if q_THd.dtype == torch.float32 else BLOCK)


def tile_of(made: How, dtype: torch.dtype) -> tuple[How, Tile, int]:
    """Tiles of queries that follow each other, and how many programs share the channels of the values."""
    table = PAGED_TILES if made.page else TILES
    tile = WIDE_TILE if dtype == torch.float32 else table[max(made.D, 64)]
    width = min(made.E, tile.channels if dtype != torch.float32 else made.E)
    return made._replace(M=tile.queries, E=width), tile, math.ceil(made.e / width)


def items_of(made: How, dtype: torch.dtype, queries: int, share: int) -> tuple[How, Decode]:
    """Tiles of queries that see the same keys, ``share`` heads of a row in each: queries across, so values down."""
    if dtype == torch.float32:
        return made._replace(M=queries, R=share, X=16), WIDE_DECODE
    table = DECODE[max(made.D, power(made.e), 64), queries]
    return made._replace(M=queries, R=share, X=64, E=max(made.E, 64)), table


def keys_tile_of(made: How, dtype: torch.dtype) -> tuple[How, Back, int]:
    """Tiles of the pass over keys, and how many programs share their channels."""
    tile = WIDE_BACK if dtype == torch.float32 else KEYS_BACK[max(made.D, made.E, 64)]
    parts = tile.parts if min(made.D, made.E) // tile.parts >= 16 else 1
    return made._replace(M=tile.queries, N=tile.keys), tile, parts


def queries_tile_of(made: How, dtype: torch.dtype) -> tuple[How, Back]:
    """Tiles of the pass over queries."""
    tile = WIDE_BACK if dtype == torch.float32 else QUERIES_BACK[max(made.D, made.E, 64)]
    return made._replace(M=tile.queries, N=tile.keys), tile


def even(x_THd: Tensor) -> Tensor:
    """Heads of a token one behind the other; tokens may lie apart."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()
