"""Rows times a weight as device code: one kernel, whose tiles may have any size that leaves the order of sums alone.

Shapes: T rows, K in, N out, E groups of rows that have a weight each; M rows, N columns and K depth of a tile.

An output is one sum over all its inputs in ascending order, a step of the tensor cores at a time, kept in float32 and
rounded once. Which rows and columns share a tile, and how deep that is, is nothing to it: the last steps add zeros.
Tiles of few rows are multiplied by another instruction than those of many. On the cards named here both were seen to
give the same bits (``benchmarks/exact_products.py``); elsewhere every tile has so many rows that there is one.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.device_code import (
    HAVE_TRITON,
    early,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    on,
    processors,
    tl,
    triton,
)
from miles.kernels.gated import Kind, combine


class Tile(NamedTuple):
    """What a program takes at once, and how many warps and loads in flight it has.

    With ``copied`` the card's copy engine fetches tiles, and with ``stays`` a program goes on to other tiles.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    copied: bool = False
    stays: bool = False


# The first number of the cards' capabilities on which the instructions agree, and the rows all tiles have elsewhere.
AGREEING, WIDE_ROWS = (8, 9), 64
# Float32 is multiplied without tensor cores, one product after the other.
PLAIN = Tile(64, 64, 32, 4, 2)
# What tiles fetched by the copy engine take of a processor's time, relative to each other: the tables are measured, on
# an H200 (``benchmarks/exact_tiles.py``).
DENSE: tuple[tuple[float, Tile], ...] = (
    (1.75, Tile(256, 128, 64, 8, 4, copied=True)),
    (1.0, Tile(128, 128, 64, 8, 5, copied=True)),
    (0.65, Tile(128, 64, 128, 4, 4, copied=True)),
    (0.62, Tile(64, 128, 64, 4, 6, copied=True)),
    (0.42, Tile(64, 64, 128, 4, 5, copied=True)),
    (0.33, Tile(64, 32, 256, 4, 4, copied=True)),
    (0.28, Tile(64, 16, 256, 4, 5, copied=True)),
)
# It pays for itself where a program has several of them.
STAYING, STAYING_ROWS = (1.55, Tile(128, 256, 64, 8, 3, copied=True, stays=True)), 2048
# Of sixteen rows and fewer, by the least number of outputs.
FEWEST: tuple[tuple[int, Tile], ...] = (
    (32768, Tile(16, 128, 128, 4, 4)),
    (5000, Tile(16, 32, 256, 4, 4)),
    (2048, Tile(64, 64, 128, 4, 5, copied=True)),
    (0, Tile(64, 32, 256, 4, 4, copied=True)),
)
# Groups of rows, and rows that do not suit the copy engine, for up to so many rows or rows a group: tiles of fewer and
# fewer columns, until there are enough for the card.
FEW: tuple[tuple[int, tuple[Tile, ...]], ...] = (
    (16, (Tile(16, 128, 128, 4, 4), Tile(16, 64, 128, 4, 5), Tile(16, 32, 128, 4, 6), Tile(16, 16, 256, 2, 5))),
    (64, (Tile(64, 128, 64, 4, 4), Tile(64, 64, 128, 4, 4), Tile(64, 32, 128, 4, 4), Tile(64, 16, 128, 4, 5))),
    (256, (Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4), Tile(64, 32, 128, 4, 4))),
)
MANY: tuple[Tile, ...] = (
    Tile(128, 256, 64, 8, 3, copied=True, stays=True),
    Tile(128, 128, 64, 8, 4, copied=True),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
)
MANY_PLAIN: tuple[Tile, ...] = (Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4), Tile(64, 64, 64, 4, 4))
# So many rows at most are gated by the product itself, in such tiles.
GATED_ROWS, GATED = 16, Tile(16, 32, 128, 4, 5)
# Tiles that work on rows of the same weights at the same time.
_TOGETHER = 8


def on_card(x: Tensor) -> bool:
    """Whether device code multiplies here; double precision is left to torch."""
    return x.is_cuda and HAVE_TRITON and x.dtype != torch.float64


