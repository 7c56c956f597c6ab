"""What the attention kernels are compiled for, and how large their tiles are on a card.

Shapes: H query heads, G key-value heads, d channels of a key, e of a value, M queries and N tokens of a tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Tuning(NamedTuple):
    """Tokens of a tile, warps of a program, stages its loads run ahead, programs a processor is given at once.

    Where tokens lie is loaded before they are: it takes two more stages to have one more tile under way.
    """

    tokens: int
    warps: int
    stages: int
    resident: int = 1


class Tile(NamedTuple):
    """Queries of a tile, and the rest."""

    queries: int
    tuning: Tuning


# By channels (64, 128, 256) and queries of a tile, for two bytes a number.
DECODE: dict[tuple[int, int], Tuning] = {
    (64, 16): Tuning(128, 4, 5, 3),
    (64, 32): Tuning(128, 4, 5, 3),
    (64, 64): Tuning(128, 4, 5, 2),
    (128, 16): Tuning(64, 4, 5, 3),
    (128, 32): Tuning(64, 4, 5, 2),
    (128, 64): Tuning(64, 4, 5, 2),
    (256, 16): Tuning(32, 4, 5, 2),
    (256, 32): Tuning(32, 4, 5, 2),
    (256, 64): Tuning(32, 8, 5, 1),
}
PREFILL: dict[int, Tile] = {
    64: Tile(128, Tuning(128, 8, 5)),
    128: Tile(128, Tuning(128, 8, 3)),
    256: Tile(128, Tuning(64, 8, 3)),
}
# Values of 512 channels, keys of 576; decode by queries of a tile.
LATENT: dict[int, Tuning] = {16: Tuning(32, 4, 5, 2), 32: Tuning(32, 8, 5, 1), 64: Tuning(64, 8, 3, 1)}
LATENT_PREFILL = Tile(64, Tuning(64, 8, 3))
# For four bytes a number, which are multiplied without tensor cores.
WIDE_DECODE: dict[int, Tuning] = {16: Tuning(32, 8, 3, 2), 32: Tuning(32, 8, 3, 1), 64: Tuning(16, 8, 3, 1)}
WIDE_PREFILL = Tile(16, Tuning(16, 8, 3))
WIDE_LATENT: dict[int, Tuning] = {16: Tuning(16, 8, 3, 1), 32: Tuning(16, 8, 2, 1), 64: Tuning(16, 16, 2, 1)}

# Partial results of a row that are read at once, and channels of its heads that are joined by one program.
JOINED, JOINED_CHANNELS = 8, 512


class How(NamedTuple):
    """What a kernel is compiled for.

    G key-value heads of r query heads, at most R of them in a tile; d, e, x channels of keys, of values, of keys beyond
    the values' (D, E, X: in a tile); strides of a token in the cache; 0 stands for no ``window``, no ``chunk``.
    ``latent``: values are the first channels of the keys.
    """

    G: int
    r: int
    R: int
    d: int
    e: int
    x: int
    D: int
    E: int
    X: int
    M: int
    N: int
    k_stride: int
    v_stride: int
    page: int
    window: int
    chunk: int
    capped: bool
    sunk: bool
    latent: bool

    @property
    def heads(self) -> int:
        """Query heads in all."""
        return self.G * self.r

    @property
    def parts(self) -> int:
        """Tiles that the query heads of a key-value head are cut into."""
        return -(-self.r // self.R)

    @property
    def short(self) -> bool:
        """Whether some of what came before may not be seen."""
        return self.window + self.chunk > 0


class Look(NamedTuple):
    """How a layer looks back over pages: see the functions that take these one by one."""

    page_size: int
    scale: float
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks_H: Tensor | None


def how(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, look: Look, *, latent: bool = False) -> How:
    """What a kernel needs to know of these; tiles are still to be chosen."""
    (_, heads, width), (_, groups, keys), (_, _, values) = q_THd.shape, k_SGd.shape, v_SGe.shape
    assert heads % groups == 0, "every key-value head serves as many query heads"
    assert width == keys and q_THd.stride()[1:] == (keys, 1), "heads of a query lie one behind the other"
    assert k_SGd.stride()[1:] == (keys, 1), "keys of a token lie one behind the other"
    assert latent or v_SGe.stride()[1:] == (values, 1), "values of a token lie one behind the other"
    return _how((heads, groups, keys, values), (k_SGd.stride(0), v_SGe.stride(0)), latent)._replace(
        page=look.page_size,
        window=look.window or 0,
        chunk=look.chunk or 0,
        capped=look.softcap is not None,
        sunk=look.sinks_H is not None,
    )


@cache
def _how(shape: tuple[int, int, int, int], strides: tuple[int, int], latent: bool) -> How:
    heads, groups, keys, values = shape
    own = values if latent else keys
    return How(
        G=groups,
        r=heads // groups,
        R=heads // groups,
        d=own,
        e=values,
        x=keys - own,
        D=power(own),
        E=power(values),
        X=power(keys - own) if keys > own else 0,
        M=0,
        N=0,
        k_stride=strides[0],
        v_stride=strides[1],
        page=0,
        window=0,
        chunk=0,
        capped=False,
        sunk=False,
        latent=latent,
    )


def decode_table(how: How, dtype: torch.dtype) -> dict[int, Tuning]:
    """What decode may choose from, by queries of a tile."""
    if dtype == torch.float32:
        table = WIDE_LATENT if how.latent else WIDE_DECODE
    else:
        table = LATENT if how.latent else {m: DECODE[_channels(how), m] for m in (16, 32, 64)}
    return {queries: _fitted(tuning, how) for queries, tuning in table.items()}


def prefill_tile(how: How, dtype: torch.dtype) -> Tile:
    """What prefill uses."""
    half = LATENT_PREFILL if how.latent else PREFILL[_channels(how)]
    tile = WIDE_PREFILL if dtype == torch.float32 else half
    return Tile(tile.queries, _fitted(tile.tuning, how))


def _fitted(tuning: Tuning, how: How) -> Tuning:
    """On ROCm a processor has 64 KiB for tiles, and loads run one ahead through registers."""
    if torch.version.hip is None:
        return tuning
    return tuning._replace(tokens=min(tuning.tokens, 32 if how.latent else 64), stages=2)


def _channels(how: How) -> int:
    assert max(how.D, how.E) <= 256, "heads of more than 256 channels are served in the latent form only"
    return max(how.D, how.E, 64)


def power(value: int) -> int:
    """The least power of two that is no less, and that the products of a tile take: at least 16."""
    return max(16, 1 << (value - 1).bit_length())
