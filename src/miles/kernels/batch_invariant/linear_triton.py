"""Triton GEMM with a fixed summation order: tile sizes change the speed and no bits.

Shapes: T rows, K in, N out, E groups of rows that have a weight each; M rows, N columns and K depth of a tile.

An output is one sum over all its inputs in ascending order, one tensor-core step at a time, in float32 and rounded
once. It does not depend on which rows and columns share a tile, nor on the tile's depth: the last steps add zeros.
Tiles of few rows use another MMA instruction than those of many. On the architectures named here both were found to
give the same bits (``benchmarks/bench_batch_invariant_linear.py``); elsewhere every tile has as many rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.runtime.triton_compat import (
    HAVE_TRITON,
    count_sms,
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton,
)


class GemmTile(NamedTuple):
    """Rows, columns and depth of a tile, warps and pipeline stages.

    With ``copied`` TMA loads the tiles, and with ``stays`` programs are persistent.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    tma: bool = False
    persistent: bool = False


# Compute capabilities (major) on which both MMA instructions agree, and the rows of all tiles elsewhere.
BITWISE_EQUAL_MMA, MMA_ROWS = (8, 9), 64
# Float32 is multiplied without tensor cores.
FP32_TILE = GemmTile(64, 64, 32, 4, 2)
# Relative cost of TMA tiles, measured on an H200 (``benchmarks/tune_batch_invariant_linear.py``).
DENSE: tuple[tuple[float, GemmTile], ...] = (
    (1.75, GemmTile(256, 128, 64, 8, 4, tma=True)),
    (1.0, GemmTile(128, 128, 64, 8, 5, tma=True)),
    (0.65, GemmTile(128, 64, 128, 4, 4, tma=True)),
    (0.62, GemmTile(64, 128, 64, 4, 6, tma=True)),
    (0.42, GemmTile(64, 64, 128, 4, 5, tma=True)),
    (0.33, GemmTile(64, 32, 256, 4, 4, tma=True)),
    (0.28, GemmTile(64, 16, 256, 4, 5, tma=True)),
)
# Persistent programs pay off if each has several tiles.
PERSISTENT, PERSISTENT_ROWS = (1.55, GemmTile(128, 256, 64, 8, 3, tma=True, persistent=True)), 2048
# Sixteen rows and fewer, by the least number of outputs.
SMALL_M: tuple[tuple[int, GemmTile], ...] = (
    (32768, GemmTile(16, 128, 128, 4, 4)),
    (5000, GemmTile(16, 32, 256, 4, 4)),
    (2048, GemmTile(64, 64, 128, 4, 5, tma=True)),
    (0, GemmTile(64, 32, 256, 4, 4, tma=True)),
)
# Groups of rows, and operands that TMA does not support, by the most rows (per group): ever fewer columns, until there
# are enough tiles for the GPU.
GROUPED: tuple[tuple[int, tuple[GemmTile, ...]], ...] = (
    (
        16,
        (
            GemmTile(16, 128, 128, 4, 4),
            GemmTile(16, 64, 128, 4, 5),
            GemmTile(16, 32, 128, 4, 6),
            GemmTile(16, 16, 256, 2, 5),
        ),
    ),
    (
        64,
        (
            GemmTile(64, 128, 64, 4, 4),
            GemmTile(64, 64, 128, 4, 4),
            GemmTile(64, 32, 128, 4, 4),
            GemmTile(64, 16, 128, 4, 5),
        ),
    ),
    (
        256,
        (
            GemmTile(128, 128, 64, 8, 4),
            GemmTile(64, 128, 64, 4, 4),
            GemmTile(64, 64, 64, 4, 4),
            GemmTile(64, 32, 128, 4, 4),
        ),
    ),
)
GROUPED_LARGE: tuple[GemmTile, ...] = (
    GemmTile(128, 256, 64, 8, 3, tma=True, persistent=True),
    GemmTile(128, 128, 64, 8, 4, tma=True),
    GemmTile(64, 128, 64, 4, 4),
    GemmTile(64, 64, 64, 4, 4),
)
GROUPED_LARGE_NO_TMA: tuple[GemmTile, ...] = (
    GemmTile(128, 128, 64, 8, 4),
    GemmTile(64, 128, 64, 4, 4),
    GemmTile(64, 64, 64, 4, 4),
)
# The most rows for which the GEMM applies the gate itself, and its tile.
FUSED_GATE_ROWS, FUSED_GATE_TILE = 16, GemmTile(16, 32, 128, 4, 5)
# Row tiles that are scheduled together, to share weights in the L2 cache.
_GROUP_M = 8