def multiply(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows times a weight, plus a bias in float32, rounded once to ``dtype``."""
    return launch(x_TK, weight_NK.unsqueeze(0), bias_N, None, dtype)


def gates_at_once(x_TK: Tensor) -> bool:
    """Whether so few rows are gated by the product itself."""
    half = x_TK.dtype != torch.float32
    return on_card(x_TK) and half and x_TK.ndim == 2 and len(x_TK) <= GATED_ROWS and _agree(x_TK.device)


def multiply_gated(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: Kind) -> Tensor:
    """The activation of the first half of a product, times the other half; each rounded as it is without this."""
    return launch(x_TK, weight_NK.unsqueeze(0), bias_N, None, x_TK.dtype, kind=kind)


def launch(
    x_TK: Tensor,
    weight_ENK: Tensor,
    bias: Tensor | None,
    ends_E: Tensor | None,
    dtype: torch.dtype,
    tile: Tile | None = None,
    kind: Kind | None = None,
) -> Tensor:
    """Rows times their group's weight: all times the first where ``ends_E`` does not say where groups end.

    ``tile`` is for measurements. With a ``kind`` the outputs' second half gates the first.
    """
    x_TK, weight_ENK = x_TK.contiguous(), weight_ENK.contiguous()
    assert x_TK.dtype == weight_ENK.dtype and x_TK.dtype.itemsize in (2, 4)
    (rows, inputs), groups = x_TK.shape, len(weight_ENK) if ends_E is not None else 1
    outputs = weight_ENK.shape[1] // (1 if kind is None else 2)
    out_TN = torch.empty(rows, outputs, dtype=dtype, device=x_TK.device)
    if not (rows and outputs):
        return out_TN
    tile = tile or (tile_of(x_TK, weight_ENK, ends_E is not None) if kind is None else GATED)
    tile = _fitting(tile, x_TK, kind is not None)
    # Outputs on their way out lie beside the inputs that come in, and wide ones would not fit there.
    tile = tile if dtype.itemsize == 2 else tile._replace(stays=False)
    blocks = _blocks(rows, groups, tile)
    tiles = blocks * triton.cdiv(outputs, tile.columns)
    x, weight = x_TK, weight_ENK
    if tile.copied:
        x = _described(x_TK, tile.rows, tile.depth)
        weight = _described(weight_ENK.flatten(0, 1), tile.columns, tile.depth)
    assert kind is None or not tile.copied
    with on(x_TK):
        _multiply[(min(tiles, processors(x_TK.device)) if tile.stays else tiles,)](
            *(x, weight, bias, ends_E, out_TN, rows, inputs, outputs, groups, blocks, tiles),
            EVEN=inputs % tile.depth == 0,
            BIAS=bias is not None,
            GROUPS=0 if ends_E is None else triton.next_power_of_2(groups),
            KIND=kind or "",
            COPIED=tile.copied,
            STAYS=tile.stays,
            M=tile.rows,
            N=tile.columns,
            K=tile.depth,
            TOGETHER=_TOGETHER,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **early(x_TK.device),
        )
    return out_TN


def all_tiles() -> list[Tile]:
    """Every tile of half precision that may be chosen."""
    few = [tile for _, tiles in FEW for tile in tiles]
    return list(dict.fromkeys([*(t for _, t in (*DENSE, STAYING, *FEWEST)), *few, *MANY, *MANY_PLAIN, GATED]))


def tile_of(x_TK: Tensor, weight_ENK: Tensor, grouped: bool) -> Tile:
    """The tile that is likely the fastest."""
    if x_TK.dtype == torch.float32:
        return PLAIN
    rows, groups, outputs = len(x_TK), len(weight_ENK) if grouped else 1, weight_ENK.shape[1]
    copies, agree, enough = _copies(x_TK, weight_ENK), _agree(x_TK.device), processors(x_TK.device)
    if not grouped and copies and rows <= 16 and agree:
        return next(tile for least, tile in FEWEST if outputs >= least)
    if not grouped and copies:
        # As many tiles as there are processors take as long as one does.
        some = (*DENSE, STAYING) if rows > STAYING_ROWS else DENSE
        return min((-(-_blocks(rows, 1, t) * -(-outputs // t.columns) // enough) * cost, t) for cost, t in some)[1]
    few = (tiles for most, tiles in FEW if -(-rows // groups) <= most and (agree or tiles[0].rows >= WIDE_ROWS))
    choice = next(few, MANY if copies else MANY_PLAIN)
    plenty = (tile for tile in choice if _blocks(rows, groups, tile) * -(-outputs // tile.columns) >= enough)
    return next(plenty, choice[-1])


def _blocks(rows: int, groups: int, tile: Tile) -> int:
    """Tiles over each other, at most: a group's rows begin a tile."""
    return min(rows, -(-rows // tile.rows) if groups == 1 else rows // tile.rows + groups)


@cache
def _room(device: torch.device) -> int:
    """The bytes that a program's tiles may take."""
    if device.type != "cuda":
        return 1 << 20
    index = torch.cuda.current_device() if device.index is None else device.index
    driver: Any = triton.runtime.driver.active
    return driver.utils.get_device_properties(index)["max_shared_mem"]


def _fitting(tile: Tile, x_TK: Tensor, gated: bool) -> Tile:
    """The tile with no more loads in flight than a processor has room for."""
    bytes_each = (tile.rows + tile.columns * (2 if gated else 1)) * tile.depth * x_TK.dtype.itemsize
    return tile._replace(stages=max(2, min(tile.stages, _room(x_TK.device) // bytes_each)))


@cache
def _agree(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in AGREEING


def _copies(x_TK: Tensor, weight_ENK: Tensor) -> bool:
    """Whether the copy engine is there and can take these, whose rows must begin at whole sixteens of bytes."""
    starts = (x_TK.data_ptr(), weight_ENK.data_ptr(), x_TK.shape[1] * x_TK.dtype.itemsize)
    return bool(early(x_TK.device)["EARLY"]) and all(start % 16 == 0 for start in starts)


def _described(x_RK: Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x_RK, [rows, depth])


# A program for every number of rows would be compiled while others wait.
_for_any_rows: Any = triton.jit(do_not_specialize=["rows", "groups", "blocks", "tiles"]) if HAVE_TRITON else jit


@_for_any_rows
def _multiply(
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    blocks: tl.tensor,
    tiles: tl.tensor,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    COPIED: tl.constexpr,
    STAYS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOGETHER: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        # A trainer's weights may have been written by the launch before this: nothing is read ahead.
        gdc_launch_dependents()
        gdc_wait()
    if STAYS:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=GROUPS == 0):  # pyright: ignore
            _one_tile(
                *(tile, x, weight, bias_ptr, ends_ptr, out_ptr, rows, inputs, outputs, groups, blocks),
                *(EVEN, BIAS, GROUPS, KIND, COPIED, M, N, K, TOGETHER),
            )
    else:
        _one_tile(
            *(tl.program_id(0), x, weight, bias_ptr, ends_ptr, out_ptr, rows, inputs, outputs, groups, blocks),
            *(EVEN, BIAS, GROUPS, KIND, COPIED, M, N, K, TOGETHER),
        )


@jit
def _one_tile(
    tile: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    blocks: tl.tensor,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KIND: tl.constexpr,
    COPIED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    block, column = _place(tile, blocks, tl.cdiv(outputs, N), TOGETHER)
    some = (x, weight, bias_ptr, out_ptr, inputs, outputs)
    if GROUPS > 0:
        first, end, group = _find(block, ends_ptr, groups, GROUPS, M)
        if first < end:
            _sum_up(first, end, group, column, *some, EVEN, BIAS, KIND, COPIED, M, N, K)
    else:
        # Without a question about each tile the compiler can fetch the next one while this one ends.
        _sum_up(block * M, rows, 0, column, *some, EVEN, BIAS, KIND, COPIED, M, N, K)


@jit
def _sum_up(
    first: tl.tensor,
    end: tl.tensor,
    group: tl.tensor,
    column: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    COPIED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """What lies outside is computed as what lies there, or as zeros, and not written."""
    row_M, column_N, k_K = first + tl.arange(0, M), column * N + tl.arange(0, N), tl.arange(0, K)
    seen_M1, seen_N1 = (row_M < end)[:, None], (column_N < outputs)[:, None]
    sum_MN = tl.zeros((M, N), tl.float32)
    up_MN = tl.zeros((M, N), tl.float32)
    if COPIED:
        for start in range(0, inputs, K):
            a_MK, b_NK = x.load([first, start]), weight.load([group * outputs + column * N, start])  # pyright: ignore
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN)
    else:
        x_MK = x + row_M.to(tl.int64)[:, None] * inputs + k_K[None, :]
        weight_NK = weight + (group * outputs + column_N).to(tl.int64)[:, None] * inputs + k_K[None, :]
        for start in range(0, inputs, K):
            seen_MK, seen_NK = seen_M1, seen_N1
            if not EVEN:
                deep_1K = (start + k_K < inputs)[None, :]
                seen_MK, seen_NK = seen_M1 & deep_1K, seen_N1 & deep_1K
            a_MK = tl.load(x_MK + start, seen_MK, other=0.0)
            b_NK = tl.load(weight_NK + start, seen_NK, other=0.0)
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, input_precision="ieee")
            if KIND != "":
                c_NK = tl.load(weight_NK + start + outputs.to(tl.int64) * inputs, seen_NK, other=0.0)
                up_MN = tl.dot(a_MK, c_NK.T, up_MN, input_precision="ieee")
    kept = out_ptr.dtype.element_ty
    out_MN = _rounded(sum_MN, bias_ptr, group * outputs + column_N, column_N < outputs, kept, BIAS)
    if KIND != "":
        up_MN = _rounded(up_MN, bias_ptr, outputs + column_N, column_N < outputs, kept, BIAS)
        out_MN = combine(out_MN, up_MN, KIND, True)
    at_MN = out_ptr + row_M.to(tl.int64)[:, None] * outputs + column_N[None, :]
    tl.store(at_MN, out_MN, seen_M1 & (column_N < outputs)[None, :])


@jit
def _rounded(
    sum_MN: tl.tensor, bias_ptr: tl.tensor, place_N: tl.tensor, seen_N: tl.tensor, KEPT: tl.dtype, BIAS: tl.constexpr
) -> tl.tensor:
    """A sum with its bias, in the dtype that is kept."""
    if BIAS:
        sum_MN += tl.load(bias_ptr + place_N, seen_N, other=0.0).to(tl.float32)[None, :]
    return sum_MN.to(KEPT)


@jit
def _place(tile: tl.tensor, blocks: tl.tensor, columns: tl.tensor, TOGETHER: tl.constexpr) -> tuple:
    """Tiles in such an order that those at work at the same time share rows and weights."""
    many = TOGETHER * columns
    above = (tile // many) * TOGETHER
    high = tl.minimum(blocks - above, TOGETHER)
    return above + (tile % many) % high, (tile % many) // high


@jit
def _find(block: tl.tensor, ends_ptr: tl.tensor, groups: tl.tensor, GROUPS: tl.constexpr, M: tl.constexpr) -> tuple:
    """The rows of a block, from where to the end of its group, and that; from nowhere if there is no such block."""
    group_E = tl.arange(0, GROUPS)
    here_E = group_E < groups
    end_E = tl.load(ends_ptr + group_E, here_E, other=0)
    start_E = tl.load(ends_ptr + group_E - 1, here_E & (group_E > 0), other=0)
    count_E = tl.where(here_E, (end_E - start_E + M - 1) // M, 0)
    until_E = tl.cumsum(count_E, 0)
    group = tl.sum((here_E & (until_E <= block)).to(tl.int32), 0)
    mine_E = group_E == group
    before = tl.sum(tl.where(mine_E, until_E - count_E, 0), 0)
    first = tl.sum(tl.where(mine_E, start_E, 0), 0) + (block - before) * M
    return first, tl.sum(tl.where(mine_E, end_E, 0), 0), group
