"""FP8 experts in Triton: grouped GEMM of E4M3 rows with E4M3 expert weights, and the fused MoE of an engine.

Shapes: T tokens, k experts per token, R = T * k rows, E experts, N out, K in, D features, I intermediate, G blocks of
inputs with a scale; a tile has n rows of a weight, m rows of tokens and 128 inputs; P blocks of m rows.

As in ``fp8_gemm`` the weight is the left operand of the tensor cores and blocks of 128 inputs are scaled and added in
float32 in ascending order, so a row's result does not depend on the tile or on the other rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.moe.fused_moe import combine_choices, load_tile, place_rows
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.quantized.activation_quant import quantize_rows_fp8
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = ["Fp8ExpertTile", "Fp8ExpertTiles", "fp8_grouped_gemm", "fp8_moe", "select_expert_tiles"]

DEPTH = 128


class Fp8ExpertTile(NamedTuple):
    """Weight rows of a tile, warps and pipeline stages."""

    rows: int
    warps: int
    stages: int


class Fp8ExpertTiles(NamedTuple):
    """Tokens of a tile, and the tiles of the first GEMM and of any other: down, and those of training."""

    tokens: int
    first: Fp8ExpertTile
    down: Fp8ExpertTile


# By the most rows per expert on average. The tile of a first GEMM that quantizes its results has 128 rows.
TILES: tuple[tuple[float, Fp8ExpertTiles], ...] = (
    (2.0, Fp8ExpertTiles(16, Fp8ExpertTile(128, 4, 3), Fp8ExpertTile(64, 4, 5))),
    (9.0, Fp8ExpertTiles(16, Fp8ExpertTile(128, 4, 3), Fp8ExpertTile(128, 4, 3))),
    (26.0, Fp8ExpertTiles(32, Fp8ExpertTile(128, 8, 3), Fp8ExpertTile(128, 4, 3))),
    # With 128 tokens the accumulators of a gate and its values do not fit the registers: five times slower.
    (float("inf"), Fp8ExpertTiles(64, Fp8ExpertTile(128, 8, 3), Fp8ExpertTile(128, 4, 3))),
)


@cache
def select_expert_tiles(rows_per_expert: float) -> Fp8ExpertTiles:
    """The tiles that are likely the fastest."""
    return next(tiles for most, tiles in TILES if rows_per_expert <= most)


def fp8_grouped_gemm(x: QuantizedActivation, weight: QuantizedTensor, rows: SortedRows) -> Tensor:
    """Rows sorted by expert times their expert's weight, in the rows' dtype."""
    count, experts = len(x.data), weight.data.shape[0]
    out_RN = torch.empty(count, weight.data.shape[1], dtype=x.dtype, device=x.data.device)
    if count:
        tiles = select_expert_tiles(count / experts)
        places = place_rows(rows.group_R.unsqueeze(1), experts, tiles.tokens)
        _launch(x, weight, out_RN, None, places, tiles.down, reads_rows=True, writes_rows=True)
    return out_RN


def fp8_moe(
    x: QuantizedActivation,
    weights_Tk: Tensor,
    experts_Tk: Tensor,
    first: QuantizedTensor,
    down: QuantizedTensor,
    activation: ActivationKind,
) -> Tensor:
    """The weighted sum of each token's experts, for inference: two grouped GEMMs, quantized in between."""
    (tokens, per_token), (experts, width, size) = experts_Tk.shape, down.data.shape
    if not tokens:
        return torch.empty(tokens, width, dtype=x.dtype, device=x.data.device)
    tiles = select_expert_tiles(experts_Tk.numel() / experts)
    places = place_rows(experts_Tk, experts, tiles.tokens)
    padded = places[0].numel()
    device = x.data.device
    fuses = first.column_block == DEPTH and size % DEPTH == 0
    if fuses:
        inner = QuantizedActivation(
            torch.empty(padded, size, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(size // DEPTH, padded, dtype=torch.float32, device=device).t(),
            DEPTH,
            x.dtype,
        )
        _launch(
            x,
            first,
            inner.data,
            inner.scale,
            places,
            tiles.first,
            reads_rows=True,
            writes_rows=False,
            per_token=per_token,
            activation=activation,
            size=size,
        )
    else:
        inner_PI = torch.empty(padded, size, dtype=x.dtype, device=device)
        _launch(
            x,
            first,
            inner_PI,
            None,
            places,
            tiles.first,
            reads_rows=True,
            writes_rows=False,
            per_token=per_token,
            activation=activation,
            size=size,
        )
        inner = quantize_rows_fp8(inner_PI, down.format)
    out_RD = torch.empty(tokens * per_token, width, dtype=x.dtype, device=device)
    _launch(inner, down, out_RD, None, places, tiles.down, reads_rows=False, writes_rows=True)
    return combine_choices(out_RD, weights_Tk)


def _launch(
    x: QuantizedActivation,
    weight: QuantizedTensor,
    out: Tensor,
    out_scale: Tensor | None,
    places: tuple[Tensor, Tensor],
    tile: Fp8ExpertTile,
    *,
    reads_rows: bool,
    writes_rows: bool,
    per_token: int = 1,
    activation: ActivationKind | None = None,
    size: int = 0,
) -> None:
    """One grouped GEMM. Rows of tokens are read, and results written, at their row or at their place in a block."""
    rows_PM, expert_P = places
    columns, depth = out.shape[1], x.data.shape[1]
    per_block = x.columns < depth or weight.column_block < depth
    assert not per_block or x.columns == weight.column_block == DEPTH, "blocks of inputs must be 128 wide"
    gated = activation is not None and weight.data.shape[1] == 2 * size
    rows = len(x.data) * per_token if reads_rows else len(out)
    with device_guard(x.data):
        _fp8_expert_kernel[(triton.cdiv(columns, tile.rows), len(expert_P))](
            weight.data,
            x.data,
            weight.scale,
            x.scale,
            out,
            out_scale,
            rows_PM,
            expert_P,
            columns,
            depth,
            rows,
            rows_PM.numel(),
            weight.scale.stride(0),
            weight.scale.stride(1),
            x.scale.stride(0),
            x.scale.stride(1),
            PER_TOKEN=per_token,
            ACTIVATION=activation or "",
            GATED=gated,
            READS_ROWS=reads_rows,
            WRITES_ROWS=writes_rows,
            QUANTIZES=out_scale is not None,
            POWER_OF_TWO=weight.format.power_of_two,
            ROW_BLOCK=weight.row_block,
            # All rows of a tile have one scale.
            ONE_SCALE=weight.row_block % tile.rows == 0 and columns % weight.row_block == 0,
            PER_BLOCK=per_block,
            EVEN=depth % DEPTH == 0,
            M=rows_PM.shape[1],
            N=tile.rows,
            K=DEPTH,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **pdl_options(x.data.device),
        )


_jit_any_rows: Any = jit(do_not_specialize=["rows", "padded"])


@_jit_any_rows
def _fp8_expert_kernel(
    weight_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    columns: tl.tensor,
    depth: tl.tensor,
    rows: tl.tensor,
    padded: tl.tensor,
    scale_stride_e: tl.tensor,
    scale_stride_n: tl.tensor,
    x_scale_stride_t: tl.tensor,
    x_scale_stride_g: tl.tensor,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    READS_ROWS: tl.constexpr,
    WRITES_ROWS: tl.constexpr,
    QUANTIZES: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """A block's rows times its expert's weight; out-of-range rows are computed with valid data and not stored."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    block = tl.program_id(1)
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    place_m = block * M + tl.arange(0, M)
    row_m = tl.load(rows_ptr + place_m)
    source_m = tl.where(row_m < rows, row_m // PER_TOKEN, 0) if READS_ROWS else place_m
    column_n = tl.program_id(0) * N + tl.arange(0, N)
    valid_n = tl.minimum(column_n, columns - 1)
    first_n = tl.program_id(0) * N + tl.zeros((1,), tl.int32) if ONE_SCALE else valid_n
    scale_row_n, up_scale_row_n = first_n // ROW_BLOCK, (columns + first_n) // ROW_BLOCK
    weight_ptr += expert * (2 * columns if GATED else columns) * depth
    weight_scale_ptr += expert * scale_stride_e
    x_scale_m = x_scale_ptr + source_m * x_scale_stride_t
    x_mk = x_ptr + source_m.to(tl.int64)[:, None] * depth + tl.arange(0, K)[None, :]
    gate_nm, up_nm = _multiply(
        x_mk,
        x_scale_m,
        weight_ptr + valid_n.to(tl.int64)[:, None] * depth + tl.arange(0, K)[None, :],
        weight_scale_ptr + scale_row_n * scale_stride_n,
        columns.to(tl.int64) * depth,
        weight_scale_ptr + up_scale_row_n * scale_stride_n,
        x_scale_stride_g,
        depth,
        GATED,
        PER_BLOCK,
        EVEN,
        M,
        N,
        K,
    )
    dtype = tl.bfloat16 if QUANTIZES else out_ptr.dtype.element_ty  # pyright: ignore
    out_nm = gate_nm.to(dtype)
    if ACTIVATION != "":
        out_nm = activate_and_multiply(out_nm, up_nm.to(dtype), ACTIVATION, GATED)
    target_m = row_m if WRITES_ROWS else place_m
    at_mn = out_ptr + target_m.to(tl.int64)[:, None] * columns + column_n[None, :]
    valid_mn = (row_m < rows)[:, None] & (column_n < columns)[None, :]
    if QUANTIZES:
        scales = (out_scale_ptr, place_m, row_m < rows, padded)
        _store_quantized(tl.trans(out_nm).to(tl.float32), at_mn, valid_mn, *scales, M, N, POWER_OF_TWO)
    else:
        tl.store(at_mn, tl.trans(out_nm), valid_mn)


@jit
def _multiply(
    x_mk: tl.tensor,
    x_scale_m: tl.tensor,
    gate_nk: tl.tensor,
    gate_scale_n: tl.tensor,
    up_offset: tl.tensor,
    up_scale_n: tl.tensor,
    x_scale_stride_g: tl.tensor,
    depth: tl.tensor,
    GATED: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """The products of a tile with the rows at ``gate_nk`` and, if gated, with those ``up_offset`` behind them."""
    gate_nm, up_nm = tl.zeros((N, M), tl.float32), tl.zeros((N, M), tl.float32)
    blocks = tl.cdiv(depth, K)
    # Scales are loaded a block ahead: the tensor cores would wait for them.
    next_m, next_gate_n, next_up_n = _load_scales(x_scale_m, gate_scale_n, up_scale_n, 0, 0, GATED)
    for block in range(0, blocks):
        scale_m = next_m
        gate_scale, up_scale = next_gate_n, next_up_n
        if PER_BLOCK:
            ahead = tl.minimum(block + 1, blocks - 1)
            next_m, next_gate_n, next_up_n = _load_scales(
                x_scale_m, gate_scale_n, up_scale_n, ahead, ahead * x_scale_stride_g, GATED
            )
        x = load_tile(x_mk, block * K, depth, EVEN, K)
        gate = tl.dot(load_tile(gate_nk, block * K, depth, EVEN, K), x.T)
        if PER_BLOCK:
            gate *= gate_scale[:, None] * scale_m[None, :]
        gate_nm += gate
        if GATED:
            up = tl.dot(load_tile(gate_nk + up_offset, block * K, depth, EVEN, K), x.T)
            if PER_BLOCK:
                up *= up_scale[:, None] * scale_m[None, :]
            up_nm += up
    if not PER_BLOCK:
        gate_nm *= next_gate_n[:, None] * next_m[None, :]
        if GATED:
            up_nm *= next_up_n[:, None] * next_m[None, :]
    return gate_nm, up_nm


@jit
def _load_scales(
    x_scale_m: tl.tensor,
    gate_scale_n: tl.tensor,
    up_scale_n: tl.tensor,
    offset: tl.tensor,
    x_offset: tl.tensor,
    GATED: tl.constexpr,
) -> Any:
    """Scales of the tokens and of the rows of a weight; the last are not used unless ``GATED``."""
    gate_n = tl.load(gate_scale_n + offset)
    up_n = tl.load(up_scale_n + offset) if GATED else gate_n
    return tl.load(x_scale_m + x_offset), gate_n, up_n


@jit
def _store_quantized(
    out_mn: tl.tensor,
    at_mn: tl.tensor,
    valid_mn: tl.tensor,
    scale_ptr: tl.tensor,
    place_m: tl.tensor,
    valid_m: tl.tensor,
    padded: tl.tensor,
    M: tl.constexpr,
    N: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
) -> None:
    """Store a tile, which is one block of every row, as E4M3 with its scales."""
    scale_m = tl.div_rn(tl.max(tl.abs(out_mn), 1), tl.full((M,), 448.0, tl.float32))
    scale_m = tl.where(scale_m == 0.0, 1.0, scale_m)
    if POWER_OF_TWO:
        # The next power of two, from the bits.
        scale_m = ((scale_m.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    quotient_mn = tl.div_rn(out_mn, tl.broadcast_to(scale_m[:, None], (M, N)))
    tl.store(at_mn, quotient_mn.to(tl.float8e4nv), valid_mn)
    tl.store(scale_ptr + tl.program_id(0) * padded + place_m, scale_m, valid_m)