def gemm(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Rows times a weight, plus a bias in float32, rounded once to ``dtype``."""
    return launch_gemm(x_TK, weight_NK.unsqueeze(0), bias_N, None, dtype)


def can_fuse_gate(x_TK: Tensor) -> bool:
    """Whether the GEMM applies the gated activation itself."""
    half = x_TK.dtype != torch.float32
    return (
        use_triton(x_TK)
        and half
        and x_TK.ndim == 2
        and len(x_TK) <= FUSED_GATE_ROWS
        and is_mma_bitwise_equal(x_TK.device)
    )


def gated_gemm(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, kind: ActivationKind) -> Tensor:
    """``gemm`` followed by the gated activation; rounded as by separate kernels."""
    return launch_gemm(x_TK, weight_NK.unsqueeze(0), bias_N, None, x_TK.dtype, kind=kind)


def launch_gemm(
    x_TK: Tensor,
    weight_ENK: Tensor,
    bias: Tensor | None,
    ends_E: Tensor | None,
    dtype: torch.dtype,
    tile: GemmTile | None = None,
    kind: ActivationKind | None = None,
) -> Tensor:
    """Rows times their group's weight; without ``ends_E`` (cumulative group sizes) there is one group.

    ``tile`` is for benchmarks. With ``kind`` the second half of the outputs gates the first.
    """
    x_TK, weight_ENK = x_TK.contiguous(), weight_ENK.contiguous()
    assert x_TK.dtype == weight_ENK.dtype and x_TK.dtype.itemsize in (2, 4)
    (rows, inputs), groups = x_TK.shape, len(weight_ENK) if ends_E is not None else 1
    outputs = weight_ENK.shape[1] // (1 if kind is None else 2)
    out_TN = torch.empty(rows, outputs, dtype=dtype, device=x_TK.device)
    if not (rows and outputs):
        return out_TN
    tile = tile or (select_tile(x_TK, weight_ENK, ends_E is not None) if kind is None else FUSED_GATE_TILE)
    tile = _limit_stages(tile, x_TK, kind is not None)
    # Outputs are staged in shared memory beside the inputs, where wide ones would not fit.
    tile = tile if dtype.itemsize == 2 else tile._replace(persistent=False)
    blocks = _count_row_tiles(rows, groups, tile)
    tiles = blocks * triton.cdiv(outputs, tile.columns)
    x, weight = x_TK, weight_ENK
    if tile.tma:
        x = _tensor_descriptor(x_TK, tile.rows, tile.depth)
        weight = _tensor_descriptor(weight_ENK.flatten(0, 1), tile.columns, tile.depth)
    assert kind is None or not tile.tma
    with device_guard(x_TK):
        tensors = (x, weight, bias, ends_E, out_TN)
        scalars = (rows, inputs, outputs, groups, blocks, tiles)
        _gemm_kernel[(min(tiles, count_sms(x_TK.device)) if tile.persistent else tiles,)](
            *tensors,
            *scalars,
            EVEN_K=inputs % tile.depth == 0,
            BIAS=bias is not None,
            GROUPS=0 if ends_E is None else triton.next_power_of_2(groups),
            ACTIVATION=kind or "",
            TMA=tile.tma,
            PERSISTENT=tile.persistent,
            M=tile.rows,
            N=tile.columns,
            K=tile.depth,
            GROUP_M=_GROUP_M,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **pdl_options(x_TK.device),
        )
    return out_TN


def list_tiles() -> list[GemmTile]:
    """Every half-precision tile that may be selected."""
    grouped_tiles = [tile for _, tiles in GROUPED for tile in tiles]
    return list(
        dict.fromkeys(
            [
                *(t for _, t in (*DENSE, PERSISTENT, *SMALL_M)),
                *grouped_tiles,
                *GROUPED_LARGE,
                *GROUPED_LARGE_NO_TMA,
                FUSED_GATE_TILE,
            ]
        )
    )


def select_tile(x_TK: Tensor, weight_ENK: Tensor, grouped: bool) -> GemmTile:
    """The tile that is likely the fastest."""
    if x_TK.dtype == torch.float32:
        return FP32_TILE
    rows = len(x_TK)
    groups = len(weight_ENK) if grouped else 1
    outputs = weight_ENK.shape[1]
    has_tma, sms = _supports_tma(x_TK, weight_ENK), count_sms(x_TK.device)
    bitwise_equal = is_mma_bitwise_equal(x_TK.device)
    if not grouped and has_tma and rows <= 16 and bitwise_equal:
        return next(tile for least, tile in SMALL_M if outputs >= least)
    if not grouped and has_tma:
        # A wave of tiles takes as long as one tile.
        candidates = (*DENSE, PERSISTENT) if rows > PERSISTENT_ROWS else DENSE
        costs = (
            (-(-_count_row_tiles(rows, 1, tile) * -(-outputs // tile.columns) // sms) * cost, tile)
            for cost, tile in candidates
        )
        return min(costs)[1]
    grouped_tiles = (
        tiles for most, tiles in GROUPED if -(-rows // groups) <= most and (bitwise_equal or tiles[0].rows >= MMA_ROWS)
    )
    choice = next(grouped_tiles, GROUPED_LARGE if has_tma else GROUPED_LARGE_NO_TMA)
    sufficient = (tile for tile in choice if _count_row_tiles(rows, groups, tile) * -(-outputs // tile.columns) >= sms)
    return next(sufficient, choice[-1])


def _count_row_tiles(rows: int, groups: int, tile: GemmTile) -> int:
    """The most row tiles: a group's rows begin a tile."""
    return min(rows, -(-rows // tile.rows) if groups == 1 else rows // tile.rows + groups)


@cache
def _shared_memory(device: torch.device) -> int:
    """The shared memory of a program in bytes."""
    if device.type != "cuda":
        return 1 << 20
    index = torch.cuda.current_device() if device.index is None else device.index
    driver: Any = triton.runtime.driver.active
    return driver.utils.get_device_properties(index)["max_shared_mem"]


def _limit_stages(tile: GemmTile, x_TK: Tensor, gated: bool) -> GemmTile:
    """The tile with no more stages than shared memory allows."""
    stage_bytes = (tile.rows + tile.columns * (2 if gated else 1)) * tile.depth * x_TK.dtype.itemsize
    return tile._replace(stages=max(2, min(tile.stages, _shared_memory(x_TK.device) // stage_bytes)))


@cache
def is_mma_bitwise_equal(device: torch.device) -> bool:
    """Whether tiles of few and of many rows give the same bits on this GPU."""
    # ROCm reports MI300 as (9, 4).
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device)[0] in BITWISE_EQUAL_MMA


def _supports_tma(x_TK: Tensor, weight_ENK: Tensor) -> bool:
    """Whether TMA is available and supports these tensors, whose rows must be 16-byte aligned."""
    addresses = (x_TK.data_ptr(), weight_ENK.data_ptr(), x_TK.shape[1] * x_TK.dtype.itemsize)
    return bool(pdl_options(x_TK.device)["PDL"]) and all(address % 16 == 0 for address in addresses)


def _tensor_descriptor(x_RK: Tensor, rows: int, depth: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x_RK, [rows, depth])


# Specializing on the number of rows would compile kernels in the middle of a step.
_jit_any_rows: Any = triton.jit(do_not_specialize=["rows", "groups", "blocks", "tiles"]) if HAVE_TRITON else jit


@_jit_any_rows
def _gemm_kernel(
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
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    PERSISTENT: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        # A trainer's weights may be written by the previous launch: nothing is read early.
        gdc_launch_dependents()
        gdc_wait()
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=GROUPS == 0):  # pyright: ignore
            _compute_tile(
                tile,
                x,
                weight,
                bias_ptr,
                ends_ptr,
                out_ptr,
                rows,
                inputs,
                outputs,
                groups,
                blocks,
                EVEN_K,
                BIAS,
                GROUPS,
                ACTIVATION,
                TMA,
                M,
                N,
                K,
                GROUP_M,
            )
    else:
        _compute_tile(
            tl.program_id(0),
            x,
            weight,
            bias_ptr,
            ends_ptr,
            out_ptr,
            rows,
            inputs,
            outputs,
            groups,
            blocks,
            EVEN_K,
            BIAS,
            GROUPS,
            ACTIVATION,
            TMA,
            M,
            N,
            K,
            GROUP_M,
        )


@jit
def _compute_tile(
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
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    block, column = _tile_index(tile, blocks, tl.cdiv(outputs, N), GROUP_M)
    tiles = (x, weight, bias_ptr, out_ptr, inputs, outputs)
    if GROUPS > 0:
        first, end, group = _find_group_rows(block, ends_ptr, groups, GROUPS, M)
        if first < end:
            _multiply_tile(first, end, group, column, *tiles, EVEN_K, BIAS, ACTIVATION, TMA, M, N, K)
    else:
        # Without a branch per tile the compiler can prefetch the next one.
        _multiply_tile(block * M, rows, 0, column, *tiles, EVEN_K, BIAS, ACTIVATION, TMA, M, N, K)


@jit
def _multiply_tile(
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
    EVEN_K: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> None:
    """Out-of-range rows and columns are computed with valid data or zeros, and not stored."""
    row_M = first + tl.arange(0, M)
    column_N = column * N + tl.arange(0, N)
    k_K = tl.arange(0, K)
    valid_M1, valid_N1 = (row_M < end)[:, None], (column_N < outputs)[:, None]
    sum_MN = tl.zeros((M, N), tl.float32)
    up_MN = tl.zeros((M, N), tl.float32)
    if TMA:
        for address in range(0, inputs, K):
            a_MK, b_NK = x.load([first, address]), weight.load([group * outputs + column * N, address])  # pyright: ignore
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN)
    else:
        x_MK = x + row_M.to(tl.int64)[:, None] * inputs + k_K[None, :]
        weight_NK = weight + (group * outputs + column_N).to(tl.int64)[:, None] * inputs + k_K[None, :]
        for address in range(0, inputs, K):
            valid_MK, valid_NK = valid_M1, valid_N1
            if not EVEN_K:
                valid_1K = (address + k_K < inputs)[None, :]
                valid_MK, valid_NK = valid_M1 & valid_1K, valid_N1 & valid_1K
            a_MK = tl.load(x_MK + address, valid_MK, other=0.0)
            b_NK = tl.load(weight_NK + address, valid_NK, other=0.0)
            sum_MN = tl.dot(a_MK, b_NK.T, sum_MN, input_precision="ieee")
            if ACTIVATION != "":
                c_NK = tl.load(weight_NK + address + outputs.to(tl.int64) * inputs, valid_NK, other=0.0)
                up_MN = tl.dot(a_MK, c_NK.T, up_MN, input_precision="ieee")
    out_dtype = out_ptr.dtype.element_ty
    out_MN = _round_with_bias(sum_MN, bias_ptr, group * outputs + column_N, column_N < outputs, out_dtype, BIAS)
    if ACTIVATION != "":
        up_MN = _round_with_bias(up_MN, bias_ptr, outputs + column_N, column_N < outputs, out_dtype, BIAS)
        out_MN = activate_and_multiply(out_MN, up_MN, ACTIVATION, True)
    at_MN = out_ptr + row_M.to(tl.int64)[:, None] * outputs + column_N[None, :]
    tl.store(at_MN, out_MN, valid_M1 & (column_N < outputs)[None, :])


@jit
def _round_with_bias(
    sum_MN: tl.tensor,
    bias_ptr: tl.tensor,
    index_N: tl.tensor,
    valid_N: tl.tensor,
    OUT_DTYPE: tl.dtype,
    BIAS: tl.constexpr,
) -> tl.tensor:
    """A sum with its bias, in the output dtype."""
    if BIAS:
        sum_MN += tl.load(bias_ptr + index_N, valid_N, other=0.0).to(tl.float32)[None, :]
    return sum_MN.to(OUT_DTYPE)


@jit
def _tile_index(tile: tl.tensor, blocks: tl.tensor, columns: tl.tensor, GROUP_M: tl.constexpr) -> tuple:
    """Tile order such that tiles running at the same time share rows and weights."""
    tiles_per_group = GROUP_M * columns
    first_block = (tile // tiles_per_group) * GROUP_M
    group_rows = tl.minimum(blocks - first_block, GROUP_M)
    return first_block + (tile % tiles_per_group) % group_rows, (tile % tiles_per_group) // group_rows


@jit
def _find_group_rows(
    block: tl.tensor, ends_ptr: tl.tensor, groups: tl.tensor, GROUPS: tl.constexpr, M: tl.constexpr
) -> tuple:
    """The rows of a block (first, end of its group) and its group; an empty range if there is no such block."""
    group_E = tl.arange(0, GROUPS)
    valid_E = group_E < groups
    end_E = tl.load(ends_ptr + group_E, valid_E, other=0)
    start_E = tl.load(ends_ptr + group_E - 1, valid_E & (group_E > 0), other=0)
    count_E = tl.where(valid_E, (end_E - start_E + M - 1) // M, 0)
    blocks_until_E = tl.cumsum(count_E, 0)
    group = tl.sum((valid_E & (blocks_until_E <= block)).to(tl.int32), 0)
    is_mine_E = group_E == group
    blocks_before = tl.sum(tl.where(is_mine_E, blocks_until_E - count_E, 0), 0)
    first = tl.sum(tl.where(is_mine_E, start_E, 0), 0) + (block - blocks_before) * M
    return first, tl.sum(tl.where(is_mine_E, end_E, 0), 0), group
